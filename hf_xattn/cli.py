"""The command line: `hf-xattn retrofit | import | export | inspect | generate | encode | demo`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .version import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 2 with one line that says what is wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"hf-xattn {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-xattn", description="Gated cross-attention for any text decoder of transformers."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("retrofit", help="put cross-attention blocks into a text-only checkpoint")
    command.add_argument("text", metavar="TEXT", help="text-only causal language model: a folder or a Hub id")
    command.add_argument("--vision", metavar="V", help="vision model: a folder or a Hub id")
    command.add_argument("--every", type=int, default=4, help="a block in front of every N-th layer (default: 4)")
    command.add_argument("--layers", type=_integers, metavar="I,J,...", help="these layers instead, counted from 0")
    command.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the new model goes")
    command.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    command.add_argument("--revision", help="revision of TEXT and V on the Hub")
    command.add_argument("--trust-remote-code", action="store_true", help="run the code that a checkpoint brings")
    command.add_argument("--max-shard-size", default="5GB", help="largest safetensors file (default: 5GB)")
    command.set_defaults(run=_retrofit)

    command = commands.add_parser("import", help="bring a vision-language checkpoint with cross-attention over")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="Llama 3.2 Vision or Idefics: a folder or a Hub id; OpenFlamingo or KempnerForge: a file with a state dict",
    )
    command.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the new model goes")
    state = command.add_argument_group("with a state dict")
    state.add_argument("--text", metavar="TEXT", help="its language model: a folder or a Hub id")
    state.add_argument("--vision", metavar="V", help="its vision tower (OpenFlamingo)")
    state.add_argument("--image-token-id", type=int, metavar="ID", help="id of <image> (OpenFlamingo)")
    state.add_argument("--head-dim", type=int, default=64, help="width of a head (OpenFlamingo; default: 64)")
    state.add_argument("--heads", type=int, metavar="H", help="query heads (KempnerForge)")
    state.add_argument("--every", type=int, metavar="N", help="a block after every N-th layer (KempnerForge)")
    command.set_defaults(run=_import)

    command = commands.add_parser("export", help="write an imported Llama 3.2 Vision as the original has it")
    command.add_argument("model", metavar="DIR", help="an imported model: a folder or a Hub id")
    command.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the checkpoint goes")
    command.set_defaults(run=_export)

    command = commands.add_parser("inspect", help="what a model's blocks add: parameters, K/V bytes, compute")
    command.add_argument("model", metavar="DIR", nargs="?", help="a retrofitted model: a folder or a Hub id")
    command.add_argument("--architectures", action="store_true", help="which decoders are served, how, or why not")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("generate", help="answer a prompt about images")
    _add_model_and_images(command, images_required=False)
    command.add_argument("--prompt", required=True, metavar="TEXT")
    command.add_argument("--image-cache", type=Path, metavar="FILE", help="images that `hf-xattn encode` wrote")
    command.add_argument("--max-new-tokens", type=int, default=64)
    command.add_argument("--num-beams", type=int, default=1)
    command.set_defaults(run=_generate)

    command = commands.add_parser("encode", help="run the vision tower and the K/V projections once, into a file")
    _add_model_and_images(command, images_required=True)
    command.add_argument("--output", type=Path, required=True, metavar="FILE", help="a .safetensors file")
    command.set_defaults(run=_encode)

    command = commands.add_parser("demo", help="train, retrofit and read handwritten digits, in minutes, offline")
    command.add_argument("--output", type=Path, default=Path("hf-xattn-demo"), metavar="DIR")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=_demo)
    return parser


def _add_model_and_images(command: argparse.ArgumentParser, images_required: bool) -> None:
    command.add_argument("model", metavar="DIR", help="a retrofitted model: a folder or a Hub id")
    command.add_argument(
        "--image",
        action="append",
        type=Path,
        required=images_required,
        metavar="FILE",
        help="may be given several times",
    )
    command.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between them, got {text!r}") from None


def _new_folder(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`--output` ({folder}) exists and is not an empty folder.")
    return folder


def _retrofit(arguments: argparse.Namespace) -> None:
    output = _new_folder(arguments.output)
    from .retrofit import retrofit

    hub = {"trust_remote_code": arguments.trust_remote_code}
    if arguments.revision is not None:
        hub["revision"] = arguments.revision
    print(f"Loading {arguments.text}" + (f" and {arguments.vision}" if arguments.vision else ""), flush=True)
    model = retrofit(
        arguments.text,
        arguments.vision,
        cross_attention_layers=arguments.layers,
        every=arguments.every,
        dtype=arguments.dtype,
        **hub,
    )
    print(f"Saving to {output}", flush=True)
    model.save_pretrained(output, max_shard_size=arguments.max_shard_size)
    _save_processor(arguments, output, **hub)
    _print_report(model)


def _save_processor(arguments: argparse.Namespace, folder: Path, **hub) -> None:
    """The tokenizer of TEXT and the image processor of V, as far as there are any."""
    from transformers import AutoImageProcessor, AutoTokenizer

    from .processing_xattn import XAttnProcessor

    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.text, **hub)
    except (OSError, ValueError):
        print(f"No processor saved: {arguments.text} has no tokenizer.")
        return
    image_processor = None
    if arguments.vision is not None:
        try:
            image_processor = AutoImageProcessor.from_pretrained(arguments.vision, **hub)
        except (OSError, ValueError):
            print(f"Processor saved without images: {arguments.vision} has no image processor.")
    if image_processor is None:
        tokenizer.save_pretrained(folder)
        return
    marker = getattr(arguments, "image_token_id", None)
    token = None if marker is None or marker >= len(tokenizer) else tokenizer.convert_ids_to_tokens(marker)
    if marker is not None and token is None:
        print(
            f"The tokenizer of {arguments.text} has no token {marker}: add OpenFlamingo's (<|endofchunk|>, <image>) to the one "
            f"in {arguments.output} before you use it."
        )
    XAttnProcessor(image_processor, tokenizer, image_token=token).save_pretrained(folder)


def _import(arguments: argparse.Namespace) -> None:
    output = _new_folder(arguments.output)
    if Path(arguments.source).is_file():
        _import_state_dict(arguments)
        return
    from .importers import convert_checkpoint

    convert_checkpoint(arguments.source, output)
    _print_report(_skeleton(str(output)))


def _import_state_dict(arguments: argparse.Namespace) -> None:
    if arguments.text is None:
        raise ValueError(
            f"{arguments.source} is a file: --text must name the language model that its blocks belong to."
        )
    from .importers.blocks import read_state_dict
    from .importers.kempnerforge import import_kempnerforge
    from .importers.open_flamingo import import_open_flamingo
    from .importers.streaming import whole_folder
    from .retrofit import load_text, load_vision

    state = read_state_dict(arguments.source)
    is_flamingo = any("gated_cross_attn_layer" in name for name in state)
    needed = ("image_token_id",) if is_flamingo else ("heads", "every")
    for option in needed:
        if getattr(arguments, option) is None:
            kind = "OpenFlamingo" if is_flamingo else "KempnerForge"
            raise ValueError(f"{arguments.source} is read as one of {kind}: --{option.replace('_', '-')} is required.")
    text = load_text(arguments.text, dtype="auto")
    if is_flamingo:
        vision = None if arguments.vision is None else load_vision(arguments.vision, dtype=text.dtype)
        options = {"image_token_id": arguments.image_token_id, "head_dim": arguments.head_dim}
        model = import_open_flamingo(state, text, vision, **options)
    else:
        model = import_kempnerforge(state, text, num_attention_heads=arguments.heads, every=arguments.every)
    with whole_folder(arguments.output) as folder:
        model.save_pretrained(folder)
        _save_processor(arguments, folder)
    _print_report(model)


def _export(arguments: argparse.Namespace) -> None:
    from .importers import export_checkpoint

    export_checkpoint(arguments.model, _new_folder(arguments.output))
    print(f"Written: {arguments.output}")


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.architectures == (arguments.model is not None):
        raise ValueError("give a model (DIR) or --architectures, one of the two.")
    if arguments.architectures:
        from .architectures import markdown_table

        print(markdown_table())
        return
    _print_report(_skeleton(arguments.model))


def _skeleton(model: str):
    """A saved model's shapes: nothing is read but its configuration."""
    import torch

    from .configuration_xattn import XAttnConfig
    from .modeling_xattn import XAttnForConditionalGeneration

    config = XAttnConfig.from_pretrained(_checked_model(model))
    with torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(config)


def _print_report(model) -> None:
    from .inspection import describe

    for name, value in describe(model).items():
        print(f"{name:<34} {value}")


def _checked_model(model: str) -> str:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    if config.model_type != "xattn":
        raise ValueError(
            f"{model} is a {config.model_type!r} model without cross-attention blocks: run `hf-xattn retrofit {model}` first."
        )
    return model


def _load(arguments: argparse.Namespace):
    """Model, processor and the images of a command."""
    for file in arguments.image or []:
        if not file.is_file():
            raise ValueError(f"`--image` ({file}) is not a file.")
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from .processing_xattn import XAttnProcessor

    name = _checked_model(arguments.model)
    processor = AutoProcessor.from_pretrained(name)
    images = [Image.open(file).convert("RGB") for file in arguments.image or []]
    model = AutoModelForImageTextToText.from_pretrained(name, dtype=arguments.dtype).to(arguments.device).eval()
    if images and getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{arguments.model} has no image processor, so `--image` cannot be read.")
    if type(processor).__name__ == "IdeficsProcessor":  # it puts images where it likes, not where the prompt says
        marker = processor.tokenizer.convert_ids_to_tokens(model.config.image_token_id)
        processor = XAttnProcessor(processor.image_processor, processor.tokenizer, image_token=marker)
    return model, processor, images


def _text_inputs(processor, prompt: str, num_images: int) -> dict:
    """A prompt without images, or about images in a cache, as the processor makes it beside images."""
    from PIL import Image

    from .processing_xattn import XAttnProcessor

    if isinstance(processor, XAttnProcessor) or not hasattr(processor, "image_processor"):
        return getattr(processor, "tokenizer", processor)(prompt, return_tensors="pt")
    blank = [Image.new("RGB", (32, 32))] * num_images
    inputs = processor(text=prompt, images=blank or None, return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def _generate(arguments: argparse.Namespace) -> None:
    if arguments.image and arguments.image_cache:
        raise ValueError("give --image or --image-cache, not both.")
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}.")
    if arguments.image_cache is not None and not arguments.image_cache.is_file():
        raise ValueError(f"`--image-cache` ({arguments.image_cache}) is not a file.")
    model, processor, images = _load(arguments)
    tokenizer = getattr(processor, "tokenizer", processor)
    cache = None
    if arguments.image_cache is not None:
        from .image_cache import load_image_cache

        cache = load_image_cache(arguments.image_cache, model)
    if images:
        inputs = processor(text=arguments.prompt, images=images, return_tensors="pt")
    else:
        num_images = 0 if cache is None else cache.cross_attention_cache.layers[0].images.num_images
        inputs = _text_inputs(processor, arguments.prompt, num_images)
    inputs = {name: value.to(model.device) for name, value in inputs.items() if name != "token_type_ids"}
    if cache is not None:
        inputs["past_key_values"] = cache
    prompt_length = inputs["input_ids"].shape[1]
    tokens = model.generate(
        **inputs, max_new_tokens=arguments.max_new_tokens, num_beams=arguments.num_beams, do_sample=False
    )
    print(tokenizer.decode(tokens[0, prompt_length:], skip_special_tokens=True))


def _encode(arguments: argparse.Namespace) -> None:
    if arguments.output.exists():
        raise ValueError(f"`--output` ({arguments.output}) exists already.")
    model, processor, images = _load(arguments)
    from .image_cache import save_image_cache
    from .processing_xattn import XAttnProcessor

    if not isinstance(processor, XAttnProcessor):  # a processor that makes other inputs of images without a text
        processor = XAttnProcessor(processor.image_processor, processor.tokenizer)
    inputs = processor(images=[images])
    cache = model.encode_images(**{name: value.to(model.device) for name, value in inputs.items()})
    save_image_cache(cache, arguments.output, model)
    print(f"{len(images)} image(s), {arguments.output.stat().st_size:,} bytes: {arguments.output}")


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import run

    run(arguments.output, seed=arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
