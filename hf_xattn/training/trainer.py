"""The `Trainer` of `hf-xattn train`. It differs from transformers' `Trainer` in three ways.

**Learning rates.** AdamW moves each weight by about the learning rate at each step, even if its gradient is small. The
output projections of fresh blocks start at zero and have far to go, so they need a high rate. While they are near zero,
the gradients of queries, keys, values and connector are little more than noise. A high rate would soon move these
weights by more than their own size, and a start from words (`align_connector`) would be lost before it is of use. So
all weights that do not start at zero may get only a share of the rate.

**Logits.** A vector of logits is as wide as the vocabulary. For SmolLM2-135M, the logits of one token take as many
multiplications as eight of the thirty layers. They are computed only at positions that predict a label, and not at each
token of a prompt. The loss does not change, because it reads no other logits.

**Text answers** when a chat holds an image are trained to be those of the model without the image (see
`kept_text.py`).
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from ..decoders.loss import IGNORED
from .freezing import starts_at_zero
from .kept_text import DISTILLED, TEACHER
from .picture_use import at_labels, keeps_logits, shifted


def check_started_rate(model: nn.Module, started_rate: float) -> None:
    """Raises a `ValueError` if no weight starts at zero: the share of the rate would then slow down all weights."""
    if started_rate != 1.0 and not any(weight.requires_grad for weight in starts_at_zero(model)):
        raise ValueError(
            "`--started-rate`: expected a model whose output projections start at zero, got one with `zero_init=False`."
        )


def kl_of_answers(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher_logits: torch.Tensor,
    teacher_labels: torch.Tensor,
) -> tuple[torch.Tensor, int]:
    """Returns the sum of KL(teacher || student) over the answer tokens, in nats, and the number of these tokens.

    Args:
        logits, teacher_logits (`torch.Tensor`): `(rows, positions, vocabulary)`. The two may have different positions.
        labels, teacher_labels (`torch.LongTensor`): `(rows, positions)`: the tokens that the logits predict, and -100
            at positions that predict no answer token. Both hold the same tokens in the same order.
    """
    own, others = (
        each[chosen != IGNORED].to(torch.promote_types(each.dtype, torch.float32))
        for each, chosen in ((logits, labels), (teacher_logits, teacher_labels))
    )
    student, teacher = own.log_softmax(-1), others.log_softmax(-1)
    # A token that the teacher never says adds 0. With logits of -inf the product would be 0 * inf, which is NaN.
    shares = teacher.exp()
    return torch.where(shares > 0, shares * (teacher - student), 0).sum(), len(own)


class RunTrainer(Trainer):
    """A `Trainer` for batches of [`XAttnDataCollator`], and of [`DistillingCollator`] with `distill_text`.

    The log has `rows_per_second`; `data_wait`, the share of the time in which steps wait for their rows; and `text_kl`,
    the mean KL of a text token since the last log. A loss that is not finite ends the run.

    All logits are computed in two cases: if the decoder has no `logits_to_keep`, and if one process trains on several
    GPUs, because each GPU would then get a part of the positions.

    Args:
        started_rate (`float`, defaults to 1.0): share of the learning rate for weights that do not start at zero.
        distill_text (`float`, *optional*): weight of the KL in the loss. None: the batches have no text rows to
            distil.
        rows_of_a_step (`int`, defaults to 0): rows that all processes read in a step, for `rows_per_second`.
    """

    def __init__(
        self, *, started_rate: float = 1.0, distill_text: float | None = None, rows_of_a_step: int = 0, **given: Any
    ):
        super().__init__(**given)
        vars(self.model.config).pop("use_cache", None)  # type: ignore[union-attr]  # only the text model's configuration has it
        self.distill_text = distill_text
        self._started_rate, self._rows_of_a_step = started_rate, rows_of_a_step
        text_model: Any = self.model.model.text_model  # type: ignore[union-attr]
        self._keeps = self.args.n_gpu <= 1 and keeps_logits(text_model)
        self._text_kl = torch.zeros(2)  # sum of the KL, and number of tokens, since the last log
        self._waited, self._since, self._step_then = 0.0, 0.0, 0

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the names of `Trainer`, without gates and other vectors. A gate that decays would close its block."""
        small = {name for name, weight in model.named_parameters() if weight.dim() < 2}
        return [name for name in super().get_decay_parameter_names(model) if name not in small]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        if self._started_rate == 1.0:
            return optimizer
        trained: Any = self.model if model is None else model
        new = {id(weight) for weight in starts_at_zero(trained)}
        for group in list(optimizer.param_groups):
            started = [weight for weight in group["params"] if id(weight) not in new]
            group["params"] = [weight for weight in group["params"] if id(weight) in new]
            if started:
                rate = group["lr"] * self._started_rate
                optimizer.add_param_group({**group, "params": started, "lr": rate})
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        if self.distill_text is None or not model.training:
            return super().compute_loss(model, self._at_labels(inputs), return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        distilled = inputs.pop(DISTILLED, None)
        teacher = {name: inputs.pop(f"{TEACHER}{name}", None) for name in ("input_ids", "attention_mask", "labels")}
        target = self._teacher_logits(model, inputs, teacher)
        if distilled is None:
            return super().compute_loss(model, self._at_labels(inputs), return_outputs, num_items_in_batch)
        weight, chosen = self.distill_text, distilled[:, None]
        labels, kept = at_labels(inputs.pop("labels"), self._keeps)
        answers = labels.masked_fill(~chosen, IGNORED)
        inputs |= {"shift_labels": labels.masked_fill(chosen, IGNORED), **kept}

        # `Trainer` treats this like any model whose loss is a mean over the labels of a step, and scales the loss.
        def with_text(**call: Any) -> Any:
            outputs = model(**call, return_dict=True)
            kl, tokens = kl_of_answers(outputs["logits"], answers, target, shifted(teacher["labels"]))
            self._text_kl = self._text_kl.to(kl.device) + torch.stack([kl.detach(), kl.new_tensor(tokens)])
            of_gpus = outputs["loss"].numel()  # `DataParallel` returns one loss a GPU, which `Trainer` adds
            items = torch.as_tensor(num_items_in_batch, device=kl.device).flatten()[0]
            outputs["loss"] = outputs["loss"] + weight * kl / items / of_gpus
            return outputs

        student: Any = with_text
        return super().compute_loss(student, inputs, return_outputs, num_items_in_batch)

    def _at_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Chooses the positions whose logits are computed: those that predict a label in one of the rows."""
        labels, kept = at_labels(inputs["labels"], self._keeps) if "labels" in inputs else (None, None)
        if not kept:
            return inputs
        others = {name: value for name, value in inputs.items() if name != "labels"}
        return {**others, "shift_labels": labels, **kept}

    @torch.no_grad()
    def _teacher_logits(self, model: Any, inputs: dict[str, Any], teacher: dict[str, Any]) -> Any:
        """Returns the logits of the text rows without an image, or None if the batch has no text rows."""
        texts, mask = teacher["input_ids"], teacher["attention_mask"]
        if isinstance(model, DistributedDataParallel):
            model = model.module  # it waits for no other process, so those without text rows do not call it
        elif self.accelerator.num_processes > 1 and texts is None:  # all processes must gather sharded weights
            texts = inputs["input_ids"][:1, :1]
            mask = torch.ones_like(texts)
        return None if texts is None else model(input_ids=texts, attention_mask=mask, return_dict=True)["logits"]

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        labels = inputs["labels"]
        count, rows = (shifted(labels) != IGNORED).sum(), labels.shape[0]
        made: Any = super().prediction_step(model, inputs, *args, **kwargs)
        count = count.to(made[0].device)
        of_a_row = torch.stack([made[0].float() * count, count]) / rows
        self._of_rows.append(self.accelerator.gather_for_metrics(of_a_row.expand(rows, 2).contiguous()).double().cpu())
        return made

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Evaluates as transformers does, but the loss is a mean over labels, as in training.

        transformers' mean over batches would depend on the batch size.
        """
        self._of_rows: list[torch.Tensor] = []
        base: Any = super()
        output = base.evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, count = torch.cat(self._of_rows).sum(0).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / count if count else math.nan
        return output

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, torch.Tensor | int | None]:
        start = time.perf_counter()
        if not self._since:
            self._since, self._step_then = start, self.state.global_step
        samples = super().get_batch_samples(*args, **kwargs)
        self._waited += time.perf_counter() - start
        return samples

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._since:
            seconds = time.perf_counter() - self._since
            rows = (self.state.global_step - self._step_then) * self._rows_of_a_step
            logs |= {"rows_per_second": round(rows / seconds, 2), "data_wait": round(self._waited / seconds, 4)}
            self._waited, self._since = 0.0, 0.0
        if self.distill_text is not None and "loss" in logs:
            kl, tokens = self.accelerator.reduce(self._text_kl.to(self.args.device), "sum").tolist()
            if tokens:
                logs["text_kl"] = float(f"{kl / tokens:.4g}")
            self._text_kl = torch.zeros(2)
        super().log(logs, *args, **kwargs)
        wrong = [name for name in ("loss", "grad_norm") if name in logs and not math.isfinite(float(logs[name]))]
        if wrong:
            raise ValueError(
                f"Expected a finite `{wrong[0]}`, got {float(logs[wrong[0]])} up to step {self.state.global_step}: the "
                f"run has diverged, and its weights are lost. Lower `--learning-rate` ({self.args.learning_rate:g}), "
                "or look for an image with NaN, as examples/training/README.md shows."
            )
