"""Imports a vision-language checkpoint with cross-attention, compares it with transformers' own model, and exports it
again.

python examples/import_export/import_checkpoint.py [SOURCE OUTPUT]

SOURCE is a folder or a Hub id of Llama 3.2 Vision or Idefics.

Without arguments, the example uses a small Llama 3.2 Vision with random weights.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from hf_xattn import export_checkpoint, import_checkpoint, training_table


MARKER = 96


def make_checkpoint(folder: Path) -> MllamaForConditionalGeneration:
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 28, "intermediate_layers_indices": [0, 2], "vision_output_dim": 48}
    text = {"hidden_size": 32, "num_hidden_layers": 6, "cross_attention_layers": [1, 4], "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": MARKER, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=MARKER)
    model = MllamaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "cross_attn_attn_gate" in name or "cross_attn_mlp_gate" in name:
            torch.nn.init.ones_(parameter)  # a fresh gate is zero, so images would have no effect
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def compare(theirs: MllamaForConditionalGeneration, folder: Path) -> None:
    ours = import_checkpoint(folder / "theirs", folder / "ours").eval()
    ids = torch.tensor([[MARKER, 1, 5, 6, 7]])
    pixels = torch.randn(1, 1, 4, 3, 28, 28)
    pixels[:, :, 2:] = 0  # two tiles of four
    ratios, tiles = torch.tensor([[2]]), torch.tensor([[[1, 1, 0, 0]]])
    images = {"pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": tiles}
    mask = tiles[:, None].expand(-1, ids.shape[1], -1, -1)  # Mllama needs this mask, ours computes it from the ids
    expected = theirs(ids, cross_attention_mask=mask, **images).logits
    difference = (ours(ids, **images).logits - expected).abs().max().item()
    print(f"largest difference of a logit: {difference:.1e} (of {expected.abs().max().item():.1f})")

    export_checkpoint(folder / "ours", folder / "back")
    back = MllamaForConditionalGeneration.from_pretrained(folder / "back").state_dict()
    same = all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())
    print(f"written back, bit for bit: {same}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(training_table(import_checkpoint(sys.argv[1], sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(make_checkpoint(Path(folder) / "theirs"), Path(folder))
