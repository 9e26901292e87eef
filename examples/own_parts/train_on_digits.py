"""Trains the connector and the gate of sight_parts.py on handwritten digits, and loads them again.

python examples/own_parts/train_on_digits.py [--output FOLDER] [--quick]

Text model, vision tower and task are those of `examples/digits`.
"""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "digits"))

import sight_parts  # registers the parts
import torch
from task import Recipe, canvases, finish, make_bases
from transformers import AutoImageProcessor, AutoTokenizer, Trainer, TrainingArguments

from hf_xattn import XAttnProcessor, freeze_base, retrofit


def main() -> None:
    recipe = Recipe.from_command_line(__doc__)
    make_bases(recipe)
    text, vision, folder = (recipe.folder / name for name in ("text", "vision", "model"))
    torch.manual_seed(0)
    model = retrofit(
        text,
        vision,
        cross_attention_layers=[1, 2, 3],
        cross_attention={"qk_norm": True, "initializer_range": 0.12, "gate": "text", "gate_options": {"bias": 1.0}},
        connector_type="merging",
        connector_options={"merge": 2},
        vision_feature_select_strategy="default",  # without the tower's first token, which is no patch
    )
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text))
    arguments = TrainingArguments(
        output_dir=str(recipe.folder / "trainer"),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup,
        lr_scheduler_type="cosine",
        logging_steps=recipe.log_steps,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
    )
    Trainer(model=freeze_base(model), args=arguments, train_dataset=canvases(recipe, processor)).train()
    model.save_pretrained(folder, with_code=True)  # sight_parts.py goes with it
    processor.save_pretrained(folder)
    print("in the folder:", (folder / f"{sight_parts.__name__}.py").is_file())
    finish(recipe)


if __name__ == "__main__":
    main()
