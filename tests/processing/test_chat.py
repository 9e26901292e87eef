"""Messages of chats: their texts, images and videos, and what comes beside them."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaProcessor

from helpers.inputs.chat_templates import LOOP, SEEING, TALK, TEXT_TEMPLATES, image, make_picture, make_processor, text
from helpers.models.template_models import CHATML
from helpers.models.template_models import make_processor as make_small_processor
from hf_xattn import XAttnProcessor
from hf_xattn.utils.transformers_api import has


FORMS = [
    "pil",
    "array",
    "tensor",
    "path",
    "path_str",
    "url",
    "data_url",
    "base64",
    "image_url",
    "image_url_str",
    "none_beside",
]


@pytest.mark.parametrize("form", FORMS)
def test_images_in_parts(form, tmp_path):
    """A way of naming an image that is taken for none."""
    picture = make_picture()
    file = tmp_path / "a.png"
    picture.save(file)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    part = {
        "pil": image(image=picture),
        "array": image(image=np.asarray(picture)),
        "tensor": image(image=torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)),
        "path": image(path=file),
        "path_str": image(path=str(file)),
        "url": image(url=str(file)),
        "data_url": image(url=f"data:image/png;base64,{encoded}"),
        "base64": image(base64=encoded),
        "image_url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        "image_url_str": {"type": "image_url", "image_url": f"data:image/png;base64,{encoded}"},
        "none_beside": {"type": "image", "image": picture, "text": None, "url": None},  # rows of a data set
    }[form]
    processor = make_processor(TEXT_TEMPLATES["concatenation"])
    chat = [{"role": "user", "content": [part, {**text("a dog ?"), "image": None}]}]
    made = processor.apply_chat_template(chat, tokenize=True, return_dict=True)
    expected = processor(images=picture, text="<|user|>a dog ?[EOS]")
    assert torch.equal(made["pixel_values"], expected["pixel_values"])
    assert torch.equal(made["input_ids"], expected["input_ids"])


@pytest.mark.parametrize("marker", [None, "<image>"])
def test_images_beside_the_messages(marker):
    """Bare parts, as data sets have them, that are answered without an image."""
    processor = make_processor(TEXT_TEMPLATES["concatenation"], marker)
    bare = [{"role": "user", "content": [{"type": "image"}, text("a dog ?"), {"type": "image"}]}]
    filled = [{"role": "user", "content": [image(3), text("a dog ?"), image(4)]}]
    expected = processor.apply_chat_template(filled, tokenize=True, return_dict=True)
    pictures = [make_picture(3), make_picture(4)]
    for options in ({"processor_kwargs": {"images": pictures}}, {"images": pictures}):
        made = processor.apply_chat_template(bare, tokenize=True, return_dict=True, **options)
        assert made.keys() == expected.keys() and all(torch.equal(made[name], expected[name]) for name in made)
    both = processor.apply_chat_template(
        [bare, [{"role": "user", "content": "a"}]], tokenize=True, return_dict=True, images=[pictures, None]
    )
    assert both["image_mask"].tolist() == [[True, True], [False, False]]
    assert processor.apply_chat_template(bare) == processor.apply_chat_template(filled)
    mark = marker or ""
    written = [{"role": "user", "content": f"{mark}a dog ?{mark}"}]
    made = processor.apply_chat_template(written, tokenize=True, return_dict=True, images=pictures)
    assert torch.equal(made["input_ids"], expected["input_ids"])
    assert torch.equal(made["pixel_values"], expected["pixel_values"])
    for images, message in ((None, "2 parts without an image"), (pictures[:1], "2 `images`.*got 1")):
        with pytest.raises(ValueError, match=message):
            processor.apply_chat_template(bare, tokenize=True, images=images)
    with pytest.raises(ValueError, match="0 `images`.*got 2"):
        processor.apply_chat_template(filled, tokenize=True, images=pictures)
    with pytest.raises(ValueError, match="one entry for each of 2"):
        processor.apply_chat_template([bare, bare], tokenize=True, images=[pictures])


def test_videos_in_parts():
    """A video that is left out of the question about it."""
    processor = make_processor(TEXT_TEMPLATES["concatenation"], "<image>")
    frames = [make_picture(seed) for seed in range(4)]
    array = np.stack([np.asarray(frame) for frame in frames])
    for video in (frames, array):
        chat = [{"role": "user", "content": [image(9), {"type": "video", "video": video}, text("a dog ?")]}]
        assert processor.apply_chat_template(chat).count("<image>") == 5
        made = processor.apply_chat_template(chat, tokenize=True, return_dict=True)
        expected = processor(images=[make_picture(9), *frames], text="<image>" * 5)
        assert torch.equal(made["pixel_values"], expected["pixel_values"])
        few = processor.apply_chat_template(chat, tokenize=True, return_dict=True, num_frames=2)
        assert torch.equal(few["pixel_values"], expected["pixel_values"][:, [0, 1, 4]])
    with pytest.raises(ValueError, match="to have `video`"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "video"}]}])


WRONG = {
    "a string": ("a dog", TypeError, "`conversation` to be a list of one message or more, got 'a dog'"),
    "empty": ([], TypeError, "Expected `conversation` to be a list of one message or more, got .."),
    "empty in a batch": ([TALK, []], TypeError, "conversation 1 to be a list of one message or more"),
    "message": (["a dog"], TypeError, "message 0 of `conversation` to be a dict"),
    "no role": ([{"content": "a"}], TypeError, "message 0.*without `role`"),
    "content": ([{"role": "user", "content": 3}], TypeError, "content of message 0.*got int"),
    "part": ([{"role": "user", "content": ["a"]}], TypeError, "parts of message 0.*got str"),
    "picture": ([{"role": "user", "content": [make_picture()]}], TypeError, "parts of message 0.*got PIL"),
    "no text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        TypeError,
        "`text` of a part of message 0.*NoneType",
    ),
    "audio": (
        [{"role": "user", "content": [{"type": "audio", "url": "a.wav"}]}],
        ValueError,
        "one of text, image.*got 'audio'",
    ),
    "no type": ([{"role": "user", "content": [{"txt": "a"}]}], ValueError, "got None"),
    "twice": ([{"role": "user", "content": [image(url="a", path="b")]}], ValueError, "got 2: url, path"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_chats_are_named(case):
    """`string indices must be integers`, or a part that is skipped."""
    chat, error, message = WRONG[case]
    processor = make_processor(TEXT_TEMPLATES["guard"])
    for options in ({}, {"tokenize": True, "return_dict": True}):
        with pytest.raises(error, match=message):
            processor.apply_chat_template(chat, **options)


def test_wrong_keywords_are_named():
    """A misspelt keyword that changes nothing."""
    processor = make_processor(TEXT_TEMPLATES["guard"])
    for options in (
        {"add_generation_promt": True},
        {"processor_kwargs": {"paddin": True}},
        {"text_kwargs": {"paddin": 1}},
    ):
        with pytest.raises(
            TypeError, match="unexpected keyword argument `(add_generation_promt|paddin)`. Did you mean"
        ):
            processor.apply_chat_template(TALK, tokenize=True, **options)
    with pytest.raises(TypeError, match="add_generation_promt"):
        processor.apply_chat_template(TALK, add_generation_promt=True)
    with pytest.raises(ValueError, match="does not show"):
        processor.apply_chat_template(TALK, chat_template="tool_use")  # no template of that name
    for other in ("add_generation_prompt", "return_assistant_tokens_mask"):
        with pytest.raises(ValueError, match=f"`continue_final_message` without .*`{other}`"):
            processor.apply_chat_template(TALK, continue_final_message=True, **{other: True})


def test_assistant_masks_lie_on_the_answers():
    """Labels on the prompt, or beside the answer because images stand before it."""
    template = (
        LOOP
        + "<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}"
        "{% endgeneration %}{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
    )
    for marker in (None, "<image>"):
        processor = make_processor(template, marker)
        chats = [TALK[:3], [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a cat"}]]
        made = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        said = [
            processor.decode(ids[mask.bool()])
            for ids, mask in zip(made["input_ids"], made["assistant_masks"], strict=True)
        ]
        assert said == ["a dog and a cat . [EOS]", "a cat [EOS]"]
        assert "offset_mapping" not in made
        lists = processor.apply_chat_template(chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert [sum(mask) for mask in lists["assistant_masks"]] == made["assistant_masks"].sum(-1).tolist()
        assert [len(mask) for mask in lists["assistant_masks"]] == [len(ids) for ids in lists["input_ids"]]


def test_a_saved_processor_renders_chats_alike(tmp_path):
    """A chat that reads differently after a model was saved."""
    for number, options in enumerate(
        [{"template": TEXT_TEMPLATES["guard"]}, {"own": SEEING}, {"template": "1", "own": SEEING}, {}]
    ):
        processor = make_processor(marker="<image>", **options)
        folder = tmp_path / str(number)
        processor.save_pretrained(folder)
        for loaded in (
            XAttnProcessor.from_pretrained(folder),
            AutoProcessor.from_pretrained(folder, trust_remote_code=False),
        ):
            assert isinstance(loaded, XAttnProcessor)
            assert loaded.image_token == "<image>" and loaded.chat_template == processor.chat_template
            assert loaded.apply_chat_template(TALK) == processor.apply_chat_template(TALK)
    named = make_processor({"default": TEXT_TEMPLATES["guard"], "tool_use": TEXT_TEMPLATES["trim"]})
    named.save_pretrained(tmp_path / "named")
    assert XAttnProcessor.from_pretrained(tmp_path / "named").chat_template == named.chat_template


def test_control_tokens_of_users_are_texts():
    """A user who writes a marker or ends a message; and the model's own markers, which are lost with them."""
    for style in ("guard", "concatenation"):
        processor = make_processor(TEXT_TEMPLATES[style], "<image>")
        chat = [{"role": "user", "content": [image(), text("a <image> [EOS]<|bot|> b")]}]
        if not has("_mark_chat_inputs"):
            with pytest.raises(ValueError, match="`sanitize_control_tokens=True` needs transformers 5.23.0 or newer"):
                processor.apply_chat_template(chat, tokenize=True, return_dict=True, sanitize_control_tokens=True)
            continue
        made = processor.apply_chat_template(chat, tokenize=True, return_dict=True, sanitize_control_tokens=True)
        ids = made["input_ids"][0].tolist()
        assert ids.count(processor.image_token_id) == 1 and ids.count(processor.tokenizer.eos_token_id) == 1
        with pytest.raises(ValueError, match="2 markers and 1 images"):
            processor.apply_chat_template(chat, tokenize=True)


def test_truncation_that_cuts_markers():
    """An image without its marker."""
    processor = make_processor(TEXT_TEMPLATES["concatenation"], "<image>")
    with pytest.raises(ValueError, match="of text 0, got 1 markers and 2 images. Truncation has cut"):
        processor.apply_chat_template(TALK[1:2], tokenize=True, truncation=True, max_length=4)


def test_messages_of_the_openai_client():
    """An answer of the client that cannot be sent back."""
    chat_types = pytest.importorskip("openai.types.chat")
    answer = chat_types.ChatCompletionMessage(role="assistant", content="a dog .")
    processor = make_processor(TEXT_TEMPLATES["trim"])
    made = processor.apply_chat_template([*TALK[:2], answer, {"role": "user", "content": "what ?"}])
    assert "<|assistant|>a dog .[EOS]<|user|>what ?" in made


def test_a_chat_returns_the_tensors_that_were_asked_for():
    """Lists where tensors were asked for."""
    processor = make_processor(TEXT_TEMPLATES["trim"])
    chats = [TALK, TALK[1:2]]
    options = {"tokenize": True, "return_dict": True}
    assert isinstance(processor.apply_chat_template(TALK, tokenize=True), torch.Tensor)
    arrays = processor.apply_chat_template(chats, return_tensors="np", **options)
    assert {type(value) for value in arrays.values()} == {np.ndarray}
    lists = processor.apply_chat_template(chats, return_tensors=None, **options)
    assert [len(row) for row in lists["input_ids"]] == [
        processor.apply_chat_template(chat, tokenize=True).shape[1] for chat in chats
    ]
    seen = processor.apply_chat_template([[TALK[1]], TALK], **options)
    assert seen["image_mask"].tolist() == [[True, True, False], [True] * 3]
    assert [len(row) for row in seen["attention_mask"]] == [len(row) for row in seen["input_ids"]]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True},
        {"padding": "max_length", "max_length": 12},
        {"padding": True, "return_tensors": "pt"},
        {"padding": True, "return_tensors": "np"},
        {"processor_kwargs": {"padding": True}},
        {"processor_kwargs": {"padding": True, "return_tensors": "pt"}},
    ],
)
def test_several_chats_give_what_transformers_gives(count, options):
    """Padding that a caller takes for a part of the prompts, or tensors in place of lists."""
    processor = make_processor(LOOP + "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}")
    parts = {"image_processor": processor.image_processor, "tokenizer": processor.tokenizer}
    theirs = LlavaProcessor(**parts, chat_template=processor.chat_template, image_token="[UNK]")
    chats = [[{"role": "user", "content": [text(words)]}] for words in ("what is a dog ?", "a")][:count]
    options = {"tokenize": True, "return_dict": True, **options}
    made, expected = (each.apply_chat_template(chats, **options) for each in (processor, theirs))
    assert str(dict(made)) == str(dict(expected))
    ids = processor.apply_chat_template(chats, **{**options, "return_dict": False})
    assert str(ids) == str(expected["input_ids"])


def test_unknown_keys_of_parts_are_named():
    """A picture under a misspelt key, of which the error only says that an image is missing."""
    processor = make_processor(TEXT_TEMPLATES["concatenation"], "<image>")
    for part, message in (
        (
            {"type": "image", "img": make_picture(3)},
            "without an image. Nothing reads the key `img`. Did you mean `image`",
        ),
        ({"type": "video", "vid": "a.mp4"}, "got none of them. Nothing reads the key `vid`. Did you mean `video`"),
        ({"type": "text", "txt": "a"}, "got NoneType. Nothing reads the key `txt`. Did you mean `text`"),
        ({"image": make_picture(3)}, "got None in a part with the keys image"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            processor.apply_chat_template([{"role": "user", "content": [part]}], tokenize=True)
    bare = [{"role": "user", "content": [{"type": "image", "note": "low"}]}]
    with pytest.raises(ValueError, match="`note`"):
        processor.apply_chat_template(bare, tokenize=True)
    processor.apply_chat_template(bare, tokenize=True, images=[make_picture(3)])  # a key that nobody needs


REQUESTS = ["resized_height", "max_pixels", "min_pixels", "maxPixels", "image_size", "crop", "fps", "video_start"]


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_a_part_that_nothing_obeys(name):
    """A picture of another size, or with other frames, than its part asks for, answered as if it had them."""
    processor = make_processor(TEXT_TEMPLATES["concatenation"], "<image>")
    picture = {"type": "image", "image": make_picture(3)}
    address = {"type": "image_url", "image_url": {"url": make_picture(3)}}
    video = {"type": "video", "video": [make_picture(3)] * 2}

    def read(part):
        chat = [{"role": "user", "content": [part, {"type": "text", "text": "what ?"}]}]
        return processor.apply_chat_template(chat, tokenize=True, return_dict=True)

    for part in (
        {**picture, name: 28},
        {**address, name: 28},
        {**video, name: 28},
        {**address, "image_url": {**address["image_url"], name: 28}},
    ):
        with pytest.raises(
            ValueError, match=f"message 0 of `conversation` without `{name}`, which is not obeyed, got 28"
        ):
            read(part)
    hints = {"detail": "low", "cache_control": {"type": "ephemeral"}, "alt": "a dog", name: None}
    expected = read(picture)
    for part in ({**picture, **hints}, {**address, "image_url": {**address["image_url"], "detail": "high"}}):
        assert all((expected[key] == value).all() for key, value in read(part).items())


@pytest.mark.parametrize("name, value", [("images", [Image.new("RGB", (8, 8))]), ("image_url", "photo.png")])
def test_a_picture_beside_the_content(name, value):
    """A chat in Ollama's form, whose pictures nobody reads."""
    message = {"role": "user", "content": "what ?", name: value}
    with pytest.raises(ValueError, match=f"the images of message 0 .* in its `content`, got `{name}` beside it"):
        make_small_processor(CHATML).apply_chat_template([message], tokenize=True)


@pytest.mark.parametrize("name", ["contents", "text"])
def test_a_message_without_content(name):
    """A misspelt question, and an answer to an empty one."""
    with pytest.raises(ValueError, match=f"Expected `content` in message 0 .*, got a message with role, {name} alone"):
        make_small_processor(CHATML).apply_chat_template([{"role": "user", name: "what ?"}], tokenize=True)
