"""The commands that make a model.

`hf-xattn retrofit` puts cross-attention blocks into a text model. `hf-xattn import` converts a checkpoint of another
package with cross-attention, and `hf-xattn export` writes one.
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

# Names of the options that only one kind of state dict takes.
OF_FLAMINGO = ("image_token_id", "head_dim")
OF_KEMPNERFORGE = ("heads", "every", "hidden_act", "norm_type")
CONNECTOR = (
    "module that turns the features of the tower into image tokens: a linear layer, an MLP, or an MLP that adds a 2D "
    "position encoding (default: mlp_2d if the image processor makes square images and the tower gives a square grid "
    "of tokens, else mlp)"
)


def register_retrofit(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "retrofit",
        help="put cross-attention blocks into a text model, and connect it to a vision tower",
        description="Puts cross-attention blocks into a text model, connects them to a vision tower, and saves the "
        "new model. The blocks are untrained: `hf-xattn train` is the next step.",
        usage="%(prog)s TEXT --vision TOWER --output DIR [options]",
        epilog="example: hf-xattn retrofit Qwen/Qwen2.5-0.5B-Instruct --vision google/siglip-base-patch16-224 "
        "--output fresh",
    )
    text = "text model, a causal language model of transformers: a folder, a GGUF file or a Hub id"
    parser.add_argument("text", metavar="TEXT", help=text)
    vision = "vision tower: a folder or a Hub id; without one, the model reads features in place of images"
    parser.add_argument("--vision", metavar="TOWER", help=vision)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the new model")
    blocks = parser.add_argument_group("blocks and connector")
    add_number(blocks, "--every", 4, "put a block in front of every N-th layer")
    blocks.add_argument(
        "--layers",
        "--cross-attention-layers",
        dest="layers",
        type=_integers,
        metavar="I,J,...",
        help="put blocks in front of these layers, in place of --every; layers are counted from 0, and 3,3 puts two "
        "blocks in front of layer 3",
    )
    blocks.add_argument("--connector", choices=("linear", "mlp", "mlp_2d"), help=CONNECTOR)
    saving = parser.add_argument_group("saving")
    adapter = "save only what was added; loading the model then fetches TEXT and TOWER again"
    saving.add_argument("--adapter-only", action="store_true", help=adapter)
    shards = "maximum size of a safetensors file (default: 5GB)"
    saving.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help=shards)
    loading = parser.add_argument_group("loading")
    gguf = "name of a GGUF file, if TEXT is a folder or a repository with several"
    loading.add_argument("--gguf-file", metavar="NAME", help=gguf)
    revision = "branch, tag or commit of TEXT and TOWER on the Hub (default: main)"
    loading.add_argument("--revision", metavar="NAME", help=revision)
    dtype = "dtype of the weights (default: auto, the dtype of TEXT)"
    loading.add_argument("--dtype", default="auto", choices=DTYPES, help=dtype)
    add_trust(loading)
    parser.set_defaults(run=run_retrofit)


def run_retrofit(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    from ..checkpoints.bases import text_config_of, vision_config_of
    from ..checkpoints.gguf_files import split_gguf
    from ..checkpoints.model_card import blindness
    from ..retrofit import retrofit
    from ..utils.architectures import text_num_hidden_layers

    if arguments.connector is not None and arguments.vision is None:
        raise ValueError(
            "`--connector` needs `--vision TOWER`, whose features the connector reads, got none. Add a vision tower, "
            "or leave `--connector` out."
        )
    hub = hub_options(arguments)
    if arguments.revision is not None:
        hub["revision"] = arguments.revision
    # In this order, a wrong name gives an error of its own and not that of a missing tokenizer, and a damaged tokenizer
    # gives an error before weights are read.
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
        print(f"To let it see images: hf-xattn retrofit {shlex.quote(arguments.text)} --vision TOWER --output DIR")
    else:
        print(f"Next: hf-xattn train {shlex.quote(str(output))} --data PICTURES --output TRAINED")


def _connector_for(processor: Any) -> str | None:
    """Returns `"mlp"` if images keep their shape, because their tokens are then no square; else None, for `retrofit`'s
    own choice.
    """
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
    parser = commands.add_parser(
        "import",
        help="convert a checkpoint of Llama 3.2 Vision, Idefics, OpenFlamingo or KempnerForge",
        description="Converts a vision-language checkpoint with cross-attention into a model of this package.",
        usage="%(prog)s SOURCE --output DIR [options]",
        epilog="example: hf-xattn import meta-llama/Llama-3.2-11B-Vision-Instruct --output imported",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="Llama 3.2 Vision or Idefics: a folder or a Hub id. OpenFlamingo or KempnerForge: a file with a state "
        "dict",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the new model")
    state = parser.add_argument_group("if SOURCE is a state dict")
    text = "text model of the state dict: a folder, a GGUF file or a Hub id; required"
    state.add_argument("--text", metavar="TEXT", help=text)
    flamingo = parser.add_argument_group("if SOURCE is a state dict of OpenFlamingo")
    tower = "vision tower: a folder or a Hub id; without one, the model reads resampled features in place of images"
    flamingo.add_argument("--vision", metavar="TOWER", help=tower)
    add_number(flamingo, "--image-token-id", None, "id of the token <image>; required", metavar="ID", least=0)
    add_number(flamingo, "--head-dim", None, "width of an attention head (default: 64)")
    forge = parser.add_argument_group("if SOURCE is a state dict of KempnerForge")
    add_number(forge, "--heads", None, "number of query heads; required")
    add_number(forge, "--every", None, "a block stands behind every N-th layer; required")
    activation = "`activation` of KempnerForge's configuration; required unless the blocks have a gate_proj (SiLU)"
    forge.add_argument("--hidden-act", metavar="NAME", help=activation)
    norm = "`norm_type` of KempnerForge's configuration (default: rmsnorm)"
    forge.add_argument("--norm-type", metavar="NAME", help=norm)
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
    """Raises a `ValueError` if an option is given that this kind of source does not use."""
    for name in names:
        if (value := getattr(arguments, name)) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"Expected no {option}, because SOURCE is {kind}, got {value}. Leave it out.")


def _model_of_a_state_dict(arguments: argparse.Namespace) -> XAttnForConditionalGeneration:
    """Builds a model from the text model of `--text` and the blocks in a file."""
    if arguments.text is None:
        raise ValueError(
            f"{arguments.source} is a file with a state dict: --text is required. Name the text model that its blocks "
            "belong to."
        )
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
    parser = commands.add_parser(
        "export",
        help="write a model in the format of Llama 3.2 Vision",
        description="Writes a model in the format of Llama 3.2 Vision, which transformers' own class and other engines "
        "load. The model must have Llama 3.2 Vision's shape: examples/import_export/README.md lists its options.",
        usage="%(prog)s MODEL --output DIR",
    )
    model = "an imported Llama 3.2 Vision, or a retrofitted model of the same shape: a folder or a Hub id"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the checkpoint")
    parser.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    from ..importers import export_checkpoint

    export_checkpoint(arguments.model, output)
    print(f"Written: {output}")
