"""What several commands share: options, loading of a model with its processor and images, what they write and print."""

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

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `hub_options` reads."""
    parser.add_argument("--trust-remote-code", action="store_true", help="run custom code that a checkpoint contains")


def hub_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments of every `from_pretrained`: here and elsewhere, `hub`."""
    return {"trust_remote_code": arguments.trust_remote_code}


def add_device(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """Adds the option that `device_of` reads."""
    told = f"auto (a GPU if there is one), cpu, cuda, cuda:1, mps, xpu, ... (default: {default})"
    parser.add_argument("--device", default=default, help=told)


def device_of(name: str) -> Any:  # mypy knows no `to` of a model that takes a name
    """Returns the device that `--device` names. Raises torch's error for one that this machine does not have."""
    import torch

    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    torch.empty(0, device=name)
    return name


def add_answers(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `answer_options` reads."""
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_number(parser, "--max-new-tokens", 256, "maximum number of tokens in an answer")
    temperature = "0 always takes the most likely token (default: the model's generation settings)"
    add_number(parser, "--temperature", None, temperature, float, "X", least=0)
    parser.add_argument("--seed", type=int, help="makes sampled answers repeatable")


def answer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments of `generate`."""
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
    """Adds an option that is a number, of which `least` is the smallest. The help ends with the default, if any."""

    def number(text: str) -> float:
        if not least <= (value := kind(text)) < math.inf:
            raise ValueError
        return value

    number.__name__ = f"{kind.__name__} of at least {least}"
    told += "" if default is None else f" (default: {default})"
    parser.add_argument(option, type=number, default=default, metavar=metavar, help=told)


def add_images(parser: argparse._ActionsContainer, required: bool = False) -> None:
    told = "an image; repeat the option for several images"
    parser.add_argument("--image", action="append", required=required, metavar="FILE", help=told)


class _Once(argparse.Action):
    """Refuses an option that is given again: of two sources argparse would keep the last one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            raise argparse.ArgumentError(self, f"expected one source, got {first!r} and {values!r}")
        setattr(namespace, self.dest, values)


def add_data(parser: argparse.ArgumentParser, told: str, **options: Any) -> None:
    """Adds the options that name a source of rows."""
    parser.add_argument("--data", required=True, metavar="SOURCE", help=told, **{"action": _Once, **options})
    pictures = "where names of pictures begin (default: the folder of the source)"
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)


def add_model(parser: argparse.ArgumentParser, device: str = "auto") -> None:
    """Adds the options that `load_model_and_images` reads, except `--image`."""
    parser.add_argument("model", metavar="DIR", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    add_device(parser, device)
    add_trust(parser)


def load_model_and_images(arguments: argparse.Namespace) -> tuple[XAttnForConditionalGeneration, Any, list[Image]]:
    """Loads a model, its processor, or its tokenizer if it has no processor, and the images of `--image`."""
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


def check_images(model: str, processor: Any) -> None:
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{model} cannot read images: it was saved without an image processor.")


def load_processor(name: str, **hub: Any) -> Any:
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
    """Builds a saved model on the meta device. Reads only the configuration. Errors as [`check_model`]."""
    check_model(name, **hub)
    import torch

    from ..configuration_xattn import XAttnConfig
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..utils.custom_code import trusting

    with trusting(name, hub), torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(XAttnConfig.from_pretrained(name))


def check_model(name: str, **hub: Any) -> None:
    """Raises a `ValueError` for a model without blocks, and an error for a name that is no folder and no Hub id."""
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
        f"`hf-xattn retrofit {name} --vision VISION_MODEL --output DIR` first."
    )


def _with_images_at_markers(processor: Any, model: XAttnForConditionalGeneration) -> Any:
    """Makes an `IdeficsProcessor` an [`XAttnProcessor`], which follows markers."""
    if type(processor).__name__ != "IdeficsProcessor":
        return processor
    from ..processing_xattn import XAttnProcessor

    marker = processor.tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if template is None and marker is not None:
        from ..importers.idefics import chat_template

        template = chat_template(processor.tokenizer, marker)
    return XAttnProcessor(processor.image_processor, processor.tokenizer, chat_template=template, image_token=marker)


def images_alone(processor: Any) -> Any:
    """An [`XAttnProcessor`]: other processors make other inputs of images without text."""
    from ..processing_xattn import XAttnProcessor

    if isinstance(processor, XAttnProcessor):
        return processor
    return XAttnProcessor(processor.image_processor, processor.tokenizer)


def new_folder(folder: Path) -> Path:
    """Returns a folder that is new or empty. Raises a `ValueError` for any other."""
    from ..utils.whole_folder import is_free

    if not is_free(folder):
        raise ValueError(f"`--output` must be new or empty, got {folder}, which is not an empty folder.")
    return folder


def read_processor(
    text: str, vision: str | None, output: Path, *, image_token_id: int | None = None, **load_kwargs: Any
) -> Any:
    """Reads the tokenizer of a text model and the image processor of a vision model. Prints which of them is missing.

    Returns an [`XAttnProcessor`], the tokenizer if there is no image processor, or None if there is no tokenizer.
    `output` is the folder that it goes to, for a message. `load_kwargs` may hold `gguf_file`, for the tokenizer.
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
    except json.JSONDecodeError:  # it is there, but damaged
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        print(f"{where} gives no {what}: {reason[:300]}")
        return None


def save_model(model: XAttnForConditionalGeneration, processor: Any, output: Path, **options: Any) -> None:
    """Saves a model, with its processor if there is one, whole or not at all, and prints what its blocks add."""
    from ..utils.whole_folder import WholeFolder

    with WholeFolder(output) as folder:
        model.save_pretrained(folder, **options)
        if processor is not None:
            processor.save_pretrained(folder)
    print_report(model)


def print_report(model: XAttnForConditionalGeneration) -> None:
    """Prints what the model's blocks add, one figure a line."""
    from ..checkpoints.model_card import describe

    for name, value in describe(model).items():
        print(f"{name:<34} {value}")
