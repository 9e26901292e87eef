"""`examples/benchmarks/compare_designs.py`: blocks beside image tokens in the prompt."""

import json

import compare_designs
import make_scenes
import pytest
import torch
from compare_designs import Course
from designs import BLOCKS, DESIGNS, IMAGE_TOKEN, LORA, PROJECTOR, Design, Features
from llava_peer import llava_of
from PIL import Image
from text_questions import holds
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    ResNetConfig,
    ResNetModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from helpers.models.template_models import CHATML
from helpers.models.word_models import make_text_checkpoint
from hf_xattn import XAttnProcessor, load_rows, retrofit
from hf_xattn.data.pictures import picture_parts


PARTS = {BLOCKS: ("cross_attention_block", "connector"), PROJECTOR: ("projector",), LORA: ("projector", "lora_")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("designs")
    text = make_text_checkpoint(folder / "text")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = AutoModel.from_config(SiglipVisionConfig(**sizes, image_size=224, patch_size=16, vision_use_head=False))
    images = SiglipImageProcessorPil(size={"height": 224, "width": 224})
    tower.save_pretrained(folder / "tower")
    retrofit(text, folder / "tower", every=2, dtype=torch.float32).save_pretrained(folder / "fresh")
    tokenizer = AutoTokenizer.from_pretrained(text)
    XAttnProcessor(images, tokenizer, chat_template=CHATML).save_pretrained(folder / "fresh")
    make_scenes.main([str(folder / "chats"), "--chats", "--rows=20", "--processes=1"])
    make_scenes.main([str(folder / "development"), "--split=development", "--rows=10", "--processes=1"])
    return folder


def test_image_tokens_stand_where_the_picture_does(folder):
    """A loss over other labels than Llava's own, image tokens at another place, or of another row."""
    design = Design(PROJECTOR, folder / "fresh", Design(BLOCKS, folder / "fresh").parameters)
    rows = load_rows(folder / "chats")
    chosen = [rows[index] for index in range(7, 12)]
    assert {bool(picture_parts(row)) for row in chosen} == {True, False}
    losses, labels = [], 0
    for row in chosen:
        text = design.chats.processor.apply_chat_template(row["messages"], tokenize=False)
        inputs = design.chats.apply_chat_template(
            [row["messages"]], tokenize=True, return_dict=True, return_tensors="pt"
        )
        own = design.batch([row])
        assert torch.equal(own["input_ids"], inputs["input_ids"])
        assert (inputs["input_ids"] == design.model.config.image_token_id).sum() == 196 * text.count(IMAGE_TOKEN)
        wanted = own.pop("labels")
        count = (wanted[:, 1:] != -100).sum()
        losses.append(design.model(**own, labels=wanted).loss * count)
        labels += count
    torch.testing.assert_close(design.loss(design.batch(chosen)), sum(losses) / labels)


def test_features_of_a_convolutional_tower_keep_their_places(folder):
    """Channels read as places, or places in another order than the blocks read them in."""
    tower = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic")).eval()
    text = AutoModelForCausalLM.from_pretrained(folder / "text", dtype=torch.float32)
    seeing = retrofit(text, tower, every=2, connector_type="mlp").eval()
    features = Features(tower, (224, 112))
    pixels = torch.rand(2, 3, 224, 112)
    with torch.no_grad():
        read = features(pixels, output_hidden_states=True).hidden_states[-1]
        assert read.shape == (2, 28 * 14, features.config.hidden_size) == (2, 392, 6)
        blocks = seeing.model.get_image_features(pixels[:, None]).pooler_output
        torch.testing.assert_close(seeing.model.connector(read)[:, None], blocks)
        peer = llava_of(AutoModelForCausalLM.from_pretrained(folder / "text"), features, 5)
        projected = peer.get_image_features(pixels).pooler_output
        torch.testing.assert_close(torch.stack(list(projected)), peer.model.multi_modal_projector(read))
        assert peer.config.image_seq_length == 392


def test_parameters_and_rows(folder):
    """Designs that train other parts than they say, other numbers of parameters, or on other rows."""
    rows, wanted = load_rows(folder / "chats"), Design(BLOCKS, folder / "fresh").parameters
    for name in DESIGNS:
        design = Design(name, folder / "fresh", wanted)
        assert abs(design.parameters - wanted) <= (0 if name == BLOCKS else 0.25 * wanted)  # tiny ranks are coarse
        assert all(each.dtype == torch.float32 for each in design.trained)
        named = [each for each, weight in design.model.named_parameters() if weight.requires_grad]
        assert all(any(part in each for part in PARTS[name]) for each in named)
        assert all(any(part in each for each in named) for part in PARTS[name])
        first, again, other = (next(iter(Course(rows, 4, seed).batches(design, 1))) for seed in (0, 0, 1))
        assert all(torch.equal(first[each], again[each]) for each in first)
        assert first["input_ids"].shape != other["input_ids"].shape or not torch.equal(
            first["input_ids"], other["input_ids"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [BLOCKS, PROJECTOR, LORA])
def test_each_design_trains_and_is_asked_alike(name, folder, tmp_path, capsys):
    """A design that cannot be asked, is trained for more than its compute, or is measured with other rows."""
    file = tmp_path / "found.json"
    given = [str(folder / "fresh"), "--design", name, "--data", str(folder / "chats"), "--batch-size=4"]
    given += ["--development", str(folder / "development"), "--questions=9", "--output", str(file)]
    compare_designs.main([*given, "--pflop=2e-6", "--learning-rates", "1e-3", "1e-2"])
    found = json.loads(file.read_text())
    assert found["design"] == name and found["FLOP of a step"] > 1e6
    assert found["steps"] == max(1, round(2e9 / found["FLOP of a step"])) == len(found["losses"])
    assert set(found["learning rates"]) == {"0.001", "0.01"} and str(found["learning rate"]) in found["learning rates"]
    assert sum(share["of"] for share in found["right"].values()) == 9
    texts = found["texts"]
    if name != LORA:  # a picture's part alone changes no text without one
        assert texts["as the text model, alone"] == texts["of"] == 200
    assert texts["right, text model"] == texts["right, alone"] or name == LORA
    assert min(found[cost] for cost in ("first token", "decode step", "cache", "largest memory, MB")) > 0
    with pytest.raises(SystemExit):
        compare_designs.main([*given, "--pflop=1e-6"])
    assert "which exists" in capsys.readouterr().err
    other = [each if each != str(file) else str(tmp_path / "steps.json") for each in given]
    compare_designs.main([*other, "--steps=2", "--learning-rates", "1e-3", "--started-rate", "0.1", "--dtype=bfloat16"])
    found = json.loads((tmp_path / "steps.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert (found["steps"], found["learning rate"], found["learning rates"]) == (2, 1e-3, {})
    assert found["share of it for started weights"] == (0.1 if name == BLOCKS else None)


@pytest.mark.parametrize("name", [BLOCKS, PROJECTOR])
def test_a_batch_of_texts_alone(name, folder, tmp_path):
    """A run that ends at the first batch without a picture, which teaches a part for pictures nothing."""
    (tmp_path / "texts.jsonl").write_text(json.dumps({"question": "what is it ?", "answer": "a cat"}) + "\n")
    design = Design(name, folder / "fresh", 2000)
    before = [each.detach().clone() for each in design.trained]
    losses, _ = compare_designs.Course(load_rows(tmp_path / "texts.jsonl"), 1, 0).train(design, 2, 1e-3)
    assert len(losses) == 2 and all(map(torch.equal, before, design.trained))


def test_lora_is_used_as_one_uses_it(folder):
    """Adapters that are measured beside the weights, where everybody adds them to the weights."""
    rows = load_rows(folder / "chats")
    design = Design(LORA, folder / "fresh", Design(BLOCKS, folder / "fresh").parameters)
    Course(rows, 4, 0).train(design, 2, 1e-2)
    inputs = design.chats.apply_chat_template(
        [rows[0]["messages"][:-1]], tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        before = design.model.eval()(**inputs).logits
        design.ready()
        after = design.model(**inputs).logits
    torch.testing.assert_close(after, before)
    assert not any("lora" in each for each, _ in design.model.named_parameters())


def test_blocks_cost_less_compute_and_cache(folder, tmp_path):
    """Operations that are not those of the design: image tokens in the prompt pass all layers."""
    rows, wanted = load_rows(folder / "chats"), Design(BLOCKS, folder / "fresh").parameters
    flop = {name: Course(rows, 4, 0).operations(Design(name, folder / "fresh", wanted)) for name in DESIGNS}
    assert flop[BLOCKS] < flop[PROJECTOR] <= flop[LORA]


def test_a_right_word_is_a_whole_word():
    """`ice` found in `juice`: a wrong answer that counts."""
    assert holds("It is called Ice.", "ice") and holds("H2O!", "H2O") and holds("the Sun's light", "Sun")
    assert not holds("It is called juice.", "ice") and not holds("A million animals.", "lion")


def test_a_projector_starts_by_words(folder, tmp_path):
    """A peer that starts at random beside blocks that do not, or one whose image tokens are as large as no word is."""
    colours = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
    for name, colour in colours.items():
        Image.new("RGB", (224, 224), colour).save(tmp_path / f"{name}.png")
    lines = [json.dumps({"file_name": f"{name}.png", "text": name}) for name in colours]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    design = Design(PROJECTOR, folder / "fresh", 2000, words_of=load_rows(tmp_path))
    assert design.model.model.multi_modal_projector.linear_1.weight.requires_grad
    embeddings = design.model.get_input_embeddings().weight.detach()
    tokenizer = design.tokenizer
    words = {name: embeddings[tokenizer(name, add_special_tokens=False)["input_ids"][0]] for name in colours}
    mean = torch.stack(list(words.values())).mean(0)
    for row, name in zip(load_rows(tmp_path), colours):
        with torch.no_grad():
            tokens = design.model.get_image_features(design.batch([row])["pixel_values"]).pooler_output[0]
        found = tokens.mean(0) - embeddings.mean(0)
        likeness = {each: torch.cosine_similarity(found, word - mean, dim=0) for each, word in words.items()}
        assert max(likeness, key=likeness.get) == name and likeness[name] > 0.5
        assert 0.3 < found.norm() / (words[name] - mean).norm() < 3
