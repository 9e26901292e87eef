"""GGUF files of strangers and of bad disks as text models: refused, or the weights of the file."""

import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch


gguf = pytest.importorskip("gguf")
from helpers.models.tiny_gguf import write_gguf  # noqa: E402
from hf_xattn import retrofit  # noqa: E402
from hf_xattn.utils.transformers_api import NEWEST, is_before  # noqa: E402


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", layers=1).read_bytes()


def place(data, text, behind=0):
    """The place behind a name in the head of a file."""
    return data.index(struct.pack("<Q", len(text)) + text.encode()) + 8 + len(text) + behind


def edited(data, where, kind, value):
    changed = bytearray(data)
    struct.pack_into(kind, changed, where, value)
    return bytes(changed)


def written(data):
    """What somebody wrote: (name, bytes). Behind a key stand the type and the value, behind a tensor its axes."""
    yield "wrong magic", b"GGML" + data[4:]
    yield "another kind of file", b"PK\x03\x04" + data[4:]
    yield "a pickle", b"\x80\x04c__builtin__\nexec\n" + data
    for version in (0, 1, 4, 2**32 - 1, 3 << 24):  # the last one: of the other byte order
        yield f"version {version}", edited(data, 4, "<I", version)
    for count in (0, 1, 10**6, 2**40, 2**63, 2**64 - 1):
        yield f"{count} tensors", edited(data, 8, "<Q", count)
        yield f"{count} settings", edited(data, 16, "<Q", count)
    for key, values in {
        "llama.block_count": (0, 2, 2000, 10**9),
        "llama.embedding_length": (0, 33, 2**20, 2**32 - 1),
        "llama.feed_forward_length": (0, 2**20, 2**31),
        "llama.attention.head_count": (0, 3, 10**9),
        "llama.attention.head_count_kv": (0, 3, 10**9),
        "llama.vocab_size": (0, 10, 2**26, 2**32 - 1),
    }.items():
        for value in values:
            yield f"{key} = {value}", edited(data, place(data, key, 4), "<I", value)
    yield "an architecture with another name", data.replace(b"llama.block_count", b"lambs.block_count")
    tokens = place(data, "tokenizer.ggml.tokens", 4)
    real = struct.unpack_from("<Q", data, tokens + 4)[0]
    for count in (0, 1, real - 1, real + 1, 10**6, 2**40, 2**64 - 1):
        yield f"a vocabulary of {count}", edited(data, tokens + 4, "<Q", count)
    for length in (2**16, 2**31, 2**64 - 8):
        yield f"a token of {length} bytes", edited(data, tokens + 12, "<Q", length)
        yield f"a name of {length} bytes", edited(data, 24, "<Q", length)
    yield "fewer kinds of tokens", edited(data, place(data, "tokenizer.ggml.token_type", 8), "<Q", 3)
    for kind in (7, 9, 13, 2**31):
        yield f"tokens of type {kind}", edited(data, tokens, "<I", kind)
    name = "blk.0.ffn_down.weight"  # of two axes, in blocks of 32
    at = place(data, name)
    for axes in (0, 1, 5, 2**32 - 1):
        yield f"{axes} axes", edited(data, at, "<I", axes)
    for size in (0, 31, 65, 2**20, 2**40, 2**63):
        yield f"an axis of {size}", edited(data, at + 4, "<Q", size)
    for kind in (0, 1, 2, 12, 24, 31, 99, 2**32 - 1):
        yield f"values of type {kind}", edited(data, at + 20, "<I", kind)
    for offset in (0, 1, 32, 2**40, 2**64 - 32):
        yield f"values at {offset}", edited(data, at + 24, "<Q", offset)
    yield "a tensor with another name", data.replace(b"blk.0.ffn_down.weight", b"blk.0.ffn_town.weight")
    yield "two tensors of one name", data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight")
    yield "a tensor of another layer", data.replace(b"blk.0.ffn_down.weight", b"blk.7.ffn_down.weight")


def truncated(data):
    for size in sorted({4, 8, 23, 24, 25, len(data) - 1, *random.Random(1).sample(range(len(data)), 12)}):
        yield f"{size} bytes", data[:size]


def flipped(data):
    """Bits of the counts, of the list of tensors, and of settings that hold sizes. Others cannot be told: there is no
    checksum.
    """
    generator = random.Random(2)
    table = place(data, "output_norm.weight") - 60
    for at in [*range(4, 24), *generator.sample(range(table, place(data, "blk.0.ffn_norm.weight") + 20), 12)]:
        yield f"a bit of byte {at}", edited(data, at, "<B", data[at] ^ 1 << generator.randrange(8))


def refused(path, weights):
    """`None` for an error; otherwise what came."""
    try:
        model = retrofit(path, every=1)
    except Exception:
        return None
    state = model.state_dict()
    same = all(torch.equal(state[name], weights[name]) for name in weights if "cross_attention" not in name)
    return "the same" if same and state.keys() == weights.keys() else "another model"


@pytest.mark.parametrize("group", [written, truncated, flipped], ids=lambda group: group.__name__)
def test_files_are_refused_or_the_same(group, whole, tmp_path):
    """A file that gives other weights than it holds, or random weights in a loaded model."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    weights = {name: tensor.clone() for name, tensor in retrofit(path, every=1).state_dict().items()}
    wrong, count = {}, 0
    for name, content in group(whole):
        path.write_bytes(content)
        came, count = refused(path, weights), count + 1
        if came not in (None, "the same") or came == "the same" and group is not flipped and not is_before(NEWEST):
            wrong[name] = came
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
    assert count >= 15


MEMORY = """
import resource, sys
from pathlib import Path
from hf_xattn import retrofit

folder = Path(sys.argv[1])
retrofit(folder / "tiny.gguf", every=1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
for path in sorted(folder.glob("damaged-*.gguf")):
    try:
        retrofit(path, every=1)
    except (ValueError, RuntimeError):
        continue
    raise SystemExit(f"{path.name} was taken")
more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert more < 2**30, more
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_stays_bounded(whole, tmp_path):
    """Lists, layers or vocabularies that are made before anybody looks whether the file holds them."""
    (tmp_path / "tiny.gguf").write_bytes(whole)
    tokens = place(whole, "tokenizer.ggml.tokens", 4)
    numbers = place(whole, "tokenizer.ggml.token_type", 4)
    for name, content in {
        "layers": edited(whole, place(whole, "llama.block_count", 4), "<I", 2000),
        "more-layers": edited(whole, place(whole, "llama.block_count", 4), "<I", 2**31),
        "vocabulary": edited(whole, place(whole, "llama.vocab_size", 4), "<I", 2**26),
        "width": edited(whole, place(whole, "llama.feed_forward_length", 4), "<I", 2**20),
        "tokens": edited(whole, tokens + 4, "<Q", 2**62),
        "numbers": edited(whole, numbers + 4, "<Q", 2**30),
    }.items():
        (tmp_path / f"damaged-{name}.gguf").write_bytes(content)
    # A long file that takes no room on the disk: the list of numbers fits into it.
    sparse = tmp_path / "damaged-sparse.gguf"
    sparse.write_bytes(edited(whole, numbers + 4, "<Q", 2**27)[: numbers + 12])
    with open(sparse, "r+b") as file:
        file.truncate(2**30)
    result = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
