"""Trains a small ViT on labelled pictures, as a vision tower. Not needed with a pretrained tower (CLIP, SigLIP, DINOv2, ...).

python examples/garments/train_tower.py SOURCE OUTPUT [--steps 1500 --labels bag dress]

The ViT learns to name the thing at each patch. The classifier on top of it is not saved.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from pictures import PATCHES, patch_labels, place_things, read_source
from transformers import SiglipImageProcessorPil, Trainer, TrainingArguments, ViTConfig, ViTModel


BATCH = 64


class PatchClassifier(torch.nn.Module):
    """A tower with a label for each patch; the last label is nothing."""

    def __init__(self, tower: ViTModel, num_labels: int):
        super().__init__()
        self.tower = tower
        self.head = torch.nn.Linear(tower.config.hidden_size, num_labels + 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Args:
            pixel_values: `(batch, 3, height, width)`.
            labels: `(batch, patches)`.
        """
        patches = self.tower(pixel_values=pixel_values).last_hidden_state[:, 1:]  # without the class token
        logits = self.head(patches)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Pictures(torch.utils.data.Dataset):
    """Pictures drawn when they are asked for. Seed and index determine a picture."""

    def __init__(self, pictures: list, processor: SiglipImageProcessorPil, size: int, count: int, seed: int):
        self.pictures, self.processor, self.size, self.count, self.seed = pictures, processor, size, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture, things = place_things(self.pictures, np.random.default_rng((self.seed, index)), self.size)
        labels = torch.from_numpy(patch_labels(things, self.size, nothing=len(self.pictures)))
        return {"pixel_values": self.processor(picture, return_tensors="pt")["pixel_values"][0], "labels": labels}


@torch.no_grad()
def things_right(model: PatchClassifier, pictures: Pictures) -> float:
    """Share of the things that the classifier names, from the mean of their patches."""
    model.eval()
    right = []
    for start in range(0, len(pictures), BATCH):
        rows = [pictures[index] for index in range(start, min(start + BATCH, len(pictures)))]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        logits = model(**batch)["logits"][..., :-1]
        for row, labels in zip(logits, batch["labels"]):
            right += [
                row[labels == label].mean(0).argmax() == label for label in labels.unique() if label < row.shape[-1]
            ]
    return sum(map(float, right)) / len(right)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=1500, help=f"steps of {BATCH} pictures (default: 1500)")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=32, help="height of a picture, as for make_rows.py (default: 32)")
    parser.add_argument("--labels", nargs="+", help="only these labels")
    options = parser.parse_args(arguments)
    source = read_source(options.source, options.labels)
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        image_size=(options.size, 2 * options.size),
        patch_size=options.size // PATCHES,
    )
    tower = ViTModel(config)
    processor = SiglipImageProcessorPil(size={"height": options.size, "width": 2 * options.size})
    model = PatchClassifier(tower, len(source.labels))
    with tempfile.TemporaryDirectory() as checkpoints:
        settings = TrainingArguments(
            output_dir=checkpoints,
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 20,
            save_strategy="no",
            logging_steps=max(1, options.steps // 10),
            report_to="none",
        )
        Trainer(
            model=model,
            args=settings,
            train_dataset=Pictures(source.train, processor, options.size, options.steps * BATCH, 0),
        ).train()
    right = things_right(model.cpu(), Pictures(source.held_out, processor, options.size, 1000, 1))
    print(f"held-out things that the tower names: {right:.1%}")
    tower.save_pretrained(options.output)
    processor.save_pretrained(options.output)


if __name__ == "__main__":
    main()
