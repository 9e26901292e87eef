"""MOSS-VL for one picture a text (`examples/own_parts/import_moss_vl.py`), against its formulas."""

import importlib
import re
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLTextConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

from helpers.checkout import ROOT
from helpers.models.chat_models import drawing, question
from helpers.references.moss_vl_formulas import MARKER, MossVL, make_checkpoint, make_tokenizer
from hf_xattn import CrossAttentionConfig, XAttnDataCollator, XAttnProcessor
from hf_xattn.serving.chat_session import ChatSession
from hf_xattn.utils.parts import CONNECTORS, POSITIONS
from hf_xattn.utils.transformers_api import CACHE, has, needs


FOLDER = ROOT / "examples" / "own_parts"
SIZE, PLACE, SIDE = [16, 24], 3, 3  # two rows of three image tokens
FRONT = [5, 6, 7, MARKER]


@pytest.fixture(scope="module")
def moss():
    """The modules of the example."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("moss_vl_parts"), importlib.import_module("import_moss_vl")
    finally:
        sys.path.remove(str(FOLDER))
        for known in (CONNECTORS._makers, POSITIONS._makers, CONFIG_MAPPING._extra_content):
            for name in ("moss_vl", "moss_vl_tower"):
                known.pop(name, None)
        for name in ("moss_vl_parts", "import_moss_vl"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def both(moss, tmp_path_factory):
    """The formulas, and the model that was imported from their checkpoint."""
    folder = tmp_path_factory.mktemp("moss") / "theirs"
    weights = make_checkpoint(folder)
    return MossVL(weights), moss[1].import_moss_vl(str(folder), SIZE, PLACE).eval()


def pictures(count=1):
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def inputs(moss, rows):
    """Rows of ids, padded on the left, as the processor makes them."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    made = {"input_ids": ids, "attention_mask": mask}
    positions = moss[0].positions_of_text(ids, mask, MARKER, PLACE, SIDE)
    return made if positions is None else made | {"position_ids": positions}


@torch.no_grad()
def test_image_tokens_are_those_of_the_formulas(both):
    """A layer of the tower or a norm in another order, patches of other neighbours, a separator that is missing."""
    theirs, ours = both
    found = ours.get_image_features(pictures()[None]).pooler_output[0, 0]
    assert torch.allclose(found, theirs.image_tokens(pictures()[0])[0], atol=1e-5)


def test_rotary_code_of_the_published_sizes(moss):
    """Against transformers' code of Qwen3-VL, which MOSS-VL takes over: 128 channels, 24 + 20 + 20 frequencies."""
    options = {"grid": [2, 3], "place": 40, "theta": 5e6, "sections": [24, 20, 20]}
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128}
    position = moss[0].MossVLRotary(CrossAttentionConfig(**sizes, position="moss_vl", position_options=options))
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**sizes, rope_parameters=rope))
    query, key = torch.randn(1, 5, 2, 128), torch.randn(1, 7, 2, 128)

    def by_transformers(states, axes):
        cos, sin = theirs(states, axes[:, None])
        return apply_rotary_pos_emb(states, states, cos, sin, unsqueeze_dim=2)[0]

    text = torch.arange(44, 49).expand(3, -1)
    picture = 40 + torch.tensor([[0, 0, 0, 0, 0, 0, 3], [0, 0, 0, 1, 1, 1, 3], [0, 1, 2, 0, 1, 2, 3]])
    assert torch.allclose(position(query, text[:1].int(), "queries"), by_transformers(query, text), atol=1e-5)
    assert torch.allclose(position(key, torch.arange(7)[None], "keys"), by_transformers(key, picture), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[[*FRONT, 8, 9, 10]], [FRONT], [[*FRONT, 8, 9, 10, 11], [*FRONT, 12]]])
def test_logits_are_those_of_the_formulas(moss, both, rows):
    """Keys that begin elsewhere than at the marker, text that does not go on behind the picture, counted padding."""
    theirs, ours = both
    found = ours(**inputs(moss, rows), pixel_values=pictures(len(rows))[:, None]).logits
    for row, logits, picture in zip(rows, found, pictures(len(rows))):
        assert torch.allclose(logits[-len(row) :], theirs.logits(row, [picture]), atol=1e-4)


@torch.no_grad()
def test_text_without_a_picture(moss, both):
    theirs, ours = both
    row = [5, 6, 7, 8, 9]
    assert "position_ids" not in inputs(moss, [row])
    assert torch.allclose(ours(**inputs(moss, [row])).logits[0], theirs.logits(row, []), atol=1e-4)


@torch.no_grad()
def test_generated_tokens_are_those_of_the_formulas(moss, both):
    """Places that do not go on behind the prompt: greedy, a cache that is read again, a question that follows."""
    theirs, ours = both
    rows, count = [[*FRONT, 8, 9, 10], [*FRONT, 12]], 12
    options = {"max_new_tokens": count, "do_sample": False}
    found = ours.generate(**inputs(moss, rows), pixel_values=pictures(2)[:, None], **options)
    expected = [theirs.answer(row, [picture], count) for row, picture in zip(rows, pictures(2))]
    assert found[:, -count:].tolist() == expected
    beams = {"pixel_values": pictures(2)[:, None], "num_beams": 2, **options}
    by_beams = [ours.generate(**inputs(moss, rows), use_cache=cached, **beams) for cached in (True, False)]
    assert torch.equal(*by_beams)
    first = {"pixel_values": pictures()[:, None], "return_dict_in_generate": True}
    said = ours.generate(**inputs(moss, rows[:1]), **first, **options)
    more = [*said.sequences[0].tolist(), 21, 22]
    again = ours.generate(**inputs(moss, [more]), cache=said[CACHE], **options)
    assert again[0, -count:].tolist() == theirs.answer(more, [pictures()[0]], count)


@torch.no_grad()
def test_an_encoded_image_gives_the_same_answer(moss, both):
    theirs, ours = both
    cache, row = ours.encode_images(pixel_values=pictures()[:, None]), [*FRONT, 8, 9, 10]
    found = ours.generate(**inputs(moss, [row]), cache=cache, max_new_tokens=5, do_sample=False)
    assert found[0, -5:].tolist() == theirs.answer(row, [pictures()[0]], 5)


@torch.no_grad()
def test_what_would_be_wrong_is_refused(moss, both):
    """Text behind the picture that is counted as if there were none; a second picture; a picture elsewhere."""
    _, ours = both
    given, pixels = inputs(moss, [[*FRONT, 8]]), pictures()[:, None]
    plain = {name: value for name, value in given.items() if name != "position_ids"}
    for counted in (plain, given | {"position_ids": given["position_ids"].long()}):
        with pytest.raises(ValueError, match="`position_ids` of dtype torch.int32"):
            ours(**counted, pixel_values=pixels)
    with pytest.raises(ValueError, match="`position_ids` of dtype torch.int32"):
        ours.generate(**plain, pixel_values=pixels, max_new_tokens=2)
    cache = ours(**given, pixel_values=pixels, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="`position_ids` of dtype torch.int32"):
        ours(torch.tensor([[9]]), cache=cache)
    for row in ([*FRONT, 8, MARKER], [5, MARKER], [MARKER]):
        with pytest.raises(ValueError, match="at most one picture in a text, behind 3 tokens"):
            inputs(moss, [row])
    ids = torch.tensor([[*FRONT, MARKER]])
    two = {"position_ids": torch.arange(5)[None].int(), "attention_mask": torch.ones_like(ids)}
    with pytest.raises(ValueError, match="Expected one picture .7 image tokens. in each row, got 14"):
        ours(ids, **two, pixel_values=pictures(2)[None])
    with pytest.raises(ValueError, match="Expected pictures of .16, 24. .height, width."):
        ours(**given, pixel_values=pixels.transpose(-1, -2))


@torch.no_grad()
def test_a_picture_that_is_not_counted(moss, both):
    """A difference that is too small for the refusals to matter: of text behind the picture, and of its keys."""
    theirs, ours = both
    row = [*FRONT, 8, 9, 10]
    expected, given, pixels = theirs.logits(row, [pictures()[0]])[-1], inputs(moss, [row]), pictures()[:, None]
    uncounted = given | {"position_ids": torch.arange(len(row))[None].int()}
    assert (ours(**uncounted, pixel_values=pixels).logits[0, -1] - expected).abs().max() > 0.1
    for block in ours.model.blocks:
        block.attn.position.place = 0
    try:
        assert (ours(**given, pixel_values=pixels).logits[0, -1] - expected).abs().max() > 0.1
    finally:
        for block in ours.model.blocks:
            block.attn.position.place = PLACE


@torch.no_grad()
def test_rows_with_and_without_a_picture(moss, both):
    theirs, ours = both
    rows, first = [[*FRONT, 8, 9], [5, 6, 7]], torch.tensor([[True], [False]])
    found = ours(**inputs(moss, rows), pixel_values=pictures(2)[:, None], image_mask=first).logits
    assert torch.allclose(found[0], theirs.logits(rows[0], [pictures()[0]]), atol=1e-4)
    assert torch.allclose(found[1, -3:], theirs.logits(rows[1], []), atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rope_scaling": {"mrope_section": [6, 3, 3]}}, "`rope_scaling.mrope_interleaved` .* to be True"),
        ({"rope_theta": None}, "`rope_theta` .* to be a number, got None"),
        ({"rope_scaling": {"mrope_section": [6, 3, 4], "mrope_interleaved": True}}, "`sections` of 12 frequencies"),
        ({"cross_attention_layers": [1, 9]}, "expected indices from 0 to 5"),
        ({"cross_attention_layers": [1, 3]}, "tensors that the model does not have"),
    ],
)
def test_other_checkpoints_are_refused(moss, tmp_path, changed, said):
    make_checkpoint(tmp_path / "theirs", **changed)
    with pytest.raises(ValueError, match=said):
        moss[1].import_moss_vl(str(tmp_path / "theirs"), SIZE, PLACE)


def test_sizes_that_no_tower_reads_are_refused(moss, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    with pytest.raises(ValueError, match="multiples of 8, .* got .16, 20."):
        moss[1].import_moss_vl(str(tmp_path / "theirs"), [16, 20], PLACE)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"output": "theirs"}, "expected a new folder, got .*theirs, which exists"),
        ({"place": "-1"}, "expected --place to be 0 or more tokens, got -1"),
        ({}, "expected .*theirs to hold preprocessor_config.json"),
        ({"source": "nothing"}, "nothing"),
    ],
)
def test_the_script_refuses(moss, tmp_path, capsys, changed, said):
    """Work that is lost because what is missing is looked for at its end."""
    make_checkpoint(tmp_path / "theirs")
    given = {"source": "theirs", "output": "ours", "place": "3", **changed}
    with pytest.raises(SystemExit):
        places = ["--size", *map(str, SIZE), "--place", given["place"]]
        moss[1].main([str(tmp_path / given["source"]), str(tmp_path / given["output"]), *places])
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "ours").exists()


@pytest.fixture(scope="module")
def imported(moss, tmp_path_factory):
    """A folder that the script has written, and the formulas."""
    if not has("AutoImageProcessor without torchvision"):
        pytest.skip(needs("AutoImageProcessor without torchvision", "the processor"))
    folder = tmp_path_factory.mktemp("script")
    weights = make_checkpoint(folder / "theirs")
    make_tokenizer().save_pretrained(folder / "theirs")
    (folder / "theirs" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}'
    )
    places = ["--size", *map(str, SIZE), "--place", str(PLACE)]
    moss[1].main([str(folder / "theirs"), str(folder / "ours"), *places])
    return MossVL(weights), folder / "ours"


@torch.no_grad()
def test_a_saved_model_has_the_same_logits(moss, both, imported):
    _, folder = imported
    given, pixels = inputs(moss, [[*FRONT, 8, 9]]), pictures()[:, None]
    assert (folder / "moss_vl_parts.py").is_file()
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    assert torch.equal(loaded(**given, pixel_values=pixels).logits, both[1](**given, pixel_values=pixels).logits)


@torch.no_grad()
def test_a_chat_goes_on_behind_its_image(imported):
    """A question about the picture, and one more from the cache; a second picture, and one that comes later."""
    theirs, folder = imported
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
    processor = AutoProcessor.from_pretrained(folder)
    session = ChatSession(model, processor, max_new_tokens=6, do_sample=False)
    session.ask("w20 w21", [drawing(0)])
    session.ask("w30")
    asked = processor.apply_chat_template(
        session.messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=True
    )
    row, pixels = asked["input_ids"][0].tolist(), asked["pixel_values"][0]
    assert len(pixels) == 1 and row[PLACE] == MARKER
    assert session.answers[-1].ids.tolist() == theirs.answer(row, [pixels[0]], 6)
    with pytest.raises(ValueError, match="behind 3 tokens .* behind .3, [0-9]+. tokens in row 0"):
        session.ask("w40", [drawing(1)])
    session.clear()
    session.ask("w20")
    with pytest.raises(ValueError, match="behind 3 tokens .* behind .[0-9]+. tokens in row 0"):
        session.ask("w40", [drawing(1)])


@torch.no_grad()
def test_what_makes_no_positions_is_refused(imported):
    """The processor of this package, as the commands load it where nobody has imported the example; a collator."""
    _, folder = imported
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    plain = XAttnProcessor(processor.image_processor, processor.tokenizer, image_token=processor.image_token)
    with pytest.raises(ValueError, match="`position_ids` of dtype torch.int32"):
        ChatSession(model, plain, max_new_tokens=2).ask("w20", [drawing(0)])
    messages = [question("w20", drawing(0)), {"role": "assistant", "content": "w21"}]
    with pytest.raises(ValueError, match="without `return_offsets_mapping`"):
        XAttnDataCollator(processor)([{"messages": messages}])
