"""Writes the model card (`README.md`) of a saved model: what it is, how it loads, what was added, how it was trained.

A card states only facts that are known from the configuration, from the cards of the bases, and from the training run.
It names a local checkpoint by the name of its folder, without the path. A card that a person wrote or changed is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCardData, metadata_load, try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration_xattn import CrossAttentionConfig, XAttnConfig
from ..images.image_encoder import ModelWithBlocks
from ..images.tower import UNSIZED, blank_image, image_size_of
from ..utils.checkpoint_files import CARD
from ..utils.parts import named_parts
from ..utils.transformers_api import is_blank_card
from ..utils.whole_folder import whole_file
from ..version import HOW_TO_INSTALL
from .own_parts import skeleton_of


if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.get_logger(__name__)

MARK = "<!-- Written by hf_xattn, and written anew by a later save. A card that was changed is kept. sha256: {} -->"
# The beginning of the draft that `Trainer.create_model_card` writes.
DRAFT = "<!-- This model card has been generated automatically according to the information the Trainer had access to."
LICENCE_KEYS = ("license", "license_name", "license_link")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The example in a card asks the model in its chat template, as it was trained.
ASKING = """\
question = [{"type": "image", "image": Image.open("picture.png")}, {"type": "text", "text": "..."}]
chat = [{"role": "user", "content": question}]
inputs = processor.apply_chat_template(
    chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)  # text without a chat template: processor(text="...", images=Image.open("picture.png"))
tokens = model.generate(**inputs, max_new_tokens=64)
print(processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
ASKING_OF_FEATURES = """\
text, features = "...", ...  # features: (batch, num_tokens, context_size)
if tokenizer.chat_template:
    chat = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
tokens = model.generate(**inputs, cross_attention_states=features, max_new_tokens=64)
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def write_model_card(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    trainer: Trainer | None = None,
    training: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    base: list[str] | None = None,
    questions: list[str] | None = None,
) -> bool:
    """Writes the model card of a saved model. `save_pretrained` calls this.

    Call it again to add what only the training run knows. `Trainer.create_model_card` writes a draft of its own, which
    this function replaces if `trainer` is given.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model that was saved.
        folder (`str`): the folder that it was saved to.
        trainer (`Trainer`, *optional*): the trainer of the run, for its arguments and losses.
        training (`dict`, *optional*): further facts about the training, by name.
        results (`dict`, *optional*): what was measured, by name.
        base (`list[str]`, *optional*): checkpoints that the model was made of, if its configuration does not name them.
        questions (`list[str]`, *optional*): example questions. They go into the `widget` of the card, from which
            `hf-xattn web` takes them.

    Returns:
        `bool`: whether the card was written. It is False if a person wrote or changed the card in the folder.

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> model.save_pretrained("fresh")
    >>> hf_xattn.write_model_card(model, "fresh", training={"data": "photographs of my garden"})
    True
    ```
    """
    path = Path(folder) / CARD
    if path.exists() and is_edited(path.read_text(encoding="utf-8", errors="replace"), trainer is not None):
        logger.info(f"{path} is kept: a person wrote or changed it.")
        return False
    if trainer is not None:
        training = {**training_facts(trainer), **(training or {})}
        results = {**_losses(trainer), **(results or {})}
    with whole_file(path) as file:
        config: Any = model.config
        file.write_text(_card(config, model, training, results, base, questions), encoding="utf-8")
    return True


def is_edited(text: str, after_training: bool = False) -> bool:
    """Whether a person wrote or changed a card: its digest is not the one that this package wrote into it.

    After a training, `Trainer`'s own draft counts as written by nobody.
    """
    if (found := re.search(MARK.format("([0-9a-f]{64})"), text)) is not None:
        return found[1] != _digest(text.replace(found[1], ""))
    return not is_blank_card(text) and not (after_training and DRAFT in text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def example_questions(name: str | None) -> list[str]:
    """Returns the questions (`widget`) in the card of a folder, or of a Hub id that was downloaded.

    At most 16 questions of at most 500 characters are returned.
    """
    given = _card_data(name).get("widget")
    texts = [each.get("text") for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    return [text for text in texts if isinstance(text, str) and 0 < len(text) <= 500][:16]


def _card(config: XAttnConfig, model: Any, training: Any, results: Any, base: Any, questions: Any) -> str:
    text, vision = config.text_config, config.vision_config
    earlier = _card_data(config.name_or_path)  # the card of the folder that the model was loaded from
    sources = base or [part.name_or_path for part in (text, vision) if part is not None and part.name_or_path]
    known = earlier.get("base_model", [])
    data = ModelCardData(
        base_model=list(filter(_is_on_hub, sources)) or ([known] if isinstance(known, str) else known) or None,
        library_name="transformers",
        pipeline_tag="text-generation" if vision is None else "image-text-to-text",
        tags=["hf_xattn", "gated-cross-attention"],
        widget=[{"text": question} for question in questions or []] or None,
        **{key: earlier[key] for key in LICENCE_KEYS if key in earlier} or _common_licence(sources),
    )
    made_of = " and ".join(f"`{_shown(name)}`" for name in sources)
    tower = "" if vision is None else f" and a `{vision.model_type}` vision tower"
    name = _shown(sources[0]).rpartition("/")[2] if sources else ""
    untrained = " They are as initialised: images do not change the answers until the model is trained."
    sections = [
        f"---\n{data}\n---",
        MARK.format(""),
        f"# {name or text.model_type} with cross-attention",
        f"A `{text.model_type}` text decoder with gated cross-attention blocks{tower}."
        f"{f' It was made of {made_of}.' if sources else ''} "
        f"The blocks come from `hf_xattn`, a plug-in for transformers.{untrained if is_fresh(model) else ''}",
        "## How to load",
        HOW_TO_INSTALL,
        _loading(config),
    ]
    for title, rows in (("What was added", _figures(config, model)), ("Training", training), ("Results", results)):
        if rows:
            sections += [f"## {title}", _table(rows)]
    whole = "\n\n".join(sections) + "\n"
    return whole.replace(MARK.format(""), MARK.format(_digest(whole)))


def _loading(config: XAttnConfig) -> str:
    sees = config.vision_config is not None
    kind, part = ("ImageTextToText", "Processor") if sees else ("CausalLM", "Tokenizer")
    lines = [
        *(["from PIL import Image"] if sees else []),
        f"from transformers import AutoModelFor{kind}, Auto{part}",
        "",
        "import hf_xattn  # or pass trust_remote_code=True below",
        *(
            f"# first: hf_xattn.register_{parts.kind}({name!r}, ...), with the class of this {parts.kind}"
            for parts, name in named_parts(config)
            if parts.is_own(name)
        ),
        "",
        'name = "..."  # this folder or repository',
        f"model = AutoModelFor{kind}.from_pretrained(name)",
        f"{part.lower()} = Auto{part}.from_pretrained(name)",
        ASKING if sees else ASKING_OF_FEATURES,
    ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _figures(config: XAttnConfig, model: Any) -> dict[str, Any]:
    """Calls [`describe`] for a copy without weights, because the model itself may be sharded or quantized."""
    skeleton: Any = skeleton_of(model)
    if skeleton is not None:
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # a part may need values to run
            return {name.removesuffix(", frozen"): value for name, value in describe(skeleton).items()}
    return {"blocks in front of layers": ", ".join(map(str, config.cross_attention_layers))}


def training_facts(trainer: Trainer) -> dict[str, Any]:
    """Returns the facts of a run.

    transformers' `TrainingSummary` is not enough. It names the optimizer of the arguments, although the caller may have
    passed another one, and the last evaluation, although the best checkpoint may have been loaded at the end.
    """
    args, state = trainer.args, trainer.state
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    groups = [group for group in getattr(optimizer, "param_groups", None) or [] if group["params"]]
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    stepped = sum(weight.numel() for group in groups for weight in group["params"])
    rates = {float(group.get("initial_lr", group["lr"])) for group in groups} or {args.learning_rate}
    decays = {float(group.get("weight_decay", 0)) for group in groups} - {0.0}
    best = f"{state.best_global_step:,}, the best of " if _has_best(trainer) else ""
    of_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    facts = {
        # Weights that were trained may be merged or frozen by now, so those in the optimizer count too.
        "parameters trained": f"{max(trained, stepped):,} of {_num_parameters(model):,}",
        "optimizer steps": f"{best}{state.global_step:,}",
        "epochs": None if state.epoch is None else f"{state.epoch:.4g}",
        "examples a step": of_process * args.world_size * max(1, args.n_gpu),
        "learning rate": ", ".join([*(f"{rate:g}" for rate in sorted(rates)), schedule]),
        "optimizer": type(optimizer).__name__ if groups else None,
        "weight decay": ", ".join(f"{decay:g}" for decay in sorted(decays)) or None,
        "seed": args.seed,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _has_best(trainer: Trainer) -> bool:
    """Whether the run has loaded the weights of its best checkpoint at its end."""
    best = trainer.state.best_model_checkpoint is not None and trainer.state.best_global_step is not None
    return bool(trainer.args.load_best_model_at_end) and best


def _losses(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = getattr(trainer, "_initial_global_step", 0)  # the step at which the run was resumed
    steps = f"the steps {before + 1} to {trainer.state.global_step}" if before else "all steps"
    for entry in trainer.state.log_history:
        for key, name in (("train_loss", f"training loss, mean of {steps}"), ("eval_loss", "evaluation loss")):
            other = _has_best(trainer) and entry.get("step") != trainer.state.best_global_step
            if key in entry and not (key == "eval_loss" and other):
                step = f" (step {entry['step']})" if key == "eval_loss" and "step" in entry else ""
                found[name] = f"{entry[key]:.4f}{step}"
    return found


def _is_on_hub(name: str) -> bool:
    if REPOSITORY.fullmatch(name) is None or Path(name).is_dir():
        return False
    return "/" in name or isinstance(try_to_load_from_cache(name, "config.json"), str)


def _shown(name: str) -> str:
    """Returns a Hub id as it is, and the last part of a path."""
    return name if _is_on_hub(name) else os.path.basename(os.path.normpath(name.replace("\\", "/")))


def _card_data(name: str | None) -> dict[str, Any]:
    """Returns the data of a checkpoint's card. They are empty if the card is damaged or not on this machine."""
    file: Any = Path(name or "", CARD)
    if name and not Path(name).is_dir() and _is_on_hub(name):
        file = try_to_load_from_cache(name, CARD)
    if not name or not isinstance(file, (str, Path)) or not Path(file).is_file():
        return {}
    try:
        return metadata_load(file) or {}
    except Exception:  # the card may come from a stranger and raise anything
        return {}


def _common_licence(sources: list[str]) -> dict[str, Any]:
    """Returns the licence of the checkpoints, or nothing if the licences differ or one is not known."""
    licences = [{key: head[key] for key in LICENCE_KEYS if key in head} for head in map(_card_data, sources)]
    first = licences[0] if licences else {}
    return first if "license" in first and all(each == first for each in licences) else {}


def _table(rows: dict[str, Any]) -> str:
    cells = ((str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows.items())
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def tokens_per_image(model: ModelWithBlocks) -> int | None:
    """Returns the number of image tokens of a blank image. None for a model without a vision tower."""
    vision, tower = model.config.vision_config, model.base_model.vision_tower
    if vision is None or tower is None:
        return None
    blank = blank_image(vision, tower.device, tower.dtype)
    with torch.no_grad():
        return model.base_model.image_encoder.features(*blank).shape[2]


def key_value_bytes_per_token(config: CrossAttentionConfig, num_blocks: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one image token in all blocks."""
    return 2 * num_blocks * config.num_key_value_heads * config.head_dim * dtype.itemsize


def flops_per_text_token(config: CrossAttentionConfig, num_blocks: int, num_image_tokens: int) -> int:
    """Returns the floating point operations that the blocks add to one text token. A multiply-add counts as 2.

    The projections of keys and values are not counted, because they run once for each image.
    """
    query_size = config.num_attention_heads * config.head_dim
    projections = 2 * 2 * config.hidden_size * query_size
    attention = 2 * 2 * query_size * num_image_tokens
    matrices = {"gated": 3, "plain": 2, "none": 0}[config.mlp_type]
    mlp = 2 * matrices * config.hidden_size * config.intermediate_size
    return num_blocks * (projections + attention + mlp)


def describe(model: ModelWithBlocks) -> dict[str, Any]:
    """Returns the figures of a model, by name, as texts to print."""
    config, block = model.config, model.config.cross_attention_config
    layers, tower = config.cross_attention_layers, config.vision_config
    added = sum(map(_num_parameters, model.blocks))
    text = _num_parameters(model.base_model.text_model) - added
    vision, connector = _num_parameters(model.base_model.vision_tower), _num_parameters(model.base_model.connector)
    dtype = model.blocks[0].attn.k_proj.weight.dtype  # of keys and values
    tokens = tokens_per_image(model)
    per_token = key_value_bytes_per_token(block, len(layers), dtype)
    heads = f"{block.num_attention_heads}/{block.num_key_value_heads} heads of {block.head_dim}"
    figures: dict[str, Any] = {
        "text decoder": f"{config.text_config.model_type}, {text:,} parameters",
        "vision tower": "none" if tower is None else f"{tower.model_type}, {vision:,} parameters",
        "blocks in front of layers": ", ".join(map(str, layers)),
        "block": f"{heads}, context {block.context_size}, {block.norm_type}, gate {block.gate}",
        "parameters added (blocks)": f"{added:,}",
        "parameters added (connector)": f"{connector:,}",
        "parameters of the base, frozen": f"{text + vision:,}",
        "K/V bytes an image token": f"{per_token:,} ({str(dtype).removeprefix('torch.')})",
    }
    compute = flops_per_text_token(block, len(layers), tokens or 0)
    if tokens is not None and tower is not None:
        image = "image" if image_size_of(tower) else f"image of {UNSIZED} x {UNSIZED} pixels"
        figures[f"tokens an {image}"] = f"{tokens:,}"
        figures[f"K/V bytes an {image}"] = f"{tokens * per_token:,}"
        figures["compute added a text token"] = f"{compute:,} FLOP with one {image}"
    else:
        of_token = flops_per_text_token(block, len(layers), 1) - compute
        figures["compute added a text token"] = f"{compute:,} FLOP, and {of_token:,} an image token"
    return figures


def is_fresh(model: ModelWithBlocks) -> bool:
    """Whether the blocks are as they were initialised and add nothing. False if their weights cannot be read."""
    config = model.config.cross_attention_config
    if not config.starts_at_identity:
        return False
    last = [block.attn.o_proj for block in model.blocks]
    last += [block.mlp.down_proj for block in model.blocks if block.mlp is not None]
    gates = [gate for block in model.blocks for gate in (block.attn_gate, block.mlp_gate) if gate is not None]
    weights: list[Any] = [module.weight for module in last] if config.zero_init else gates
    # A gate of a user's own class has weights of which it is not known which ones make it zero. Sharded weights cannot
    # be read by one process alone. A projection of zeros with an adapter adds something.
    whole = all(type(weight) is nn.Parameter and not weight.is_meta and weight.numel() for weight in weights)
    return whole and all(type(module) is nn.Linear for module in last) and not any(bool(each.any()) for each in weights)


def blindness(model: ModelWithBlocks) -> str | None:
    """Returns why a model sees nothing: it has no vision tower, or its blocks are untrained. None if it may see."""
    fresh = is_fresh(model)
    if model.config.vision_config is None:
        untrained = " They are untrained and see nothing yet." if fresh else ""
        what = "The model is blind: it has no vision tower. Its blocks read features (`cross_attention_states`)."
        return what + untrained
    return "The blocks are untrained: they see nothing yet, and images change no answer." if fresh else None


def _num_parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
