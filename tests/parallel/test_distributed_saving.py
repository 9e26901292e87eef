"""Saving from two processes over gloo that hold half of each weight: the whole model, and what was added
to its bases.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModel, AutoModelForImageTextToText
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from helpers.models.tiny_models import make_text, pixels, randomize, token_ids, vision_config
from helpers.processes.two_processes import WORLD_SIZE, leave
from helpers.processes.warm_processes import spawn
from hf_xattn import retrofit


def _model(folder):
    torch.manual_seed(5)  # for the connector, which is the same in all processes
    return randomize(retrofit(folder / "text", folder / "vision", cross_attention_layers=[1, 3])).eval()


def _refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def _work(rank, folder):
    torch.set_num_threads(1)
    folder = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD_SIZE)
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    model = _model(folder)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "whole-in-shards", rank == 0, None, False, "20KB")
    model.save_pretrained(folder / "added", adapter_only=True)
    # As `Trainer.save_model` does: the weights are gathered already, and complete in the first process alone.
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, adapter_only in (("given-whole", False), ("given-added", True)):
        model.save_pretrained(
            folder / name, state_dict=dict(full), is_main_process=rank == 0, adapter_only=adapter_only
        )

    model = _model(folder)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    messages = [
        _refused(lambda kind=kind: model.save_pretrained(folder / "no", adapter_only=kind)) for kind in (False, True)
    ]
    # Without `offload_to_cpu`: on a CPU it copies nothing, and the weights are freed below it.
    with FullyShardedDataParallel.state_dict_type(
        wrapped, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        full = wrapped.state_dict()
    for name, adapter_only in (("fsdp-whole", False), ("fsdp-added", True)):
        model.save_pretrained(
            folder / name, state_dict=dict(full), is_main_process=rank == 0, adapter_only=adapter_only
        )
    if rank == 0:
        torch.save(messages, folder / "messages.pt")
    leave(rank, folder)


def test_sharded_weights_are_saved_whole(tmp_path):
    """Half of each weight in a file, a process that waits for ever for the other one, or sharded weights taken for
    changed ones.
    """
    make_text().save_pretrained(tmp_path / "text")
    torch.manual_seed(7)
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
    spawn(_work, str(tmp_path), count=WORLD_SIZE)
    with torch.no_grad():
        expected = _model(tmp_path)(token_ids(), pixel_values=pixels()).logits
        for name in ("whole", "whole-in-shards", "added", "given-whole", "given-added", "fsdp-whole", "fsdp-added"):
            loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / name)
            assert torch.equal(loaded(token_ids(), pixel_values=pixels()).logits, expected), name
            added = tmp_path / name / "cross_attention.safetensors"
            assert added.exists() == name.endswith("added")
            if added.exists():
                assert added.stat().st_size == (tmp_path / "added" / added.name).stat().st_size
    assert len(list((tmp_path / "whole-in-shards").glob("model-*.safetensors"))) > 1
    for message in torch.load(tmp_path / "messages.pt"):
        assert "`FullyShardedDataParallel`" in message and "state_dict=accelerator.get_state_dict(model)" in message
    assert not (tmp_path / "no").exists()
