"""`hf-xattn retrofit`: puts cross-attention blocks into a text-only checkpoint."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from .shared import DTYPES, add_number, add_trust, hub_options, new_folder, print_report, read_processor


CONNECTOR = (
    "from the tower's features to image tokens; mlp_2d adds a code of each token's place (default: mlp_2d if the image "
    "processor makes square pictures and the tower gives a square grid of tokens, else mlp)"
)


def register_retrofit(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("retrofit", help="put cross-attention blocks into a text-only checkpoint")
    text = "text-only causal language model: a folder, a GGUF file or a Hub id"
    parser.add_argument("text", metavar="TEXT", help=text)
    parser.add_argument("--vision", metavar="V", help="vision model: a folder or a Hub id")
    add_number(parser, "--every", 4, "put a block in front of every N-th layer")
    parser.add_argument(
        "--layers",
        "--cross-attention-layers",
        dest="layers",
        type=_integers,
        metavar="I,J,...",
        help="put blocks in front of these layers instead, counted from 0 (3,3 puts two in front of layer 3)",
    )
    parser.add_argument("--connector", choices=("linear", "mlp", "mlp_2d"), help=CONNECTOR)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the new model")
    parser.add_argument("--gguf-file", metavar="NAME", help="name of a GGUF file in the folder or repository TEXT")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--revision", help="revision of TEXT and V on the Hub")
    add_trust(parser)
    parser.add_argument("--max-shard-size", default="5GB", help="maximum size of a safetensors file (default: 5GB)")
    adapter = "save only what was added, and fetch TEXT and V when it is loaded"
    parser.add_argument("--adapter-only", action="store_true", help=adapter)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    from ..checkpoints.bases import text_config_of, vision_config_of
    from ..checkpoints.gguf_files import split_gguf
    from ..checkpoints.model_card import blindness
    from ..retrofit import retrofit
    from ..utils.architectures import text_num_hidden_layers
    from ..utils.whole_folder import WholeFolder

    if arguments.connector is not None and arguments.vision is None:
        raise ValueError("`--connector` needs `--vision V`, whose features it reads, got none.")
    hub = hub_options(arguments)
    if arguments.revision is not None:
        hub["revision"] = arguments.revision
    # A wrong name is told before a tokenizer is missed, and a damaged tokenizer before weights are read.
    text_config_of(*split_gguf("text", arguments.text, {**hub, "gguf_file": arguments.gguf_file}), reads_weights=False)
    if arguments.vision is not None:
        vision_config_of(arguments.vision, hub, reads_weights=False)
    processor = read_processor(arguments.text, arguments.vision, output, gguf_file=arguments.gguf_file, **hub)
    print(f"Loading {arguments.text}" + (f" and {arguments.vision}" if arguments.vision else ""), flush=True)
    model = retrofit(
        arguments.text,
        arguments.vision,
        cross_attention_layers=arguments.layers,
        every=arguments.every,
        connector_type=arguments.connector or _connector_for(processor),
        dtype=arguments.dtype,
        gguf_file=arguments.gguf_file,
        **hub,
    )
    print(f"Saving to {output}", flush=True)
    with WholeFolder(output) as folder:
        model.save_pretrained(folder, max_shard_size=arguments.max_shard_size, adapter_only=arguments.adapter_only)
        if processor is not None:
            processor.save_pretrained(folder)
    print_report(model)
    num_layers = text_num_hidden_layers(model.config.text_config)
    if arguments.layers is None and arguments.every > num_layers:
        every = f"`--every {arguments.every}` is more than the {num_layers} layers"
        print(f"{every}: there is one block, in front of the last.")
    if (why := blindness(model)) is not None:
        print(why)
    if arguments.vision is None:
        print(f"Next, to see: hf-xattn retrofit {shlex.quote(arguments.text)} --vision V --output DIR")
    else:
        print(f"Next: hf-xattn train {shlex.quote(str(output))} --data PICTURES --output TRAINED")


def _connector_for(processor: Any) -> str | None:
    """`"mlp"` if pictures keep their shape, so that tokens have no places in a square; else what `retrofit` takes."""
    from PIL import Image

    images = getattr(processor, "image_processor", None)
    if images is None:
        return None
    pixels = images(Image.new("RGB", (640, 480)), return_tensors="pt")["pixel_values"]
    return None if pixels.shape[-1] == pixels.shape[-2] else "mlp"


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_integers.__name__ = "list of integers"  # for argparse's error
