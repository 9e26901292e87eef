"""Helpers that several commands share.

They add options to a parser, load a model with its processor and images, save a model, and print what its blocks add.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from PIL.Image import Image

    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..processing.chat_templates import Processor
    from ..processing_xattn import XAttnProcessor

DTYPES = ("auto", "float32", "bfloat16", "float16")
PICTURES = "folder that the file names of images are relative to (default: the folder of SOURCE)"  # help of an option


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Adds `--trust-remote-code`, which `hub_options` reads."""
    trust = "run Python code that comes with a checkpoint; allow it only if you trust the checkpoint"
    parser.add_argument("--trust-remote-code", action="store_true", help=trust)


def hub_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments for every `from_pretrained`. All commands call them `hub`."""
    return {"trust_remote_code": arguments.trust_remote_code}


def add_device(parser: argparse._ActionsContainer, default: str = "auto") -> None:
    """Adds `--device`, which `device_of` reads."""
    told = "where the model runs: auto (a GPU if there is one, else the CPU), cpu, cuda, cuda:1, mps, xpu, ..."
    parser.add_argument("--device", default=default, help=f"{told} (default: {default})")


def device_of(name: str) -> Any:  # not `str`: mypy does not know that `model.to` takes a name
    """Returns the device that `--device` names. Raises torch's error if this machine does not have the device."""
    import torch

    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    torch.empty(0, device=name)
    return name


def add_answers(parser: argparse.ArgumentParser) -> None:
    """Adds the options that set how a chat answers. `answer_options` reads those of `generate`."""
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", metavar="TEXT", help="system message of the conversation (default: none)")
    add_number(answers, "--max-new-tokens", 256, "maximum number of tokens in an answer")
    temperature = (
        "temperature of sampling; with 0 the model always takes the most likely token (default: the model's generation "
        "settings)"
    )
    add_number(answers, "--temperature", None, temperature, float, "X", least=0)
    seed = "seed of sampling, with which sampled answers can be repeated (default: random)"
    answers.add_argument("--seed", type=int, metavar="N", help=seed)


def answer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments of `generate`, from the options of `add_answers`."""
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens}
    if arguments.temperature is not None:
        options["do_sample"] = arguments.temperature > 0
    if arguments.temperature:
        options["temperature"] = arguments.temperature
    return options


def add_number(
    parser: argparse._ActionsContainer,
    option: str,
    default: float | None,
    told: str,
    kind: type[int] | type[float] = int,
    metavar: str = "N",
    least: float = 1,
) -> None:
    """Adds an option that is a number of at least `least`. Its help is `told`, and behind it the default, if any."""

    def number(text: str) -> float:
        if not least <= (value := kind(text)) < math.inf:
            raise ValueError
        return value

    number.__name__ = f"{kind.__name__} of at least {least}"
    told += "" if default is None else f" (default: {default})"
    parser.add_argument(option, type=number, default=default, metavar=metavar, help=told)


def add_images(parser: argparse._ActionsContainer, required: bool = False) -> None:
    """Adds `--image`, whose files `load_model_and_images` reads."""
    told = "image file; repeat the option for several images"
    parser.add_argument("--image", action="append", required=required, metavar="FILE", help=told)


class _Once(argparse.Action):
    """Refuses an option that is given twice. argparse would keep the last value without a word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            raise argparse.ArgumentError(self, f"expected one source, got {first!r} and {values!r}")
        setattr(namespace, self.dest, values)


def add_data(parser: argparse.ArgumentParser, told: str, **options: Any) -> None:
    """Adds `--data` and `--pictures`, which name a source of rows. `told` is the help of `--data`."""
    parser.add_argument("--data", required=True, metavar="SOURCE", help=told, **{"action": _Once, **options})
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=PICTURES)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the name of the model."""
    parser.add_argument("model", metavar="MODEL", help="a model with blocks: a folder or a Hub id")


def add_loading(parser: argparse.ArgumentParser, device: str = "auto") -> None:
    """Adds the options that say how a model is loaded. They come last in the help."""
    loading = parser.add_argument_group("loading")
    dtype = "dtype of the weights (default: auto, the dtype in which they were saved)"
    loading.add_argument("--dtype", default="auto", choices=DTYPES, help=dtype)
    add_device(loading, device)
    add_trust(loading)


def load_model_and_images(arguments: argparse.Namespace) -> tuple[XAttnForConditionalGeneration, Any, list[Image]]:
    """Loads a model, its processor, and the images of `--image`.

    A model without a processor is returned with its tokenizer in place of the processor.
    """
    device = device_of(arguments.device)
    from transformers import AutoModelForImageTextToText

    from ..checkpoints.model_card import blindness
    from ..processing.image_reading import read_image

    hub = hub_options(arguments)
    check_model(arguments.model, **hub)
    processor = load_processor(arguments.model, **hub)
    images = [read_image(Path(file), "--image") for file in arguments.image or ()]
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    model = model.to(device).eval()
    if (why := blindness(model)) is not None:
        print(f"{arguments.model}: {why}", file=sys.stderr, flush=True)
    if images:
        check_images(arguments.model, processor)
    return model, _with_images_at_markers(processor, model), images


def check_images(model: str, processor: object) -> None:
    """Raises a `ValueError` for a processor that cannot read images. `model` names the model in the message."""
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"{model} cannot read images: it was saved without an image processor. Save its processor "
            "(`processor.save_pretrained`) into its folder."
        )


def load_processor(name: str, **hub: Any) -> Processor:
    """Loads the processor of a model, or its tokenizer if the model was saved without an image processor."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, cached_file

    from ..processing.base_processors import parts_of_bases

    parts = parts_of_bases(name, hub)
    if parts is not None and parts["image_processor"] is None:
        return parts["tokenizer"]
    absent_is_none = {f"_raise_exceptions_for_{case}": False for case in ("missing_entries", "connection_errors")}
    files = (cached_file(name, file, **absent_is_none) for file in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME))
    only_text = parts is None and all(file is None for file in files)
    return (AutoTokenizer if only_text else AutoProcessor).from_pretrained(name, **hub)


def load_shapes(name: str, **hub: Any) -> XAttnForConditionalGeneration:
    """Builds a saved model on the meta device, from its configuration alone. Raises the errors of [`check_model`]."""
    check_model(name, **hub)
    import torch

    from ..configuration_xattn import XAttnConfig
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..utils.custom_code import trusting

    with trusting(name, hub), torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(XAttnConfig.from_pretrained(name))


def check_model(name: str, **hub: Any) -> None:
    """Checks that a name is that of a model with blocks.

    Raises:
        ValueError: for a model without blocks.
        OSError: for a name that is neither a folder nor a Hub id.
    """
    from transformers import AutoConfig

    from ..checkpoints.gguf_files import is_gguf_path

    kind = "a GGUF file"
    if not is_gguf_path(name):
        config = AutoConfig.from_pretrained(name, **hub)
        if config.model_type == "xattn":
            return
        kind = f"a {config.model_type!r} model"
    raise ValueError(
        f"Expected a model with cross-attention blocks, got {name}, {kind} without cross-attention blocks. Run "
        f"`hf-xattn retrofit {name} --vision TOWER --output DIR` first."
    )


def _with_images_at_markers(processor: Any, model: XAttnForConditionalGeneration) -> Any:
    """Replaces an `IdeficsProcessor` by an [`XAttnProcessor`], which puts images where the markers stand in a text."""
    if type(processor).__name__ != "IdeficsProcessor":
        return processor
    from ..processing_xattn import XAttnProcessor

    marker = processor.tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if template is None and marker is not None:
        from ..importers.idefics import chat_template

        template = chat_template(processor.tokenizer, marker)
    return XAttnProcessor(processor.image_processor, processor.tokenizer, chat_template=template, image_token=marker)


def images_alone(processor: Processor) -> XAttnProcessor:
    """Returns an [`XAttnProcessor`] for images without text, of which other processors make other inputs."""
    from ..processing_xattn import XAttnProcessor

    if isinstance(processor, XAttnProcessor):
        return processor
    return XAttnProcessor(processor.image_processor, processor.tokenizer)


def new_folder(folder: Path) -> Path:
    """Returns `folder`. Raises a `ValueError` if it exists and is not an empty folder."""
    from ..utils.whole_folder import is_free

    if not is_free(folder):
        raise ValueError(
            f"`--output` must be new or empty, got {folder}, which is not an empty folder. Choose another folder."
        )
    return folder


def read_processor(
    text: str, vision: str | None, output: Path, *, image_token_id: int | None = None, **load_kwargs: Any
) -> Processor | None:
    """Reads the tokenizer of a text model and the image processor of a vision tower. Prints which of them is missing.

    Args:
        text (`str`): the text model: a folder, a GGUF file or a Hub id.
        vision (`str`, *optional*): the vision tower: a folder or a Hub id.
        output (`Path`): the folder that the processor will be saved to. A message names it.
        image_token_id (`int`, *optional*): id of the marker, if the tokenizer has one.
        load_kwargs: keyword arguments of `from_pretrained`. `gguf_file` is for the tokenizer alone.

    Returns:
        an [`XAttnProcessor`], the tokenizer if there is no image processor, or None if there is no tokenizer.
    """
    from transformers import AutoTokenizer

    from ..checkpoints.gguf_files import split_gguf
    from ..processing_xattn import XAttnProcessor
    from ..utils.transformers_api import AutoImageProcessor, check_tokenizer

    source, text_kwargs = split_gguf("text", text, load_kwargs)
    check_tokenizer(text_kwargs.get("gguf_file"))
    load_kwargs.pop("gguf_file", None)
    tokenizer = _read(AutoTokenizer, source, "tokenizer", text, text_kwargs)
    if tokenizer is None:
        print("No processor saved.")
        return None
    if vision is None:
        return tokenizer
    image_processor = _read(AutoImageProcessor, vision, "image processor", vision, load_kwargs)
    if image_processor is None:
        print("Processor saved without images.")
        return tokenizer
    image_token: Any = None
    if image_token_id is not None and image_token_id < len(tokenizer):
        image_token = tokenizer.convert_ids_to_tokens(image_token_id)
    elif image_token_id is not None:
        print(
            f"The tokenizer of {text} has no token {image_token_id}: add OpenFlamingo's tokens "
            f"(<|endofchunk|>, <image>) to the tokenizer in {output} before you use it."
        )
    return XAttnProcessor(image_processor, tokenizer, image_token=image_token)


def _read(auto_class: Any, source: str, what: str, where: str, load_kwargs: dict[str, Any]) -> Any:
    try:
        return auto_class.from_pretrained(source, **load_kwargs)
    except json.JSONDecodeError:  # the file is there, but damaged
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        print(f"{where} gives no {what}: {reason[:300]}")
        return None


def save_model(model: XAttnForConditionalGeneration, processor: Processor | None, output: Path, **options: Any) -> None:
    """Saves a model and its processor, if there is one, and prints what the blocks add.

    If an error ends the save, nothing is written. `options` are those of `save_pretrained`.
    """
    from ..utils.whole_folder import whole_folder

    with whole_folder(output) as folder:
        model.save_pretrained(folder, **options)
        if processor is not None:
            processor.save_pretrained(folder)
    print_report(model)


def print_report(model: XAttnForConditionalGeneration) -> None:
    """Prints what the blocks of a model add: one figure in each line."""
    from ..checkpoints.model_card import describe

    for name, value in describe(model).items():
        print(f"{name:<34} {value}")
