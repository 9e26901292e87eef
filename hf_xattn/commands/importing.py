"""`hf-xattn import` and `hf-xattn export`: from and to checkpoints of other packages with cross-attention."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .shared import add_number, load_shapes, new_folder, print_report, read_processor


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration


# Options of one kind of state dict.
OF_FLAMINGO = ("image_token_id", "head_dim")
OF_KEMPNERFORGE = ("heads", "every", "hidden_act", "norm_type")


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
    from ..utils.whole_folder import WholeFolder

    model = _model_of_a_state_dict(arguments)
    processor = read_processor(arguments.text, arguments.vision, output, image_token_id=arguments.image_token_id)
    with WholeFolder(output) as folder:
        model.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
    print_report(model)


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
