"""A generator of checkpoints that a stranger, a bad disk or a cut-off download may bring. Seeded: the same ones in
every run.

A case changes a copy of one tiny checkpoint and says what must come of it: `REFUSED` with an error of this package, or
`SAME`, where the change means nothing: then the model is the one that was saved, bit for bit. A flipped bit of a
header may do either, and nothing else (`REFUSED_OR_SAME`). No case may give another model.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import hf_xattn


REFUSED, SAME, REFUSED_OR_SAME = "refused", "the same model", "refused, or the same model"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Case(NamedTuple):
    name: str
    change: Callable[[Path], Any]  # of a copy of the folder
    expected: str = REFUSED


class Runs:
    """Unpickled or imported, it leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def fresh(source: Path, target: Path) -> Path:
    """A new copy of a folder."""
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


def mark_of(folder: Path) -> Path:
    """What code of a checkpoint would make, if it were run."""
    return folder.parent / "code was run"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit_json(name: str, change: Callable[[dict], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def setting(value: Any, *path: Any) -> Callable[[dict], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def writing(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def truncated(source: Path, name: str, count: int, seed: int) -> Iterator[Case]:
    """A download that ended early."""
    size = (source / name).stat().st_size
    for length in sorted({0, 1, 7, 8, 9, size - 1, *random.Random(seed).sample(range(size), count)}):
        yield Case(f"{name} of {length} bytes", lambda folder, n=length: os.truncate(folder / name, n))


def flipped(source: Path, count: int, seed: int) -> Iterator[Case]:
    """A bad disk, in the header of the weights. Bits of the values cannot be told from others: there is no checksum."""
    end = 8 + struct.unpack("<Q", (source / WEIGHTS).read_bytes()[:8])[0]
    generator = random.Random(seed)
    for place in sorted([*range(8), *generator.sample(range(8, end), count)]):
        bit = generator.randrange(8)

        def flip(folder: Path, place: int = place, bit: int = bit) -> None:
            data = bytearray((folder / WEIGHTS).read_bytes())
            data[place] ^= 1 << bit
            (folder / WEIGHTS).write_bytes(data)

        yield Case(f"bit {bit} of byte {place}", flip, REFUSED_OR_SAME)


def headers(source: Path) -> Iterator[Case]:
    """Headers that somebody wrote."""
    header, data = header_of(source / WEIGHTS)
    name = next(name for name in header if name.endswith("q_proj.weight"))
    other = next(n for n in header if n.endswith("k_proj.weight"))
    begin, end = header[name]["data_offsets"]

    def case(what: str, value: Any, *path: Any, expected: str = REFUSED) -> Case:
        changed = copy.deepcopy(header)
        setting(value, *path)(changed)
        return Case(what, lambda folder: write_header(folder / WEIGHTS, changed, data), expected)

    for dtype in ("I32", "U32", "F31", "", "f32", "F64", "BOOL", None, 5):
        yield case(f"dtype {dtype}", dtype, name, "dtype")
    for shape in ([], [0], [-1, -1024], [2**62, 4], [10**30], [1024], [8, 128], ["32", "32"], None, {}, [32, 32, 1]):
        yield case(f"shape {shape}", shape, name, "shape")
    for offsets in (
        [end, begin],
        [begin, end + 4],
        [begin - 4, end],
        [-4, end],
        [0, 2**63],
        [],
        None,
        header[other]["data_offsets"],
    ):
        yield case(f"offsets {offsets}", offsets, name, "data_offsets")
    yield case("metadata of numbers", {"format": 3}, "__metadata__")
    yield case("metadata of another kind", {"format": "np", "x": "y" * 10_000}, "__metadata__", expected=SAME)
    yield case("a surplus tensor that is not there", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "surplus")
    without = {key: value for key, value in header.items() if key != name}
    yield Case("a tensor left out", lambda folder: write_header(folder / WEIGHTS, without, data))
    renamed = {key if key != name else key + "x": value for key, value in header.items()}
    yield Case("a tensor with another name", lambda folder: write_header(folder / WEIGHTS, renamed, data))
    for what, text in {
        "a list": b"[]",
        "no JSON": b"{" * 50,
        "a number": b"7" * 20,
        "deep lists": b"[" * 5000 + b"]" * 5000,
        "no UTF-8": b"\xff\xfe" * 10,
        "nothing in it": b"{}",
        "JSON of another kind": b'{"a": 1}',
    }.items():
        yield Case(f"header is {what}", lambda folder, text=text: write_header(folder / WEIGHTS, text, data))
    for length in (0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001):
        yield Case(
            f"header of {length} bytes", lambda folder, n=length: write_header(folder / WEIGHTS, header, data, length=n)
        )
    yield Case("bytes behind the end", lambda folder: write_header(folder / WEIGHTS, header, data + b"\0" * 8))

    def surplus(folder: Path) -> None:
        save_file({**load_file(folder / WEIGHTS), "surplus": torch.zeros(4)}, folder / WEIGHTS, {"format": "pt"})

    yield Case("a surplus tensor, which transformers' report names", surplus, SAME)

    def integers(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, name: tensors[name].int()}, folder / WEIGHTS, {"format": "pt"})

    yield Case("weights of integers", integers)

    def larger(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, name: torch.zeros(4096, 4096)}, folder / WEIGHTS, {"format": "pt"})

    yield Case("a weight that is too large", larger)

    def a_folder(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).mkdir()

    yield Case("a folder in place of the weights", a_folder)


SIZES = {
    ("text_config",): (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ),
    ("vision_config",): (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
        "num_channels",
    ),
    ("cross_attention_config",): (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "context_size",
    ),
    (): ("additional_vocab_size",),
}
WRONG_SIZES = (10**9, 10**12, 10**30, "32", 1.5, [10**12], {"a": {"b": 10**12}})
CHOICES = {
    (): ("connector_type", "connector_hidden_act", "image_visibility", "vision_feature_select_strategy"),
    ("text_config",): ("hidden_act", "model_type"),
    ("vision_config",): ("hidden_act", "model_type"),
    ("cross_attention_config",): ("hidden_act", "norm_type", "mlp_type", "gate", "gate_granularity"),
}
WRONG_CHOICES = ("../../etc/passwd", "conv", 3, ["mlp"])
PATH_LIKE = {
    "attn_implementation": ("somebody/kernel", {"": "somebody/kernel@main:run"}, 3),
    "_attn_implementation_internal": ("somebody/kernel",),
    "experts_implementation": ("somebody/kernel",),
    "transformers_weights": ("../other.safetensors", "/etc/passwd", "model.bin", 3),
    "dtype": ("load", "os.system", 3, "float33"),
    "auto_map": (["evil.Config"], "evil.Config", 3),
    "to_dict": (1,),
    "from_pretrained": ("x",),
    "__class__": ("x",),
    "_check_fields": (1,),
    "num_labels": (10**9,),
    "cross_attention_layers": ([10**9], [-1], [0] * 100_000, "1,3", [1.0], {}, [[1]]),
    "text_config": (None, [], "llama", 3, {}),
    "vision_config": ([], "clip", 3),
    "cross_attention_config": ([], 3),
    "perceiver_config": ([], {"num_hidden_layers": 10**9, "model_type": "xattn_perceiver"}),
    "image_token_id": (10**9, -5, "x"),
}
# Keys that change no weight: transformers' own configurations keep such too, and warn.
KEPT = {
    "a_new_field": 3,
    "author": "../../etc/passwd",
    "name_or_path": "/etc",
    "_name_or_path": "../x",
    "license": {"a": 1},
}


def configs(source: Path) -> Iterator[Case]:
    """Configurations that somebody wrote, or that a disk has changed."""
    for part, names in SIZES.items():
        for name in names:
            for value in WRONG_SIZES:
                yield Case(
                    f"{'.'.join((*part, name))} = {value}", edit_json("config.json", setting(value, *part, name))
                )
    for part, names in CHOICES.items():
        for name in names:
            for value in WRONG_CHOICES:
                yield Case(
                    f"{'.'.join((*part, name))} = {value}", edit_json("config.json", setting(value, *part, name))
                )
    for name, values in PATH_LIKE.items():
        for value in values:
            yield Case(f"{name} = {str(value)[:40]}", edit_json("config.json", setting(value, name)))
    for name, value in KEPT.items():
        yield Case(f"{name} = {value}", edit_json("config.json", setting(value, name)), SAME)
    deep: Any = 1
    for _ in range(900):
        deep = {"x_config": deep}
    yield Case("objects in objects", edit_json("config.json", setting(deep, "x_config")))
    yield from broken_json(source, "config.json")
    yield from broken_json(source, "generation_config.json")


def broken_json(source: Path, name: str) -> Iterator[Case]:
    text = (source / name).read_bytes()
    for part in (1, len(text) // 3, len(text) - 3):
        yield Case(f"{name} of {part} bytes", writing(name, text[:part]))
    for what, content in {
        "empty": b"",
        "a list": b"[1]",
        "no UTF-8": b"\xff" + text,
        "lists in lists": b"[" * 100_000,
        "a long number": b'{"a": ' + b"1" * 10_000 + b"}",
    }.items():
        yield Case(f"{name} is {what}", writing(name, content))

    def huge(folder: Path) -> None:
        os.truncate(folder / name, 2**27)  # a sparse file

    yield Case(f"{name} of 128 MiB", huge)


def indexes(source: Path, outside: Path) -> Iterator[Case]:
    """Indexes of shards that lead elsewhere. `source` is sharded; `outside` is a safetensors file in another folder."""
    index = json.loads((source / INDEX).read_text())["weight_map"]
    name, file = next(iter(index.items()))

    def pointing(value: Any) -> Callable[[Path], Any]:
        return edit_json(INDEX, setting(value, "weight_map", name))

    for value in (
        f"../{outside.parent.name}/{outside.name}",
        str(outside),
        "..",
        "",
        "sub/../../x.safetensors",
        "a\\b.safetensors",
        "x\0.safetensors",
        3,
        None,
        [file],
        {"a": 1},
    ):
        yield Case(f"a shard {str(value)[-30:]!r}", pointing(value))
    yield Case("a shard that is pickled", pointing("pytorch_model-1.bin"))
    yield Case("a shard that is missing", pointing("model-9.safetensors"))
    yield Case("a tensor in another shard", pointing(next(other for other in index.values() if other != file)), SAME)
    yield Case("a tensor that no shard holds", edit_json(INDEX, setting(file, "weight_map", "surplus")), SAME)
    yield Case("a tensor left out", edit_json(INDEX, lambda content: content["weight_map"].pop(name)), REFUSED_OR_SAME)
    for value in ({}, [], None, "x", 3):
        yield Case(f"weight_map {value!r}", edit_json(INDEX, setting(value, "weight_map")))
    yield from broken_json(source, INDEX)
    for link in (file, INDEX, "config.json", "generation_config.json"):

        def linked(folder: Path, link: str = link) -> None:
            elsewhere = folder.parent / f"elsewhere-{link}"
            shutil.copy(folder / link, elsewhere)
            (folder / link).unlink()
            (folder / link).symlink_to(elsewhere)

        yield Case(f"{link} is a link", linked)

    def within(folder: Path) -> None:
        (folder / "inner").mkdir()
        shutil.move(folder / file, folder / "inner" / file)
        (folder / file).symlink_to(Path("inner") / file)

    yield Case("a link within the folder", within, SAME)
    yield Case("no shards", lambda folder: [path.unlink() for path in folder.glob("model-*.safetensors")])


def pickles(source: Path) -> Iterator[Case]:
    """Weights that would run code."""

    def instead(name: str) -> Callable[[Path], Any]:
        def change(folder: Path) -> None:
            (folder / WEIGHTS).unlink()
            with (folder / name).open("wb") as file:
                pickle.dump(Runs(mark_of(folder)), file)

        return change

    for name in ("pytorch_model.bin", "model.pt", "weights.pth", "model.ckpt", "model.pkl"):
        yield Case(f"only {name}", instead(name))

    def beside(folder: Path) -> None:
        with (folder / "pytorch_model.bin").open("wb") as file:
            pickle.dump(Runs(mark_of(folder)), file)

    yield Case("pickled weights beside others, which are read", beside, SAME)

    def named_so(folder: Path) -> None:
        with (folder / WEIGHTS).open("wb") as file:
            pickle.dump(Runs(mark_of(folder)), file)

    yield Case("pickled weights with another name", named_so)


def code(source: Path) -> Iterator[Case]:
    """Code that a checkpoint brings. The class of this package is registered, so the stub is not asked for."""

    def run(folder: Path) -> str:
        return f"import os\nos.mkdir({str(mark_of(folder))!r})\nclass XAttnConfig: pass\n"

    yield Case("the stub", lambda folder: (folder / "xattn_stub.py").write_text(run(folder)), SAME)
    for part in ("text_config", "vision_config"):

        def custom(folder: Path, part: str = part) -> None:
            (folder / "evil.py").write_text(run(folder))
            edit_json("config.json", setting("evil", part, "model_type"))(folder)
            edit_json("config.json", setting({"AutoConfig": "evil.XAttnConfig"}, part, "auto_map"))(folder)

        yield Case(f"a {part} of another's code", custom)
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"):

        def mapped(folder: Path, name: str = name) -> None:
            (folder / "evil.py").write_text(run(folder))
            edit_json("config.json", setting("evil.XAttnConfig", "auto_map", name))(folder)

        yield Case(f"auto_map of {name}", mapped, SAME)


PACKAGE = str(Path(hf_xattn.__file__).parent)


def is_ours(error):
    """Whether the error was raised by this package, and names a file, a folder or an argument."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    words = str(error)
    named = "`" in words or "/" in words
    return (
        isinstance(error, (ValueError, TypeError)) and frame.tb_frame.f_code.co_filename.startswith(PACKAGE) and named
    )
