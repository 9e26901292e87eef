"""`hf-xattn retrofit`: puts cross-attention blocks into a text-only checkpoint.
`hf-xattn import` and `hf-xattn export`: from and to checkpoints of other packages with cross-attention.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shared import (
    DTYPES,
    add_number,
    add_trust,
    hub_options,
    load_shapes,
    new_folder,
    print_report,
    read_processor,
    save_model,
)


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration

# Options of one kind of state dict.
OF_FLAMINGO = ("image_token_id", "head_dim")
OF_KEMPNERFORGE = ("heads", "every", "hidden_act", "norm_type")
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
    parser.set_defaults(run=run_retrofit)


def run_retrofit(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    from ..checkpoints.bases import text_config_of, vision_config_of
    from ..checkpoints.gguf_files import split_gguf
    from ..checkpoints.model_card import blindness
    from ..retrofit import retrofit
    from ..utils.architectures import text_num_hidden_layers

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
    save_model(model, processor, output, max_shard_size=arguments.max_shard_size, adapter_only=arguments.adapter_only)
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


def register_import(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("import", help="convert a vision-language checkpoint with cross-attention")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="Llama 3.2 Vision or Idefics: a folder or a Hub id; "
        "OpenFlamingo or KempnerForge: a file with a state dict",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the new model")
    state = parser.add_argument_group("options for a state dict")
    text = "language model of the state dict: a folder, a GGUF file or a Hub id"
    state.add_argument("--text", metavar="TEXT", help=text)
    state.add_argument("--vision", metavar="V", help="vision tower (OpenFlamingo)")
    add_number(state, "--image-token-id", None, "id of <image> (OpenFlamingo)", metavar="ID", least=0)
    add_number(state, "--head-dim", None, "width of a head (OpenFlamingo; default: 64)")
    add_number(state, "--heads", None, "query heads (KempnerForge)", metavar="H")
    add_number(state, "--every", None, "a block after every N-th layer (KempnerForge)")
    state.add_argument("--hidden-act", metavar="NAME", help="`activation` (KempnerForge; SiLU needs no name)")
    state.add_argument("--norm-type", metavar="NAME", help="`norm_type` (KempnerForge; default: rmsnorm)")
    parser.set_defaults(run=run_import)


def run_import(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    if not Path(arguments.source).is_file():
        _refuse(arguments, ("text", "vision", *OF_FLAMINGO, *OF_KEMPNERFORGE), "a whole checkpoint")
        from ..importers import convert_checkpoint

        convert_checkpoint(arguments.source, output)
        print_report(load_shapes(str(output)))  # shapes only: the weights may not fit into memory
        return
    model = _model_of_a_state_dict(arguments)
    processor = read_processor(arguments.text, arguments.vision, output, image_token_id=arguments.image_token_id)
    save_model(model, processor, output)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], kind: str) -> None:
    """Raises a `ValueError` for an option that this kind of source does not use."""
    for name in names:
        if (value := getattr(arguments, name)) is not None:
            raise ValueError(f"Expected no --{name.replace('_', '-')}, because SOURCE is {kind}, got {value}.")


def _model_of_a_state_dict(arguments: argparse.Namespace) -> XAttnForConditionalGeneration:
    """Builds a model from the language model of `--text` and the blocks in a file."""
    if arguments.text is None:
        raise ValueError(f"{arguments.source} is a file with a state dict: --text is required, its language model.")
    from ..checkpoints.bases import load_text, load_vision
    from ..importers.blocks import read_state_dict
    from ..importers.kempnerforge import import_kempnerforge
    from ..importers.open_flamingo import import_open_flamingo

    state = read_state_dict(arguments.source)
    is_flamingo = any("gated_cross_attn_layer" in name for name in state)
    kind, required = ("OpenFlamingo", ("image_token_id",)) if is_flamingo else ("KempnerForge", ("heads", "every"))
    for option in required:
        if getattr(arguments, option) is None:
            name = option.replace("_", "-")
            raise ValueError(f"{arguments.source} is read as a state dict of {kind}, which requires --{name}.")
    _refuse(arguments, OF_KEMPNERFORGE if is_flamingo else ("vision", *OF_FLAMINGO), f"a state dict of {kind}")
    text = load_text(arguments.text, dtype="auto")
    if not is_flamingo:
        named = {"norm_type": arguments.norm_type} if arguments.norm_type else {}
        heads, every, act = arguments.heads, arguments.every, arguments.hidden_act
        return import_kempnerforge(state, text, num_attention_heads=heads, every=every, hidden_act=act, **named)
    vision = None if arguments.vision is None else load_vision(arguments.vision, dtype=text.dtype)
    return import_open_flamingo(
        state, text, vision, image_token_id=arguments.image_token_id, head_dim=arguments.head_dim or 64
    )


def register_export(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("export", help="write a model of Llama 3.2 Vision's shape in its format")
    parser.add_argument(
        "model", metavar="DIR", help="an imported model, or a retrofit of the same shape: a folder or a Hub id"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the checkpoint goes")
    parser.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    from ..importers import export_checkpoint

    export_checkpoint(arguments.model, output)
    print(f"Written: {output}")
