"""Adds cross-attention to a text-only checkpoint, and shows that the logits of text without images stay the same.

python examples/blocks/retrofit_text_model.py [TEXT VISION OUTPUT]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer

from hf_xattn import XAttnProcessor, freeze_base, retrofit


sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is


def main(text: str, vision: str, output: str) -> None:
    model = retrofit(text, vision, every=2)
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text))

    base = AutoModelForCausalLM.from_pretrained(text).eval()
    inputs = processor(text="what is in the picture ?")
    with torch.no_grad():
        same = torch.equal(model(**inputs).logits, base(**inputs).logits)
    print(f"blocks in front of layers {model.config.cross_attention_layers}, logits bit-identical to the base: {same}")

    freeze_base(model)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"{trainable:,} of {model.num_parameters():,} parameters train")

    model.save_pretrained(output)
    processor.save_pretrained(output)
    print(f"saved to {output}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(*sys.argv[1:])
    else:
        from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            text = make_text_checkpoint(Path(folder) / "text")
            vision = make_vision_checkpoint(Path(folder) / "vision")
            main(str(text), str(vision), str(Path(folder) / "model"))
