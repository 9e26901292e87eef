"""What a rank of `test_tensor_parallel.py` does: `torchrun --nproc-per-node N tensor_parallel_ranks.py FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache
from transformers.distributed import DistributedConfig

from helpers.models import own_parts  # noqa: F401  # registers them
from helpers.references.gradient_checks import without_dropout
from hf_xattn import attention_maps
from hf_xattn.storage.image_files import load_image_cache, save_image_cache
from hf_xattn.utils.transformers_api import CACHE


def error_of(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def largest(one, other) -> float:
    return (one - other).abs().max().item()


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def work(folder: Path) -> dict:
    expected = torch.load(folder / "expected.pt")
    text, ids = expected["text"], expected["text"]["input_ids"]
    images = {"pixel_values": expected["pixel_values"]}
    size = {"distributed_config": DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))}
    model = AutoModelForImageTextToText.from_pretrained(
        folder, **({"tp_plan": "auto"} if folder.name == "auto" else size)
    )
    found = {}
    with torch.no_grad():
        outputs = model(**text, **images)
        found["logits"] = largest(outputs.logits, expected["logits"])
        masked = model(input_ids=ids, **images, cross_attention_mask=expected["mask"])
        found["masked"] = largest(masked.logits, expected["masked"])
        found["one key"] = largest(
            model(input_ids=ids, cross_attention_states=expected["key"]).logits, expected["one key"]
        )
    found["cached heads"] = outputs[CACHE].cross_attention_cache.layers[0].keys.shape[1]
    found["rows of q_proj"] = getattr(model.blocks[0].attn.q_proj.weight, "_local_tensor", expected["key"]).shape[0]
    encoded = model.encode_images(**images)
    for name, given in (("generated", images), ("from a cache", {"cache": encoded})):
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=6, do_sample=False)
        found[name] = torch.equal(tokens, expected["tokens"])
    with torch.no_grad():
        small = model.encode_images(**images, cache_dtype="int8")
        layer = small.cross_attention_cache.layers[0]
        found["int8 heads"] = [tensor.shape[1] for tensor in layer.tensors]
        small = small.fork(DynamicCache(config=model.config.get_text_config(decoder=True)))
        found["int8"] = largest(model(input_ids=ids, cache=small).logits, expected["int8"])
    file = folder / f"images-{dist.get_rank()}.safetensors"
    found["saving images"] = error_of(lambda: save_image_cache(encoded, file, model))
    found["maps"] = error_of(
        lambda: attention_maps(model, {"input_ids": ids[:1], "pixel_values": images["pixel_values"][:1]})
    )
    if not found["saving images"]:
        loaded = load_image_cache(file, model)
        keys = encoded.cross_attention_cache.layers[0].keys
        found["loaded images"] = torch.equal(loaded.cross_attention_cache.layers[0].keys, keys)
    without_dropout(model)
    model(**text, **images).loss.backward()
    gradients = {name: whole_of(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
    found["without gradient"] = sorted(expected["gradients"].keys() ^ gradients.keys())
    found["gradients"] = max(
        largest(gradient, expected["gradients"][name]) / max(1e-3, expected["gradients"][name].abs().max().item())
        for name, gradient in gradients.items()
    )
    model.save_pretrained(folder / "saved")
    model.save_pretrained(folder / "adapter", adapter_only=True)
    dist.barrier()
    added = AutoModelForImageTextToText.from_pretrained(folder / "adapter", **size)
    with torch.no_grad():
        found["added"] = largest(added(**text, **images).logits, expected["logits"])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sorted(Path(sys.argv[1]).iterdir()):
        found = work(case)
        (case / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
