"""Trains the blocks first and the whole model later: a callback of `Trainer` that calls `freeze` at given steps.

python examples/training/freeze_schedule.py

Copy the class into your script. It is for a run of one process: DDP and FSDP fix what trains when they wrap the model.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_xattn import XAttnDataCollator, freeze


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import caption_rows, make_chat_model


class FreezeSchedule(TrainerCallback):
    """`stages`: for the number of completed steps at which each stage begins, the keyword arguments of `freeze`."""

    def __init__(self, stages):
        self.stages, self.active = stages, None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if args.world_size > 1:
            raise ValueError(f"Expected a run of one process for a `FreezeSchedule`, got {args.world_size}.")
        freeze(model, text=False, vision=False)  # `Trainer` makes its optimizer of all that trains later

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        stage = max(step for step in self.stages if step <= state.global_step)  # also in a run that is resumed
        if stage != self.active:
            self.active = stage
            freeze(model, **self.stages[stage])


def main(folder: Path) -> None:
    model, processor = make_chat_model(folder)
    options = {"max_steps": 6, "learning_rate": 1e-2, "weight_decay": 0.1, "save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments(str(folder / "trainer"), remove_unused_columns=False, **options)
    rows, collator = caption_rows("what is in the picture ?"), XAttnDataCollator(processor)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    moved = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            now = dict(model.named_parameters())
            moved.append(any(not torch.equal(now[name], weight) for name, weight in weights.items() if "mlp" in name))

    stages = {0: {"blocks": True}, 3: {"text": False, "vision": False}}  # the connector alone, then all parts
    own = {"train_dataset": rows, "data_collator": collator, "callbacks": [FreezeSchedule(stages), Watch()]}
    Trainer(model, arguments, **own).train()
    print(f"the text model trains from step 4 on: {moved == [False] * 3 + [True] * 3}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
