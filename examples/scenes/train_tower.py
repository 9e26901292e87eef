"""Trains a small ResNet on the pictures of the training split, as a vision tower of 196 image tokens. Not needed with a
pretrained tower (CLIP, SigLIP, DINOv2, ...).

python examples/scenes/train_tower.py OUTPUT [--steps 1100 --batch-size 16]

The tower learns to name what the renderer knows of each patch of 16 by 16 pixels: shape, colour and size of the object,
the characters and the word, the value of the bar, and the place of the patch. The classifiers on top of it are not
saved. Pictures are drawn while it trains, half of them documents, whose characters take longest to learn. Rows that
`make_scenes.py` writes for the same --seed show some of them.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from make_scenes import draw
from patch_labels import HEADS, label_patches
from splits import Split, open_split
from transformers import ResNetConfig, ResNetModel, SiglipImageProcessorPil, Trainer, TrainingArguments


SIZE = 224  # pixels
NOTHING = 0.1  # weight of patches where a head has nothing to name
FORM_AND_NOTE = 1, 5  # their numbers, of each eight pictures of `make_scenes.py`
PLACES = ("row", "column")  # heads that name something in each patch


class PatchClassifier(torch.nn.Module):
    """A tower with a classifier for each head of `HEADS`."""

    def __init__(self, tower: ResNetModel):
        super().__init__()
        self.tower = tower
        width = tower.config.hidden_sizes[-1]
        self.heads = torch.nn.ModuleList([torch.nn.Linear(width, count) for count in HEADS.values()])

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Args:
            pixel_values: `(batch, 3, height, width)`.
            labels: `(batch, heads, patches)`.

        Returns:
            `dict`: the loss, and the label that each head chooses `(batch, heads, patches)`.
        """
        patches = self.tower(pixel_values=pixel_values).last_hidden_state.flatten(2).transpose(1, 2)
        loss, chosen = torch.zeros(()), []
        for index, (name, head) in enumerate(zip(HEADS, self.heads)):
            logits = head(patches)
            weight = torch.ones(logits.shape[-1], device=logits.device)
            if name not in PLACES:
                weight[0] = NOTHING
            own = labels[:, index].flatten()
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), own, weight) / len(HEADS)
            chosen.append(logits.argmax(-1))
        return {"loss": loss, "chosen": torch.stack(chosen, 1)}


class Pictures(torch.utils.data.Dataset):
    """Pictures of a split, drawn when they are asked for."""

    def __init__(self, split: Split, processor: SiglipImageProcessorPil, count: int):
        self.split, self.processor, self.count = split, processor, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = draw(self.split, self._number(index))
        pixels = self.processor(drawn.image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": torch.from_numpy(label_patches(drawn))}

    def _number(self, index: int) -> int:
        return index


class HalfDocuments(Pictures):
    """Four pictures of each eight: a form, a note, a scene, and a chart or another scene."""

    def _number(self, index: int) -> int:
        cycle, place = divmod(index, 4)
        turn = cycle % 4
        documents = FORM_AND_NOTE if cycle % 2 == 0 else FORM_AND_NOTE[::-1]
        return 8 * cycle + (documents[0], 2 * turn, documents[1], (3, 7, 0, 4)[turn])[place]


def make_tower(width: int, layers: int) -> tuple[ResNetModel, SiglipImageProcessorPil]:
    """A ResNet whose last stage has `layers` blocks: 14 by 14 features of `width` channels."""
    config = ResNetConfig(
        embedding_size=width // 6,
        hidden_sizes=[width // 6, width // 3, width],
        depths=[1, 2, layers],
        layer_type="basic",
    )
    return ResNetModel(config), SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE})


@torch.no_grad()
def shares_right(model: PatchClassifier, pictures: Pictures, batch_size: int) -> dict[str, float]:
    """For each head, the share of the patches that it names, of those where there is something to name."""
    model.eval()
    right, there = torch.zeros(len(HEADS)), torch.zeros(len(HEADS))
    for start in range(0, len(pictures), batch_size):
        rows = [pictures[index] for index in range(start, min(start + batch_size, len(pictures)))]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        labels = batch["labels"]
        something = labels > 0
        right += ((model(**batch)["chosen"] == labels) & something).sum((0, 2))
        there += something.sum((0, 2))
    return dict(zip(HEADS, (right / there.clamp(min=1)).tolist()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=160, help="development pictures to try it on (default: 160)")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and of the weights")
    options = parser.parse_args(arguments)
    if options.output.exists():
        parser.error(f"expected a new folder, got {options.output}, which exists: remove it, or name another one")
    try:
        split, held_out = (open_split(name, options.seed) for name in ("train", "development"))
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(options.seed)
    tower, processor = make_tower(options.hidden_size, options.layers)
    print(f"{sum(each.numel() for each in tower.parameters()) / 1e6:.1f} million parameters")
    model = PatchClassifier(tower)
    with tempfile.TemporaryDirectory() as checkpoints:
        settings = TrainingArguments(
            output_dir=checkpoints,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 20,
            weight_decay=0.05,
            save_strategy="no",
            logging_steps=max(1, options.steps // 20),
            report_to="none",
        )
        pictures = HalfDocuments(split, processor, options.steps * options.batch_size)
        Trainer(model=model, args=settings, train_dataset=pictures).train()
    shares = shares_right(model.cpu(), Pictures(held_out, processor, options.held_out), options.batch_size)
    named = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(f"patches of development pictures that the tower names: {named}")
    tower.save_pretrained(options.output)
    processor.save_pretrained(options.output)


if __name__ == "__main__":
    main()
