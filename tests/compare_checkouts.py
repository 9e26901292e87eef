"""Compares what two checkouts compute, for a change that must change nothing.

    python tests/compare_checkouts.py OTHER_CHECKOUT [--only WORD]

Each checkout runs the same small models in a process of its own: decoder types, options of the block, caches, saved
folders, image stores and chats. Logits are compared bit for bit, tokens one by one, saved folders by names and bytes.
Stored hashes would not do: kernels round differently on another processor.

A case is a function below whose name starts with `case_`, or an entry of a table. It gets a `Record` and adds what
must stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parents[1]
# Each is built from `tiny_architectures.py`, with weights strong enough that a lost state shows.
TYPES = (
    "llama qwen3 mistral gemma3_text gemma2 gpt2 opt gpt_neox phi3 olmo2 mixtral qwen3_moe bloom falcon mamba mamba2 "
    "jamba bamba falcon_h1 qwen3_next lfm2 zamba2 granitemoehybrid gptj xglm bert deepseek_v3 llama4_text"
).split()
# Options of block, connector and model, each on a Llama.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms_and_biases": {
        "cross_attention_config": {
            "norm_type": "layernorm",
            "attention_bias": True,
            "mlp_bias": True,
            "mlp_type": "plain",
        }
    },
    "qk_norm": {"cross_attention_config": {"qk_norm": True, "gate_granularity": "channel"}},
    "quiet_mqa": {"cross_attention_config": {"quiet_softmax": True, "num_key_value_heads": 1, "head_dim": 12}},
    "no_gate": {"cross_attention_config": {"gate": "none"}},
    "position_bias": {"cross_attention_config": {"position_bias": True}},
    "position_bias_quiet": {"cross_attention_config": {"position_bias": True, "quiet_softmax": True}},
    "previous": {"image_visibility": "previous", "image_token_id": 5},
    "latest": {"image_visibility": "latest", "image_token_id": 5},
    "latest_group": {"image_visibility": "latest_group", "image_token_id": 5},
    "marker_behind_vocabulary": {"image_visibility": "previous", "image_token_id": 96, "additional_vocab_size": 1},
    "perceiver": {
        "connector_type": "perceiver",
        "perceiver_config": {"num_image_positions": 4, "num_latents": 6, "num_hidden_layers": 2},
        "cross_attention_config": {"context_size": 24},
    },
    "linear": {"connector_type": "linear"},
    "two_blocks_at_a_place": {"cross_attention_layers": [0, 2, 2, 4]},
}


class Record(dict):
    """What a case has computed: names to texts that must be equal."""

    def add(self, name: str, value: Any) -> None:
        self[name] = _text(value)

    def folder(self, name: str, path: Path, skip: tuple[str, ...] = ()) -> None:
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix not in skip:
                self[f"{name}/{file.relative_to(path)}"] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _text(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if not value.dtype.is_floating_point:
            return f"{tuple(value.shape)} {value.tolist()}"
        digest = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return f"{tuple(value.shape)} {value.dtype} {digest} mean {value.double().mean().item():.6g}"
    if isinstance(value, (list, tuple)):
        return str([_text(each) for each in value])
    return str(value)


def tokens(rows: int = 2, length: int = 7, seed: int = 3, markers: tuple[int, ...] = ()):
    """Ids without special tokens, with image markers (token 5) at some places."""
    import torch

    ids = torch.randint(6, 96, (rows, length), generator=torch.Generator().manual_seed(seed))
    for place in markers:
        ids[:, place] = 5
    return ids


def pictures(rows: int = 2, images: int = 1, seed: int = 4):
    import torch

    return torch.randn(rows, images, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def build(model_type: str = "llama", dtype: str = "float32", **options: Any):
    """A model whose blocks, connector and text model have strong random weights."""
    import torch
    from transformers import AutoModelForCausalLM, SiglipVisionConfig

    from helpers.models.tiny_architectures import tiny_config
    from hf_xattn import XAttnConfig, XAttnForConditionalGeneration

    torch.manual_seed(0)
    text = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    options.setdefault("cross_attention_layers", [1, 3])
    vision = SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    config = XAttnConfig(text_config=text.config, vision_config=vision, **options)
    model = XAttnForConditionalGeneration(config, text_model=text).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "cross_attention_block" in name or "connector" in name:
                weight.copy_((torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name)).to(weight.dtype))
            elif weight.dim() > 1 and "vision_tower" not in name:
                weight.copy_((torch.randn(weight.shape, generator=generator) * 0.1).to(weight.dtype))
    return model.to(getattr(torch, dtype))


def look(record: Record, model: Any, **more: Any) -> None:
    """Logits with and without images, one step after another, and what `generate` writes."""
    import torch

    visibility = model.config.image_visibility
    marker = model.config.image_token_id
    ids = tokens(length=9, markers=() if marker is None else (1, 4))
    if marker is not None:
        ids[ids == 5] = marker
    images = pictures(images=2)
    real = torch.tensor([[True, True], [True, False]]) if visibility == "all" else None
    with torch.no_grad():
        record.add("text", model(tokens()).logits)
        record.add("images", model(ids, pixel_values=images, image_mask=real).logits)
        out = model(ids, pixel_values=images, image_mask=real, use_cache=True)
        record.add("step", model(tokens(length=1), past_key_values=out.past_key_values).logits)
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **more}
    record.add("greedy", model.generate(ids, pixel_values=images, image_mask=real, **asked))
    record.add("text only", model.generate(tokens(), **asked))


def case_type(record: Record, name: str) -> None:
    look(record, build(name))


def case_option(record: Record, name: str) -> None:
    model = build(**OPTIONS[name])
    look(record, model)
    _saved(record, model)


def _saved(record: Record, model: Any) -> None:
    """Saves a model and loads it again."""
    import torch
    from transformers import AutoModelForImageTextToText

    model.save_pretrained("whole")
    record.folder("whole", Path("whole"))
    ids = tokens(length=9)
    if model.config.image_token_id is not None:
        ids[:, 1] = model.config.image_token_id
    with torch.no_grad():
        again = AutoModelForImageTextToText.from_pretrained("whole")
        record.add("loaded", again(ids, pixel_values=pictures()).logits)


def case_dtype(record: Record, name: str) -> None:
    look(record, build(dtype=name, cross_attention_config={"num_key_value_heads": 2}))


GENERATE: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "off": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "chunks": {"prefill_chunk_size": 3},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True, "output_logits": True},
}


def case_generate(record: Record, name: str) -> None:
    import torch

    for rule in ("all", "previous"):
        options = {} if rule == "all" else {"image_visibility": rule, "image_token_id": 5}
        model = build(**options)
        rows = 1 if name == "lookup" else 2
        ids = tokens(rows, length=9, markers=(1, 4))
        asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **GENERATE[name]}
        torch.manual_seed(7)
        out = model.generate(ids, pixel_values=pictures(rows, images=2), attention_mask=torch.ones_like(ids), **asked)
        record.add(rule, out if isinstance(out, torch.Tensor) else out.sequences)
        if not isinstance(out, torch.Tensor):
            record.add(f"{rule} logits", torch.stack(out.logits))
            record.add(f"{rule} weights", [each for step in out.cross_attentions for each in step])


def case_assisted(record: Record, name: str) -> None:
    model, assistant = build(), build(cross_attention_layers=[0])
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    record.add(
        "tokens", model.generate(tokens(rows=1), pixel_values=pictures(rows=1), assistant_model=assistant, **asked)
    )


def case_masks(record: Record, name: str) -> None:
    """Masks of the text, of tokens and of images, left padding, packed rows, shared rows of images."""
    import torch

    model, ids = build(), tokens(length=6)
    by_text = torch.rand(2, 6, 32, generator=torch.Generator().manual_seed(2)) > 0.5
    by_text[0, 2] = False
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        for what, given in {
            "by text": {"cross_attention_mask": by_text},
            "by token": {"cross_attention_mask": by_text[:, 0]},
            "by image": {"image_mask": torch.tensor([[True, False], [False, False]])},
            "left padding": {"attention_mask": padded},
            "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2), "cross_attention_mask": by_text},
        }.items():
            record.add(what, model(ids, pixel_values=pictures(images=2), **given).logits)
        rows = torch.tensor([0, 1, 0, -1])
        record.add("rows", model(tokens(rows=4), pixel_values=pictures(), image_rows=rows).logits)
        marked = build(image_visibility="previous", image_token_id=5)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
        given = tokens(length=6, markers=(1, 4))
        record.add("packed by markers", marked(given, pixel_values=pictures(images=2), position_ids=positions).logits)
        states = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(9))
        blind = build(cross_attention_config={"context_size": 24})
        record.add("states", blind(ids, cross_attention_states=states).logits)
        record.add("features", blind.get_image_features(pictures(images=2)).pooler_output)


def case_cache(record: Record, name: str) -> None:
    """Images encoded once, several turns, other images, int8, select and repeat, a caller's own cache."""
    import torch
    from transformers import DynamicCache, EncoderDecoderCache

    for dtype in (None, "int8"):
        model = build(image_visibility="previous", image_token_id=5)
        with torch.no_grad():
            images = model.encode_images(pictures(images=2), cache_dtype=dtype)
            asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "past_key_values": images}
            record.add(f"{dtype} first", model.generate(tokens(length=9, markers=(1, 4)), **asked))
            record.add(f"{dtype} second", model.generate(tokens(length=8, markers=(2, 3), seed=8), **asked))
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            ids = tokens(length=6, markers=(1,))
            record.add(f"{dtype} turn 1", model(ids, pixel_values=pictures(), past_key_values=cache).logits)
            ids = tokens(length=4, markers=(0,), seed=11)
            record.add(f"{dtype} turn 2", model(ids, pixel_values=pictures(seed=6), past_key_values=cache).logits)
            cache.crop(-2)
            record.add(f"{dtype} cropped", model(tokens(length=3, seed=12), past_key_values=cache).logits)
            cache.batch_repeat_interleave(2)
            record.add(f"{dtype} repeated", model(tokens(rows=4, length=2, seed=13), past_key_values=cache).logits)
            cache.batch_select_indices(torch.tensor([3, 0]))
            record.add(f"{dtype} selected", model(tokens(length=2, seed=14), past_key_values=cache).logits)


def case_store(record: Record, name: str) -> None:
    model = build(image_visibility="previous", image_token_id=5)
    for dtype in (None, "int8"):
        model.enable_image_store(2**24, dtype)
        for seed in (4, 4, 5):
            asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
            ids = tokens(length=9, markers=(1, 4))
            record.add(f"{dtype} {seed}", model.generate(ids, pixel_values=pictures(images=2, seed=seed), **asked))
        record.add(f"{dtype} counts", (model.image_store.hits, model.image_store.misses, model.image_store.nbytes))


def case_training(record: Record, name: str) -> None:
    """Loss, gradients of all parts, and weights after two steps; with gradient checkpointing too."""
    import torch

    import hf_xattn

    for checkpointing in (False, True):
        model = build(image_visibility="previous", image_token_id=5)
        if checkpointing:
            model.activation_checkpointing_enable()
        hf_xattn.freeze(model, text=True)
        model.train()
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
        ids = tokens(length=9, markers=(1, 4))
        for step in range(2):
            loss = model(ids, pixel_values=pictures(images=2), labels=ids).loss
            loss.backward()
            record.add(f"{checkpointing} loss {step}", loss)
            if not step:
                for weight_name, weight in model.named_parameters():
                    if weight.grad is not None:
                        record.add(f"{checkpointing} gradient of {weight_name}", weight.grad)
            optimizer.step()
            optimizer.zero_grad()


def case_small_folders(record: Record, name: str) -> None:
    """Folders without the bases, with code, in shards, and the blocks alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, SiglipVisionModel

    import hf_xattn

    whole = build()
    torch.manual_seed(5)
    from helpers.models.tiny_architectures import tiny_config

    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained("text")
    SiglipVisionModel(whole.config.vision_config).save_pretrained("tower")
    model = hf_xattn.retrofit("text", "tower", every=2)
    record.add("first weights", [weight for _, weight in sorted(model.named_parameters())])
    model.save_pretrained("small", adapter_only=True)
    record.folder("small", Path("small"))
    model.save_pretrained("sharded", max_shard_size="40KB")
    record.folder("sharded", Path("sharded"))
    model.save_pretrained("code", with_code=True)
    record.folder("code", Path("code"), skip=(".py", ".json"))
    model.blocks[0].save_pretrained("block")
    record.folder("block", Path("block"))
    for folder in ("small", "sharded", "code"):
        again = AutoModelForImageTextToText.from_pretrained(folder)
        with torch.no_grad():
            record.add(folder, again(tokens(), pixel_values=pictures()).logits)


def case_chat(record: Record, name: str) -> None:
    """Templates, processor, collator, and two turns of a chat."""
    from helpers.inputs.chat_templates import SEEING, TEXT_TEMPLATES, image, make_processor, text
    from hf_xattn import XAttnDataCollator

    talk = [
        {"role": "user", "content": [image(0), text("what is this ?")]},
        {"role": "assistant", "content": [text("a dog .")]},
        {"role": "user", "content": [text("and "), image(1), text("?")]},
    ]
    for kind, template in {"text": TEXT_TEMPLATES["trim"], "seeing": SEEING}.items():
        processor = make_processor(template, marker="<image>")
        inputs = processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=True)
        for argument, value in sorted(inputs.items()):
            record.add(f"{kind} {argument}", value)
        batch = XAttnDataCollator(processor, train_on="answers")([{"messages": talk + talk[1:2]}] * 2)
        for argument, value in sorted(batch.items()):
            record.add(f"{kind} collated {argument}", value)
        Path(kind).mkdir()
        processor.save_pretrained(kind)
        record.folder(kind, Path(kind))


def case_maps(record: Record, name: str) -> None:
    import hf_xattn

    model = build()
    maps = hf_xattn.attention_maps(model, {"input_ids": tokens(), "pixel_values": pictures(images=2)})
    record.add("weights", maps.weights)


CASES: dict[str, tuple[Callable[[Record, str], None], tuple[str, ...]]] = {
    "type": (case_type, tuple(TYPES)),
    "option": (case_option, tuple(OPTIONS)),
    "dtype": (case_dtype, ("bfloat16", "float16")),
    "generate": (case_generate, tuple(GENERATE)),
    **{
        name.removeprefix("case_"): (function, ("",))
        for name, function in list(globals().items())
        if name.startswith("case_") and name not in ("case_type", "case_option", "case_dtype", "case_generate")
    },
}


def run(checkout: Path, output: Path, only: str) -> None:
    """Runs all cases with the package of a checkout, and writes what they record."""
    sys.path[:0] = [str(checkout), str(HERE / "tests"), str(HERE / "examples")]
    import torch
    import transformers

    import hf_xattn

    found = Path(hf_xattn.__file__).resolve().parents[1]
    if found != checkout:
        raise SystemExit(f"Expected the package of {checkout}, got that of {found}.")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: dict[str, dict[str, str]] = {}
    for kind, (function, names) in CASES.items():
        for name in names:
            title = f"{kind} {name}".strip()
            if only not in title:
                continue
            record = Record()
            torch.manual_seed(0)
            folder = output.with_name("work")  # of one name for both checkouts: configurations hold paths
            folder.mkdir()
            os.chdir(folder)
            try:
                function(record, name)
            except Exception as error:  # an error is a result, too
                record.add("error", f"{type(error).__name__}: {error}")
            os.chdir(output.parent)
            shutil.rmtree(folder)
            results[title] = record
    output.write_text(json.dumps(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout to compare with this one")
    parser.add_argument("--only", default="", help="only cases whose title holds this text")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None:
        run(arguments.other.resolve(), arguments.output, arguments.only)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.json")
        for checkout in (arguments.other.resolve(), HERE):
            command = [sys.executable, __file__, str(checkout), "--output", str(output), "--only", arguments.only]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)}
            subprocess.run(command, check=True, cwd=folder, env=environment)
            results.append(json.loads(output.read_text()))
    return compare(*results)


def compare(other: dict[str, dict[str, str]], here: dict[str, dict[str, str]]) -> int:
    """Prints each difference. Returns the number of cases that differ."""
    differing = 0
    for title, mine in here.items():
        theirs = other[title]
        differences = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
        differing += bool(differences)
        for name in differences:
            print(f"{title}, {name}:\n    there {theirs.get(name)}\n    here  {mine.get(name)}")
        if "error" in mine and not differences:
            print(f"{title}: both end in {mine['error']}")
    count = sum(map(len, here.values()))
    print(f"{len(here)} cases, {count} values: {differing} cases differ.")
    return differing


if __name__ == "__main__":
    sys.exit(min(main(), 1))
