"""Thaws and freezes parts of a model at given steps of a `Trainer` run, also of one that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from .freezing import apply_choice, choose, training_table


logger = logging.get_logger(__name__)

OPTIONS = ("text", "vision", "connector", "blocks", "names")


class FreezeSchedule(TrainerCallback, ExportableState):
    """Calls `freeze` at given steps: `Trainer(..., callbacks=[FreezeSchedule({0: {}, 0.5: {"text": False}})])`.

    Args:
        stages (`dict`): for the beginning of each stage, the keyword arguments of `freeze` that hold until the next. A
            beginning is a number of completed steps (`int`) or a share of all steps (`float` below 1). The first stage
            begins at 0.

    The optimizer holds the parameters of all stages. `Trainer` makes such an optimizer by itself; make your own from
    `parameter_groups(model, ..., include_frozen=True)`. It needs memory for a part from the step on at which that is
    thawed, and does not decay it before. The learning rate follows the schedule of the whole run.

    Raises:
        TypeError: for stages that are no `dict`, or a beginning that is no number.
        ValueError: for beginnings that do not start at 0 or do not increase, for an unknown argument of `freeze`; when
            the run starts, for anything that `freeze` refuses, an optimizer without some of the parameters, or a run of
            several processes: DDP and FSDP fix what trains when they wrap the model.
    """

    def __init__(self, stages: Mapping[int | float, Mapping[str, Any]] | Iterable[Any]):
        self.stages = _checked(stages)
        self._active: int | None = None
        self._begins: list[int] = []
        self._choices: list[dict[str, bool]] = []

    def state(self) -> dict[str, Any]:
        """What `trainer_state.json` tells of the schedule."""
        return {"args": {"stages": [[at, options] for at, options in self.stages.items()]}, "attributes": {}}

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """`Trainer` makes its optimizer of what trains, so everything trains here that will train in any stage."""
        if args.world_size > 1:
            raise ValueError(
                f"Expected a run of one process for a `FreezeSchedule`, got {args.world_size}: DDP and FSDP fix what "
                "trains when they wrap the model. Make a run of each stage, with `freeze` before it."
            )
        apply_choice(model, self._choose(model))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        needed = self._choose(model)  # again: Trainer may have a new model (`model_init`), or got this callback late
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        missing = [name for name, weight in model.named_parameters() if needed[name] and id(weight) not in held]
        if missing:
            raise ValueError(
                "Expected an optimizer with the parameters of all stages of the `FreezeSchedule`, got one without "
                f"{missing[0]} and {len(missing) - 1} others. Pass the schedule as `Trainer(callbacks=[...])`, or make "
                "the optimizer from `parameter_groups(model, ..., include_frozen=True)`."
            )
        self._begins = [at if isinstance(at, int) else round(at * state.max_steps) for at in self.stages]
        if any(one >= other for one, other in zip(self._begins, self._begins[1:])):
            raise ValueError(
                f"Expected stages that begin one after the other, got {list(self.stages)}, which are the steps "
                f"{self._begins} of {state.max_steps}."
            )
        if self._begins[-1] >= state.max_steps:
            logger.warning(f"The run ends after {state.max_steps} steps, but a stage begins at {self._begins[-1]}.")
        saved: Any = state.stateful_callbacks or {}
        before = saved.get(type(self).__name__)
        if state.global_step and before is not None and before != self.state():
            logger.warning("The checkpoint was made with other stages. The stages given now are used.")
        self._active = None
        self._follow(state, model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._follow(state, model)

    def _choose(self, model: Any) -> dict[str, bool]:
        """Notes what trains in each stage. Returns what trains in any."""
        self._choices = [choose(model, **options) for options in self.stages.values()]
        return {name: any(choice[name] for choice in self._choices) for name in self._choices[0]}

    def _follow(self, state: TrainerState, model: Any) -> None:
        stage = sum(begin <= state.global_step for begin in self._begins) - 1
        if stage == self._active:
            return
        apply_choice(model, self._choices[stage])
        self._active = stage
        if state.is_world_process_zero:
            print(f"From step {state.global_step} on:\n{training_table(model)}")


def _checked(stages: Any) -> dict[int | float, dict[str, Any]]:
    try:
        pairs = [(at, dict(options)) for at, options in (stages.items() if isinstance(stages, Mapping) else stages)]
    except (TypeError, ValueError):
        raise TypeError(
            f"`stages` must be a dict such as {{0: {{}}, 0.5: {{'text': False}}}}, got {stages!r}."
        ) from None
    for at, options in pairs:
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            raise TypeError(f"`stages`: expected beginnings that are numbers, got {at!r}.")
        if isinstance(at, float) and not 0 <= at < 1:
            raise ValueError(f"`stages`: expected a step (an integer) or a share from 0 to below 1, got {at!r}.")
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise ValueError(f"`stages`: expected arguments of `freeze`, {list(OPTIONS)}, got {unknown}.")
    if not pairs or pairs[0][0] != 0:
        raise ValueError(f"`stages`: expected a first stage at 0, got {stages!r}.")
    for kind in (int, float):
        given = [at for at, _ in pairs if isinstance(at, kind)]
        if sorted(set(given)) != given:
            raise ValueError(f"`stages`: expected beginnings that increase, got {[at for at, _ in pairs]}.")
    if len(dict(pairs)) < len(pairs):  # 0 and 0.0
        raise ValueError(f"`stages`: expected one stage for each beginning, got {[at for at, _ in pairs]}.")
    return dict(pairs)


__all__ = ["FreezeSchedule"]
