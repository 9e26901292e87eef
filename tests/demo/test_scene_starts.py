"""`examples/scenes/compare_starts.py`: what a start of connector and blocks is worth."""

import json
import re

import compare_starts
import pytest
import torch
from compare_starts import STARTS, Captions, Shares
from scenes import COLOURS, OUTLINES
from splits import open_split
from transformers import AutoTokenizer, ResNetConfig, ResNetModel, SiglipImageProcessorPil

from helpers.models.template_models import CHATML
from helpers.models.word_models import make_text_checkpoint
from hf_xattn import XAttnDataCollator, XAttnProcessor, retrofit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    words = [*COLOURS, *OUTLINES, "at", "the", "in", "top", "middle", "bottom", "left", "right", "an", ","]
    make_text_checkpoint(folder / "text", words)
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "text")
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8, 8], "depths": [1, 1, 1], "layer_type": "basic"}
    ResNetModel(ResNetConfig(**sizes)).save_pretrained(folder / "tower")
    SiglipImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder / "tower")
    return folder


def test_only_scenes_are_shown():
    """A page or a chart among the captions, or the same pictures in both splits."""
    texts = {}
    for name in ("train", "development"):
        rows = Captions(open_split(name, 0), 16)
        texts[name] = [rows[index]["messages"][1]["content"] for index in range(len(rows))]
        assert all(any(f" {shape}" in text for shape in OUTLINES) for text in texts[name])
        with pytest.raises(IndexError):
            rows[16]
    assert len({*texts["train"], *texts["development"]}) == 32


def test_words_that_are_right(folder):
    """Shares of other words, or of a picture that is not the caption's."""
    model = retrofit(folder / "text", folder / "tower", layers=[1, 2], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    processor = XAttnProcessor(SiglipImageProcessorPil.from_pretrained(folder / "tower"), tokenizer)
    rows = Captions(open_split("development", 0), 6)
    shares = Shares(XAttnDataCollator(processor), rows, 4)
    blind = shares.of(model)  # fresh blocks change nothing
    assert all(each["right"] == each["with another picture"] < 0.5 for each in blind.values())
    circle = tokenizer(" circle", add_special_tokens=False)["input_ids"][0]
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, torch.tensor(circle), 1e4))
    words = " ".join(rows[index]["messages"][1]["content"] for index in range(6)).replace(",", "").split()
    of_shapes = [word for word in words if word in OUTLINES]
    found = shares.of(model)
    assert found["shape"]["right"] == pytest.approx(of_shapes.count("circle") / len(of_shapes))
    assert found["row"]["right"] == found["column"]["right"] == 0


@pytest.mark.slow
def test_every_start_is_measured_at_the_same_steps(folder, tmp_path, capsys):
    """A start that does not run, or is measured at other steps."""
    file = tmp_path / "found.json"
    sizes = "--steps 2 --every 1 --batch-size 2 --pictures 12 --held-out 2 --layers 1 2"
    compare_starts.main([str(folder / "text"), str(folder / "tower"), "--output", str(file), *sizes.split()])
    found = json.loads(file.read_text())
    assert {*found} == {*STARTS} and all({*each["0"]} == {"1", "2"} for each in found.values())
    assert capsys.readouterr().out.count("not reached") == len(STARTS)
    with pytest.raises(SystemExit):
        compare_starts.main([str(folder / "text"), str(folder / "tower"), "--output", str(file)])
    assert "which exists" in capsys.readouterr().err


def test_sizes_given_reach_the_blocks(folder, tmp_path, capsys):
    """Sizes that do not reach the blocks: all rows of a table would be of the same model."""
    given = [str(folder / "text"), str(folder / "tower"), "--steps", "1", "--every", "1", "--batch-size", "1"]
    given += ["--held-out", "2", "--start", "random", "--layers", "1", "--output"]
    counts = []
    for name, sizes in (("plain", {}), ("none", {"mlp_type": "none"})):
        compare_starts.main([*given, str(tmp_path / name), "--block", json.dumps(sizes)])
        counts.append(int(re.search(r"([\d,]+) parameters train", capsys.readouterr().out)[1].replace(",", "")))
        model = retrofit(folder / "text", folder / "tower", layers=[1], cross_attention=compare_starts.BLOCK | sizes)
        added = [each for part in (*model.blocks, model.model.connector) for each in part.parameters()]
        assert counts[-1] == sum(each.numel() for each in added)
    assert counts[0] > counts[1]
    for wrong in ("3", "mlp_type"):
        with pytest.raises(SystemExit):
            compare_starts.main([*given, str(tmp_path / "wrong"), "--block", wrong])
        assert (
            f'--block: expected a JSON object such as \'{{"mlp_type": "none"}}\', got {wrong}'
            in capsys.readouterr().err
        )
