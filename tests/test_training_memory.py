"""`hf-xattn inspect --training`: memory that is told from shapes is the memory that a real step takes."""

import re
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkout import ROOT
from tiny_decoders import make_tiny, retrofitted
from tiny_models import make_model, make_text, pixels, token_ids, vision_config
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, SiglipConfig, TorchAoConfig
from two_processes import WORLD_SIZE, leave

from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, freeze, retrofit
from hf_xattn.commands.loading import load_shapes, plan_shapes
from hf_xattn.commands.main import main
from hf_xattn.training.training_memory import shown, training_memory, training_memory_table
from hf_xattn.utils.transformers_api import checkpoint_activations


README = (ROOT / "README.md").read_text()
BASE, TOWER = "meta-llama/Llama-3.1-70B", "google/siglip-so400m-patch14-384"


def shapes(name="llama", dtype=torch.float32, **config):
    """The shapes of `make_model`, on the meta device."""
    made = make_model(name, dtype=dtype, **config).config
    with torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(made, dtype=dtype)


def trainable(name, dtype, train_text, train_vision=False, **config):
    """A real model, prepared as `hf-xattn train` does."""
    model = make_model(name, dtype=dtype, **config)
    if model.model.vision_tower is not None:
        model.model.vision_tower.to(dtype)
    freeze(model, text=not train_text, vision=not train_vision).train()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(model, batch, length, images, dtype):
    """What autograd has saved when a real forward ends, and is no weight."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = weakref.WeakSet()

    def pack(tensor):
        held = Kept(tensor)
        kept.add(held)
        return held

    ids = token_ids(batch, length)
    if model.config.image_token_id is not None:
        ids[:, :images] = model.config.image_token_id
    if model.config.vision_config is None:
        given = {"cross_attention_states": torch.randn(batch, images, 32)}
    else:
        given = {"pixel_values": pixels(batch, images)}
    half = dtype is not torch.float32
    with (
        saved_tensors_hooks(pack, lambda held: held.tensor),
        torch.autocast("cpu", dtype=dtype if half else None, enabled=half),
    ):
        outputs = model(input_ids=ids, labels=ids, use_cache=False, **given)
    found = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes() for held in kept}
    assert outputs.loss.requires_grad
    return sum(size for place, size in found.items() if place not in own)


CASES = {
    "frozen": {},
    "text": {"train_text": True},
    "all, bfloat16": {"dtype": torch.bfloat16, "train_text": True, "train_vision": True},
    "gpt2": {"name": "gpt2"},
    "experts": {"name": "mixtral", "dtype": torch.bfloat16},
    "features": {"vision": False},
    "markers": {"image_token_id": 5, "image_visibility": "latest"},
}


@pytest.mark.parametrize("case", CASES)
def test_activations_are_those_of_a_real_forward(case):
    """A formula that forgets the loss, the blocks, autocast's copies, or that layers in front of the first block hold nothing."""
    config = dict(CASES[case])
    name, dtype = config.pop("name", "llama"), config.pop("dtype", torch.float32)
    parts = {key: config.pop(key, False) for key in ("train_text", "train_vision")}
    told = training_memory(shapes(name, dtype, **config), batch=2, text_length=24, images=2, **parts).activations
    assert not isinstance(told, str), told
    model = trainable(name, dtype, **parts, **config)
    found = saved_bytes(model, 2, 24, 2, dtype)
    assert told.plain.batch + told.copies == pytest.approx(found, rel=0.01)
    if case in ("frozen", "experts"):  # autocast copies what is multiplied
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        multiplied = [w for each in linear for w in each.parameters() if w.requires_grad]
        assert told.copies == (0 if dtype is torch.float32 else 2 * sum(weight.numel() for weight in multiplied))
    checkpoint_activations(model, {"use_reentrant": False})
    if dtype is torch.float32:  # else the copies of what is not checkpointed are among them
        assert told.checkpointed.batch == pytest.approx(saved_bytes(model, 2, 24, 2, dtype), rel=0.01)
    assert told.checkpointed.batch < told.plain.batch
    shares = 2 * 24 * told.plain.text_token + 2 * 2 * told.plain.image
    assert shares == pytest.approx(told.plain.batch, rel=0.01)


def test_attention_holds_what_fused_kernels_hold():
    """Scores of all tokens with all others, which torch holds where the CPU has no kernel, as with dropout."""
    told = [
        training_memory(shapes(cross_attention_config={"attention_dropout": dropout}), text_length=length).activations
        for dropout, length in ((0.5, 32), (0.0, 64))
    ]
    assert told[0].plain.text_token == pytest.approx(told[1].plain.text_token, rel=0.01)


def test_a_forward_that_cannot_be_followed():
    """An error in the place of what is known: fake tensors have no kernel for experts in float32."""
    told = training_memory(shapes("mixtral"), text_length=8)
    table = training_memory_table(told)
    assert isinstance(told.activations, str)
    assert "AdamW, two averages" in table and f"The activations are not known ({told.activations})." in table


def test_a_decoder_without_checkpointing():
    """No figures at all, where those of checkpointing are missing."""
    made = retrofitted(make_tiny("ctrl"))
    with torch.device("meta"):
        planned = XAttnForConditionalGeneration._from_config(made.config)
    told = training_memory(planned, text_length=8)
    assert not isinstance(told.activations, str) and told.activations.checkpointed is None
    table = training_memory_table(told)
    assert "in all, at most" in table and "activations a text token" in table and "checkpointing" not in table


@pytest.mark.parametrize(
    "dtype, parts",
    [
        (torch.float32, {}),
        (torch.bfloat16, {"train_text": True}),
        (torch.bfloat16, {"train_text": True, "train_vision": True}),
    ],
    ids=["added", "text", "all"],
)
def test_weights_gradients_and_optimizer(dtype, parts):
    """Weights in the wrong dtype, a tied weight twice, gradients of what is frozen."""
    told = training_memory(shapes("llama_tied", dtype), text_length=8, **parts)
    model = trainable("llama_tied", dtype, **{"train_text": False, **parts})
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = model(input_ids=token_ids(), labels=token_ids(), pixel_values=pixels()).loss
    loss.backward()
    optimizer.step()
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    stays = [weight for weight in model.parameters() if not weight.requires_grad]
    averages = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert told.trained_parameters == sum(weight.numel() for weight in learns)
    assert told.frozen_parameters == sum(weight.numel() for weight in stays)
    assert told.rank == told.whole
    assert told.whole.frozen == size_of(stays) and told.whole.trained == size_of(learns)
    assert told.whole.gradients == size_of(weight.grad for weight in learns)
    assert told.whole.optimizer == size_of(averages)
    block, tokens = model.config.cross_attention_config, 16
    cache = model.encode_images(pixel_values=pixels(batch=1)).cross_attention_cache if dtype is torch.float32 else None
    assert told.image_tokens == tokens
    if cache is not None:
        held = size_of(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
        assert tokens * told.image_token == held
    assert told.image_token == 2 * 2 * block.num_key_value_heads * block.head_dim * dtype.itemsize


def _shard(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD_SIZE)
    model = trainable("llama", torch.float32, train_text=False)
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    model(input_ids=token_ids(), labels=token_ids(), pixel_values=pixels()).loss.backward()
    optimizer.step()
    weights = list(model.parameters())
    learns = [weight for weight in weights if weight.requires_grad]
    averages = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parts = ([weight for weight in weights if not weight.requires_grad], learns, [w.grad for w in learns], averages)
    torch.save([size_of(tensor.to_local() for tensor in part) for part in parts], f"{folder}/found-{rank}.pt")
    leave(rank, folder)


def test_a_rank_holds_what_fsdp2_gives_it(tmp_path):
    """An even share of what FSDP2 splits by rows: a gate of one row lies on the first rank."""
    mp.spawn(_shard, (str(tmp_path),), nprocs=WORLD_SIZE)
    told = training_memory(shapes(), text_length=8, ranks=WORLD_SIZE)
    found = torch.load(tmp_path / "found-0.pt")
    assert [told.rank.frozen, told.rank.trained, told.rank.gradients, told.rank.optimizer] == found
    assert told.rank.total < told.whole.total < WORLD_SIZE * told.rank.total


def test_gathered_weights():
    """A unit that FSDP2 does not make, or a layer without its block."""
    model = shapes()
    layers, head = list(model.get_decoder().layers), model.get_output_embeddings()
    counts = sorted(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    inside = sum(counts) + model.get_input_embeddings().weight.numel()
    tower = model.model.vision_tower  # SigLIP names its embeddings beside its layers
    inside += sum(weight.numel() for part in (tower.embeddings, tower.encoder) for weight in part.parameters())
    root = sum(weight.numel() for weight in model.parameters()) - inside
    assert root >= head.weight.numel()
    assert training_memory(model, text_length=8, ranks=4).gathered == 4 * (root + sum(counts[-2:]))
    assert training_memory(shapes(), text_length=8).gathered == 0


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Configurations of published sizes, without weights, in folders named like the Hub ids."""
    LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        dtype="bfloat16",
    ).save_pretrained(tmp_path / BASE)
    sizes = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    }
    SiglipConfig(vision_config=sizes).save_pretrained(tmp_path / TOWER)
    monkeypatch.chdir(tmp_path)


def test_table_of_the_readme(large, capsys):
    """A table that needs the weights of a 70B model, or the README's table from another time."""
    found = re.search(r"<!-- training memory -->\n```\n\$ hf-xattn ([^\n]*)\n\n(.*?)\n```", README, re.DOTALL)
    assert found is not None
    command, table = found.groups()
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == table.strip()
    block = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192 + 2
    connector = 1152 * 8192 + 8192 + 8192 * 8192 + 8192
    assert f"{20 * block + connector:,}" in printed  # 20 blocks, and two linear layers
    assert "K/V an image, in bfloat16" in printed and shown(2 * 20 * 8 * 128 * 2 * 729) in printed


def test_a_plan_is_the_model_that_it_plans(tmp_path):
    """Figures before a retrofit that change with it."""
    make_text("qwen3", torch.bfloat16).save_pretrained(tmp_path / "text")
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
    command = ["retrofit", tmp_path / "text", "--vision", tmp_path / "vision", "--every", "2"]
    assert main(list(map(str, [*command, "--output", tmp_path / "model"]))) == 0
    planned = plan_shapes(str(tmp_path / "text"), str(tmp_path / "vision"), every=2, layers=None)
    made = training_memory(load_shapes(str(tmp_path / "model")), text_length=8)
    assert training_memory(planned, text_length=8) == made
    layers = plan_shapes(str(tmp_path / "text"), None, every=2, layers=[0, 1, 3], dtype="float32")
    assert layers.config.cross_attention_layers == [0, 1, 3] and layers.dtype == torch.float32
    assert isinstance(layers.config, XAttnConfig) and all(weight.is_meta for weight in layers.parameters())


def test_command(tmp_path, capsys):
    """Columns for one rank alone, options that are ignored, an error without the option's name."""
    make_model().save_pretrained(tmp_path / "model")
    make_text().save_pretrained(tmp_path / "text")
    model, text = str(tmp_path / "model"), str(tmp_path / "text")
    assert main(["inspect", model, "--training", "--text-length", "8"]) == 0
    alone = capsys.readouterr().out
    assert "ranks" not in alone and "gathered" not in alone
    assert main(["inspect", model, "--training", "--text-length", "8", "--ranks", "2", "--train-text"]) == 0
    shared = capsys.readouterr().out
    assert "each of 2 ranks" in shared and "gathered by FSDP2" in shared
    assert main(["inspect", text, "--training", "--text-length", "8", "--dtype", "bfloat16"]) == 0
    assert "K/V an image token, in bfloat16" in capsys.readouterr().out
    wrong = [
        ([model, "--batch", "2"], "--batch` is an option of `--training`"),
        ([model, "--vision", "a"], "--vision` is an option of `--training`"),
        ([model, "--training", "--every", "2"], "--every` is for a text model"),
        ([model, "--training", "--ranks", "0"], "`ranks` must be at least 1, got 0"),
        (["--architectures", "--training"], "got --architectures"),
    ]
    for arguments, message in wrong:
        assert main(["inspect", *arguments]) == 2
        assert message in capsys.readouterr().err, arguments


def test_quantized_weights(tmp_path, capsys):
    """Figures of weights that were never quantized, without a word."""
    torchao = pytest.importorskip("torchao.quantization")
    make_text().save_pretrained(tmp_path / "text")
    quantized = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = retrofit(tmp_path / "text", every=2, quantization_config=quantized, cross_attention={"context_size": 16})
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "adapter", adapter_only=True)
    AutoModelForCausalLM.from_pretrained(tmp_path / "text", quantization_config=quantized).save_pretrained(
        tmp_path / "quantized"
    )
    for name in ("whole", "adapter", "quantized", "text"):
        assert main(["inspect", str(tmp_path / name), "--training", "--text-length", "8"]) == 0
        told = f"{tmp_path / name} is quantized (torchao): its frozen weights need less than the table says"
        assert (told in capsys.readouterr().out) == (name != "text")
