"""What a rank of `test_sharded.py` does: `torchrun --nproc-per-node 2 sharded_ranks.py FOLDER CASE...`"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.models.own_parts import OWN, TURNING
from helpers.models.tiny_decoders import make_tiny, retrofitted
from helpers.models.tiny_models import make_model, pixels, randomize, token_ids
from helpers.references.gradient_checks import without_dropout
from hf_xattn import freeze, sharding_units


STEPS = 2
# What the ranks bring, in the order of the ranks.
IMAGES = {
    "pixels": ("pixels", "pixels"),
    "no images": ("pixels", "none"),
    "features": ("pixels", "features"),
    "encoded": ("pixels", "encoded"),
    "tower outputs": ("pixels", "tower outputs"),
    "one token": ("features", "one token"),
}
NORMS = {"dtype": torch.bfloat16, "block": {"qk_norm": True, "context_norm": True}}
TURNED = {"dtype": torch.bfloat16, "block": {"qk_norm": True, "context_norm": True, "position": TURNING}}
CASES = {
    # name: (decoder, what is frozen, how it is sharded, images, options)
    "frozen base": ("llama", ("text", "vision"), "fsdp", "pixels", {}),
    "all trains": ("llama", (), "fsdp", "pixels", {}),
    "tied": ("llama_tied", (), "fsdp", "pixels", {}),
    "bfloat16": ("llama", ("text", "vision"), "fsdp", "pixels", {"dtype": torch.bfloat16}),
    "bfloat16 all trains": ("llama", (), "accelerate", "pixels", {"dtype": torch.bfloat16}),
    # The parts of a block are units of their own: each rank must run them, also in evaluation.
    "bfloat16, no images": ("llama", ("text", "vision"), "fsdp", "no images", NORMS),
    "several blocks at a place": ("llama", ("text", "vision"), "fsdp", "no images", {"layers": [1, 1, 4, 4]}),
    "bfloat16, several blocks": ("llama", ("text", "vision"), "fsdp", "no images", NORMS | {"layers": [1, 1]}),
    "accelerate, several blocks": ("llama", (), "accelerate", "pixels", {"layers": [1, 1, 4, 4]}),
    "own parts, no images": ("llama", ("text", "vision"), "fsdp", "no images", {"model": OWN}),
    "bfloat16, own parts": ("llama", ("text", "vision"), "fsdp", "pixels", {"model": OWN, "dtype": torch.bfloat16}),
    "bfloat16, one token": ("llama", ("text", "vision"), "fsdp", "one token", NORMS),
    "bfloat16, positions": ("llama", ("text", "vision"), "fsdp", "encoded", TURNED),
    "fsdp, tower outputs": ("llama", ("text", "vision"), "fsdp", "tower outputs", {}),
    "ddp, tower outputs": ("llama", ("text", "vision"), "ddp", "tower outputs", {}),
    "offload": ("llama", ("vision",), "fsdp", "pixels", {"offload": True}),
    "accumulation": ("llama", ("text",), "fsdp", "pixels", {"accumulation": 2}),
    "checkpointing": ("llama", ("text", "vision"), "fsdp", "pixels", {"checkpointing": "transformers"}),
    "wrapper": ("llama", ("vision",), "fsdp", "pixels", {"checkpointing": "wrapper"}),
    "channel checkpointing": ("bloom", ("text",), "fsdp", "features", {"checkpointing": "transformers"}),
    "channel wrapper": ("bloom", ("text",), "fsdp", "features", {"checkpointing": "wrapper"}),
    "ddp, channel": ("bloom", (), "ddp", "no images", {}),
    "ddp, checkpointing": ("llama", ("text",), "ddp", "no images", {"checkpointing": "transformers"}),
    "accelerate": ("llama", ("text", "vision"), "accelerate", "pixels", {}),
    "accelerate wrapper": ("gptj", (), "accelerate", "features", {"checkpointing": "wrapper"}),
    **{
        f"{how}, {images}, {'frozen' if 'vision' in frozen else 'trainable'} tower": ("llama", frozen, how, images, {})
        for how in ("fsdp", "ddp")
        for images in ("no images", "features", "encoded")
        for frozen in (("text", "vision"), ("text",))
    },
}


def build(
    decoder: str,
    frozen: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
    block: dict | None = None,
    layers=(1, 3),
    model: dict | None = None,
    **_,
):
    if decoder.startswith("llama"):
        fields = {"cross_attention_config": block or {}, "cross_attention_layers": layers, **(model or {})}
        model = make_model(decoder, dtype=dtype, **copy.deepcopy(fields))
    else:
        model = randomize(retrofitted(make_tiny(decoder)))
    return freeze(without_dropout(model), **{"text": False, "vision": False, **dict.fromkeys(frozen, True)})


def kinds_of(decoder: str, images: str) -> tuple[str, ...]:
    """What each rank brings; features for a model without a vision tower."""
    kinds = IMAGES[images]
    return kinds if decoder.startswith("llama") else tuple("features" if kind == "pixels" else kind for kind in kinds)


def batch(model, kinds: tuple[str, ...], rank: int, number: int, cache_dtype: str | None = None) -> dict:
    """Text and images of one rank. Of encoded images, every rank takes part in the encoding, which FSDP waits for."""
    seed = 10 * number + rank
    ids = token_ids(seed=seed)
    inputs = {"input_ids": ids, "labels": ids}
    width = model.config.cross_attention_config.context_size
    features = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(seed))
    if "encoded" in kinds:
        with torch.no_grad():
            encoded = model.encode_images(cross_attention_states=features, cache_dtype=cache_dtype)
    kind = kinds[rank]
    if kind == "pixels":
        inputs["pixel_values"] = pixels(seed=seed)
    elif kind == "features":
        inputs["cross_attention_states"] = features
    elif kind == "one token":
        inputs["cross_attention_states"] = features[:, :1]
    elif kind == "tower outputs":
        wide = model.config.vision_config.hidden_size
        inputs["vision_features"] = torch.randn(2, 1, 16, wide, generator=torch.Generator().manual_seed(seed))
    elif kind == "encoded":
        inputs["cache"] = encoded
    return inputs


def evaluate(model, call, kinds: tuple[str, ...], rank: int) -> tuple[float, list[torch.Tensor]]:
    """The loss of one forward, and what `generate` gives with a cache and without one."""
    model.eval()
    with torch.no_grad():
        loss = call(**batch(model, kinds, rank, 99)).loss.item()
        tokens = []
        # Encoded images are generated with twice: as they are, and in int8.
        for again in (False, True):
            use_cache = "encoded" in kinds or not again
            inputs = batch(model, kinds, rank, 98, "int8" if again else None)
            del inputs["labels"]
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            options = {"max_new_tokens": 3 + rank, "do_sample": False, "use_cache": use_cache}
            tokens.append(model.generate(**inputs, **options, synced_gpus=dist.is_initialized()))
    return loss, tokens


def checkpoint_layers(model, how: str | None) -> None:
    if how == "transformers":
        model.gradient_checkpointing_enable()
    elif how == "wrapper":
        layers = model.get_decoder()._modules.get("layers") or model.get_decoder().h
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)


def accelerator_with_fsdp(
    accelerator: Accelerator | None = None,
    checkpointing: bool = False,
    state_dict_type: str = "full_state_dict",  # what `Trainer.save_model` needs
) -> Accelerator:
    """accelerate shards nothing on a CPU, unless it is told that this is a run with FSDP."""
    accelerator = accelerator or Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate does on a GPU
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        state_dict_type=state_dict_type,
        activation_checkpointing=checkpointing,
    )
    return accelerator


def shard(model, how: str, options: dict):
    """Returns the model that is called, and its optimizer."""

    def optimizer(of):
        # Plain steps along the gradient: AdamW makes much of a rounding error in a gradient near zero.
        return torch.optim.SGD([weight for weight in of.parameters() if weight.requires_grad], lr=0.1)

    if how == "ddp":
        return DistributedDataParallel(model), optimizer(model)
    if how == "accelerate":
        accelerator = accelerator_with_fsdp(checkpointing=options.get("checkpointing") == "wrapper")
        return accelerator.prepare(model, optimizer(model))
    checkpoint_layers(model, options.get("checkpointing"))
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if options.get("offload") else {}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in sharding_units(model):
        fully_shard(unit, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model, optimizer(model)


def work(name: str) -> dict:
    rank = dist.get_rank()
    decoder, frozen, how, images, options = CASES[name]
    kinds, accumulation = kinds_of(decoder, images), options.get("accumulation", 1)
    model = build(decoder, frozen, **options)
    call, optimizer = shard(model, how, options)
    losses = []
    for step in range(STEPS):
        for part in range(accumulation):
            loss = call(**batch(model, kinds, rank, step * accumulation + part)).loss / accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dict(model.state_dict()) if how == "ddp" else get_model_state_dict(call, options=whole)
    evaluated, tokens = evaluate(model, call, kinds, rank)
    return {"losses": losses, "weights": weights, "evaluated": evaluated, "tokens": tokens}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        torch.save(work(case), Path(sys.argv[1], f"{case} {dist.get_rank()}.pt"))
    dist.destroy_process_group()
