"""Reasoning and tool calls of a served retrofit, told apart as for its text model, and answers that are cut."""

import functools
import json

import pytest
import torch
from template_models import CHATML, make_chat_model, make_processor
from transformers import LlamaConfig, LogitsProcessor, Qwen3Config


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from huggingface_hub.utils import httpx
from model_server import TEXT, Served

from hf_xattn.serving.serving import set_response_template


USER = {"role": "user", "content": TEXT}
TOOLS = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}" + CHATML
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}
THOUGHT, SAID, ARGUMENTS = "a red one?", "It is a circle.", {"at": "the red circle"}
CALL = f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': ARGUMENTS})}\n</tool_call>"


class Says(LogitsProcessor):
    """Makes a model say a text: its answer is that of `generate`, token by token."""

    def __init__(self, ids, prompt_length):
        self.ids, self.prompt_length = ids, prompt_length

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - self.prompt_length
        said = torch.full_like(scores, -torch.inf)
        said[:, self.ids[min(place, len(self.ids) - 1)]] = 0
        return said


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    processor = make_processor(TOOLS)
    make_chat_model(processor, text_class=Qwen3Config).save_pretrained(folder)
    processor.save_pretrained(folder)
    served = Served(folder, "qwen")
    yield served
    served.stop()


@pytest.fixture
def says(served, monkeypatch):
    generate = served.model.generate

    def say(text):
        ids = served.processor.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]

        @functools.wraps(generate)
        def saying(**kwargs):
            return generate(**kwargs, logits_processor=[Says(ids, kwargs["input_ids"].shape[1])])

        monkeypatch.setattr(served.model, "generate", saying)
        return len(ids)

    return say


def test_reasoning_and_calls(served, says):
    """The thoughts of a model and its tool calls as text of the answer, which a client prints."""
    says(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}")
    given = {"tools": [{"type": "function", "function": TOOL}], "max_tokens": 400}
    done = served.ask([USER], **given).choices[0]
    assert done.finish_reason == "tool_calls" and done.message.content.strip() == SAID
    assert done.message.reasoning_content.strip() == THOUGHT
    (call,) = done.message.tool_calls
    assert call.function.name == "look" and json.loads(call.function.arguments) == ARGUMENTS
    chunks = list(served.ask([USER], stream=True, **given))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(each.content or "" for each in deltas).strip() == SAID
    assert [call.function.name for each in deltas for call in each.tool_calls or []] == ["look"]
    asked = {"model": "qwen", "input": TEXT, "max_output_tokens": 400, "tools": [{"type": "function", **TOOL}]}
    made = served.client.responses.create(**asked)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output_text.strip() == SAID and made.status == "completed"


def test_a_cut_response_says_so(served, says):
    """An answer that stops in the middle of a sentence, told as complete."""
    length = says(f"{SAID} response.completed")
    for limit, status, reason in ((length + 1, "completed", None), (length - 3, "incomplete", "max_output_tokens")):
        asked = {"model": "qwen", "input": TEXT, "max_output_tokens": limit}
        events = list(served.client.responses.create(**asked, stream=True))
        assert events[-1].type == f"response.{status}"
        assert sum("completed" == each.type.removeprefix("response.") for each in events) == (reason is None)
        for made in (served.client.responses.create(**asked), events[-1].response):
            assert made.status == status and made.output[-1].status == status
            assert getattr(made.incomplete_details, "reason", None) == reason


def test_tools_that_are_no_functions(served):
    """A tool of OpenAI's own servers, which nothing here runs: the model reads of it and calls it."""
    for tools in ([{"type": "web_search"}], [{"type": "function"}], [{"type": "function", "function": {}}], "look", 3):
        for path, words in (("chat/completions", {"messages": [USER]}), ("responses", {"input": TEXT})):
            body = {"max_tokens": 3, "tools": tools, **words}
            answer = httpx.post(f"{served.address}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 400 and "functions with a `name`" in answer.json()["error"]["message"]


def test_only_of_the_family():
    """A tokenizer of another family, whose end of an answer would stand in the text."""
    processor = make_processor(CHATML)
    set_response_template(processor.tokenizer, make_chat_model(processor, text_class=LlamaConfig))
    assert getattr(processor.tokenizer, "response_template", None) is None
    model = make_chat_model(processor, text_class=Qwen3Config)
    vocabulary = processor.tokenizer.get_vocab()
    other = type("Tokenizer", (), {"get_vocab": lambda self: {"</s>": vocabulary["</s>"]}})()
    set_response_template(other, model)
    assert not hasattr(other, "response_template")
    own = {"fields": {}}
    processor.tokenizer.response_template = own
    set_response_template(processor.tokenizer, model)
    assert processor.tokenizer.response_template is own
