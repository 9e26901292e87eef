"""Llama 3.2 Vision, brought over and back, against transformers' own model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaProcessor,
)

from helpers.models.tiny_mllama import (
    MARKER,
    MIXED,
    TEXT,
    TILED,
    VOCAB,
    make_mllama,
    make_mllama_processor,
    mllama_inputs,
    picture,
    stop_mllama,
)
from hf_xattn import XAttnForConditionalGeneration, XAttnProcessor
from hf_xattn.checkpoints.model_card import describe
from hf_xattn.importers import export_checkpoint, import_checkpoint
from hf_xattn.importers.mllama import recipe
from hf_xattn.utils.transformers_api import CACHE


@torch.no_grad()
@pytest.mark.parametrize("case", TILED)
@pytest.mark.parametrize("driven_by", ["mask", "ids"])
def test_an_imported_mllama_gives_the_same_logits(case, driven_by):
    """A weight in the wrong place, padding tiles that are seen, another visibility rule, another rotary embedding."""
    theirs = make_mllama()
    ours = import_checkpoint(theirs)
    assert not ours.training and import_checkpoint(theirs.train()).training
    expected = theirs.eval()(**TILED[case]).logits
    given = dict(TILED[case])
    if driven_by == "ids":
        del given["cross_attention_mask"]
    assert torch.allclose(ours(**given).logits, expected, atol=2e-5)


@torch.no_grad()
def test_text_that_sees_no_image_is_left_alone():
    """The leak of transformers' model (issue 39379), taken over; or more of a difference than the leak."""
    theirs = make_mllama()
    ours = import_checkpoint(theirs)
    logits = ours(**MIXED).logits
    leaking = theirs(**MIXED).logits
    assert not torch.allclose(logits[1], leaking[1], atol=1e-3)
    assert torch.allclose(logits, stop_mllama(make_mllama())(**MIXED).logits, atol=2e-5)
    text_only = ours(MIXED["input_ids"]).logits
    assert torch.equal(logits[1], text_only[1]) and torch.equal(logits[0, :3], text_only[0, :3])
    assert torch.allclose(text_only, theirs(MIXED["input_ids"]).logits, atol=2e-5)


@torch.no_grad()
def test_base_is_a_llama():
    """A text half that is not the decoder it was."""
    theirs = make_mllama()
    fields = {key: value for key, value in TEXT.items() if key != "cross_attention_layers"}
    llama = LlamaForCausalLM(LlamaConfig(**fields | {"num_hidden_layers": 4, "rms_norm_eps": 1e-5})).eval()
    language = theirs.model.language_model
    kept = [language.layers[index] for index in (0, 2, 3, 5)]
    for layer, other in zip(llama.model.layers, kept):
        layer.load_state_dict(other.state_dict())
    llama.model.embed_tokens.weight.copy_(language.embed_tokens.weight[:VOCAB])
    llama.model.norm.load_state_dict(language.norm.state_dict())
    llama.lm_head.load_state_dict(theirs.lm_head.state_dict())
    ids = torch.randint(2, VOCAB, (2, 9))
    assert torch.equal(import_checkpoint(theirs)(ids).logits, llama(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("said_by", ["aspect_ratio_ids", "image_mask"])
def test_padding_images_of_an_imported_mllama_are_not_seen(said_by):
    """A padding image that is seen, where no marker keeps it out: its processor marks one of its tiles as real."""
    model = import_checkpoint(make_mllama())
    model.config.image_visibility = "all"
    given = mllama_inputs([[MARKER, 5, 6, MARKER, 7, 8], [MARKER, 11, 12, 13, 14, 15]], [[2, 1], [4]])
    del given["cross_attention_mask"]
    if said_by == "image_mask":
        given["aspect_ratio_ids"][1, 1] = 1
        given["image_mask"] = torch.tensor([[True, True], [True, False]])
    first = model(**given).logits
    given["pixel_values"][1, 1] += 1
    assert torch.equal(model(**given).logits, first)
    given["pixel_values"][0, 1] += 1
    assert not torch.allclose(model(**given).logits[0], first[0], atol=1e-3)


@torch.no_grad()
def test_images_added_to_a_chat():
    """Tiles of the new image that are taken for those of the images in the cache."""
    model = import_checkpoint(make_mllama())
    whole = mllama_inputs([[MARKER, 5, 6, 7, MARKER, 9, 10]], [[3, 2]])
    del whole["cross_attention_mask"]
    expected = model(**whole).logits
    start = {name: value[:, :4] if name == "input_ids" else value[:, :1] for name, value in whole.items()}
    cache = model(**start, use_cache=True)[CACHE]
    later = whole | {"input_ids": whole["input_ids"][:, 4:]}
    assert torch.allclose(model(**later, cache=cache).logits, expected[:, 4:], atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", ["several", "batch"])
def test_an_imported_mllama_generates_the_same_tokens(case):
    """Images that go missing after the first step, and markers that a cache forgets."""
    theirs = make_mllama()
    ours = import_checkpoint(theirs)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(**TILED[case], **options)
    from_ids = {name: value for name, value in TILED[case].items() if name != "cross_attention_mask"}
    for given in (TILED[case], from_ids):
        for use_cache in (True, False):
            assert torch.equal(ours.generate(**given, **options, use_cache=use_cache), expected)
    encoded = {name: value for name, value in from_ids.items() if name != "input_ids"}
    images = ours.encode_images(**encoded)
    for _ in range(2):
        assert torch.equal(ours.generate(TILED[case]["input_ids"], cache=images, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_folder_to_folder_and_back(dtype, shard_size, tmp_path):
    """A tensor lost, rounded or misplaced on the way to a folder, or on the way back."""
    theirs = make_mllama(dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text("{}")
    ours = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert ours.dtype == dtype
    files = {path.name for path in (tmp_path / "ours").iterdir()}
    assert ("model.safetensors.index.json" in files) == (shard_size == "20KB")
    assert {"config.json", "tokenizer_config.json", "generation_config.json"} <= files
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    assert isinstance(loaded, XAttnForConditionalGeneration)
    direct = import_checkpoint(theirs).state_dict()
    assert direct.keys() == loaded.state_dict().keys()
    assert all(torch.equal(direct[name], tensor) for name, tensor in loaded.state_dict().items())

    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    export_checkpoint(loaded, tmp_path / "back_from_model")
    original = {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        original |= load_file(file)
    for folder in ("back", "back_from_model"):
        again = load_file(tmp_path / folder / "model.safetensors")
        assert again.keys() == original.keys()
        assert all(again[name].dtype == tensor.dtype for name, tensor in original.items())
        assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
        back = MllamaForConditionalGeneration.from_pretrained(tmp_path / folder, dtype="auto")
        assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
        configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", folder)]
        for part in ("text_config", "vision_config"):
            parts = [{key: value for key, value in config[part].items() if key != "dtype"} for config in configs]
            assert parts[0] == parts[1]


@torch.no_grad()
def test_the_original_processor_and_ours_give_the_same_tokens(tmp_path):
    """The original processor, or ours around the same image processor, that the imported model does not understand."""
    theirs = make_mllama()
    theirs.save_pretrained(tmp_path / "theirs")
    make_mllama_processor().save_pretrained(tmp_path / "theirs")
    ours = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    processor = AutoProcessor.from_pretrained(tmp_path / "ours")
    assert isinstance(processor, MllamaProcessor)
    images = [[picture(28, 28, 0)], [picture(60, 28, 1), picture(28, 90, 2)]]
    texts = ["<|image|> w1 w2", "<|image|> w3 <|image|> w4 w5 w6"]
    batch = processor(images=images, text=texts, padding=True, return_tensors="pt")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(**batch, **options)
    assert torch.equal(ours.generate(**batch, **options), expected)

    own = XAttnProcessor(processor.image_processor, processor.tokenizer, image_token="<|image|>")
    texts = ["<|image|> <s> w1 w2", "<|image|> <s> w3 <|image|> w4 w5 w6"]  # the original adds the start
    given = own(images=images, text=texts)
    assert given["pixel_values"].shape == batch["pixel_values"].shape
    assert torch.equal(given["input_ids"], batch["input_ids"]) and "cross_attention_mask" not in given
    assert torch.equal(ours.generate(**given, **options), expected)


# Number of layers, cross-attention layers, and what these become.
NEIGHBOURS = {
    "two": (6, [3, 4], [3, 3]),
    "three in a row": (7, [1, 2, 3], [1, 1, 1]),
    "two and one": (6, [1, 2, 4], [1, 1, 2]),
    "at the beginning": (6, [0, 1], [0, 0]),
    "at the end": (7, [1, 4, 5, 6], [1, 3, 3, 3]),
    "both": (6, [0, 1, 4, 5], [0, 0, 2, 2]),
    "all but one": (4, [1, 2, 3], [1, 1, 1]),
}


@torch.no_grad()
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_neighbouring_cross_attention_layers(neighbours, tmp_path):
    """A cross-attention layer that is dropped, runs before its neighbour, or takes the weights or the keys of its
    neighbour.
    """
    count, cross, places = NEIGHBOURS[neighbours]
    theirs = make_mllama(num_hidden_layers=count, cross_attention_layers=cross)
    theirs.save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.cross_attention_layers == places and len(ours.blocks) == len(cross)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for name, case in TILED.items():
        assert torch.allclose(ours(**case).logits, theirs(**case).logits, atol=2e-5), name
        # Their own generation with a cache fails with an image in front of the first layer.
        expected = theirs.generate(**case, **options, use_cache=0 not in cross)
        for use_cache in (True, False):
            assert torch.equal(ours.generate(**case, **options, use_cache=use_cache), expected), name
    direct = import_checkpoint(theirs).state_dict()
    assert all(torch.equal(direct[name], tensor) for name, tensor in ours.state_dict().items())
    export_checkpoint(ours, tmp_path / "back")
    original, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert original.keys() == back.keys() and all(torch.equal(back[name], original[name]) for name in original)
    again = MllamaForConditionalGeneration.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert again.config.text_config.cross_attention_layers == cross
    assert torch.equal(again(**TILED["several"]).logits, theirs(**TILED["several"]).logits)


@pytest.mark.parametrize("cross", [[0], [0, 1, 2]])
def test_a_decoder_without_self_attention_is_refused(cross):
    """A model of no layers at all, whose blocks have no place."""
    with pytest.raises(ValueError, match=f"at least one of the {len(cross)} layers to have self-attention"):
        import_checkpoint(make_mllama(num_hidden_layers=len(cross), cross_attention_layers=cross))


@torch.no_grad()
def test_block_after_the_last_layer(tmp_path):
    """A cross-attention layer at the end of the stack that is dropped, or moved in front of the last layer."""
    theirs = make_mllama(cross_attention_layers=[1, 5])
    ours = import_checkpoint(theirs)
    case = TILED["several"]
    assert torch.allclose(ours(**case).logits, theirs(**case).logits, atol=2e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(**case, **options), theirs.generate(**case, **options))
    export_checkpoint(ours, tmp_path / "back")
    back = MllamaForConditionalGeneration.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


def test_the_published_sizes_give_llama_3_2_vision_11b():
    """Llama-3.2-11B-Vision: a block in front of the wrong layer, or a decoder that is not Llama-3.1-8B's."""
    rope = {**TEXT["rope_parameters"], "original_max_position_embeddings": 8192}
    cross = [3, 8, 13, 18, 23, 28, 33, 38]
    text = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 40}
    text |= {"num_key_value_heads": 8, "vocab_size": 128256, "cross_attention_layers": cross, "rope_parameters": rope}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8}
    vision |= {"attention_heads": 16, "image_size": 448, "vision_output_dim": 7680}
    config = recipe(MllamaConfig(text_config=text, vision_config=vision, image_token_index=128256)).config
    assert config.cross_attention_layers == [3, 7, 11, 15, 19, 23, 27, 31]
    with torch.device("meta"):
        model = XAttnForConditionalGeneration._from_config(config)
    figures = describe(model)
    assert figures["text decoder"] == f"llama, {8_030_261_248 + 8 * 4096:,} parameters"
    assert figures["tokens an image"] == f"{4 * (32 * 32 + 1):,}"
    assert figures["K/V bytes an image"] == f"{2 * 8 * 8 * 128 * 4 * 4100:,}"


def test_a_changed_model_does_not_go_back(tmp_path):
    """A folder that transformers' class loads with random weights."""
    changed = import_checkpoint(make_mllama())
    changed.model.text_model.lm_head = torch.nn.Linear(32, VOCAB + 1, bias=False)
    changed.save_pretrained(tmp_path / "changed")
    for source in (changed, tmp_path / "changed"):
        with pytest.raises(ValueError, match=r"expected shape \(96, 32\) for .*, got \(97, 32\)"):
            export_checkpoint(source, tmp_path / "out")
    del changed.model.text_model.model.layers[1].cross_attention_block
    with pytest.raises(ValueError, match="no tensor for .*cross_attention_block"):
        export_checkpoint(changed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pixels_without_aspect_ratios_are_refused():
    """Pixels of another processor, or without their aspect ratios."""
    model = import_checkpoint(make_mllama())
    good = TILED["one"]
    for change, message in (
        ({"pixel_values": good["pixel_values"][:, :, 0]}, "max_num_tiles=4"),
        ({"aspect_ratio_ids": None}, "`aspect_ratio_ids` is required"),
        ({"aspect_ratio_mask": good["aspect_ratio_mask"][..., :2]}, "Expected `aspect_ratio_mask` of shape"),
        ({"cross_attention_mask": torch.ones(1, 6, 1, 3)}, r"\(1, 6, 1, tiles\).*got \(1, 6, 1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**good | change)


@torch.no_grad()
def test_a_batch_with_and_without_an_image():
    """A row without an image that is refused (transformers' issue 35937), or reads the other's image or padding."""
    theirs, model = make_mllama_processor(), import_checkpoint(make_mllama())
    texts, images = ["<|image|> w5 w6", "w7 w8 w9"], [[picture(28, 28, 0)], []]
    processor = XAttnProcessor(theirs.image_processor, theirs.tokenizer)
    batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    logits = model(**batch).logits
    for row, image in enumerate(images):
        alone = processor(text=texts[row : row + 1], images=[image] if image else None, return_tensors="pt")
        assert torch.allclose(logits[row, mask[row]], model(**alone).logits[0], atol=2e-5), row
    text = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(logits[1, mask[1]], text[1, mask[1]])
