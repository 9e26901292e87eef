"""A conversation that is streamed, stopped and looked at: what a page needs of a chat."""

import copy
import threading
import time

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from helpers.models.chat_models import NEW_TOKENS, answer, drawing, question
from helpers.models.tiny_models import strengthen
from hf_xattn import attention_maps
from hf_xattn.serving.chat_session import ChatSession


TEXT = "what is in the picture ?"


@pytest.fixture(scope="module")
def model(chat_folder):
    return AutoModelForImageTextToText.from_pretrained(chat_folder).eval()


@pytest.fixture(scope="module")
def processor(chat_folder):
    return AutoProcessor.from_pretrained(chat_folder)


@pytest.fixture
def session(model, processor):
    return ChatSession(model, processor, max_new_tokens=NEW_TOKENS, do_sample=False)


def test_streamed_answers_are_those_of_generate(session, model, processor):
    """A stream that loses a piece, or the conversation of earlier turns."""
    first = "".join(session.stream(TEXT, [drawing(0)]))
    messages = [question(TEXT, drawing(0))]
    assert first == answer(model, processor, messages)
    second = "".join(session.stream("and this ?", [drawing(1)]))
    messages += [{"role": "assistant", "content": first}, question("and this ?", drawing(1))]
    assert second == answer(model, processor, messages)
    assert [each.text for each in session.answers] == [first, second]
    assert [each.num_images for each in session.answers] == [1, 2]


@pytest.mark.parametrize("first", [[], [drawing(0)]], ids=["text", "picture"])
def test_a_new_picture_is_seen_by_the_text_before(first, model, processor):
    """`image_visibility="all"`: a cached text that never saw the new picture, so that the logits are others."""
    model = copy.deepcopy(model)
    with torch.no_grad():  # a decoder whose tokens depend on those before
        strengthen(model)
    assert model.config.image_visibility == "all"
    session = ChatSession(model, processor, max_new_tokens=NEW_TOKENS, do_sample=False)
    said = "".join(session.stream(TEXT, first))
    messages = [question(TEXT, *first) if first else {"role": "user", "content": TEXT}]
    messages += [{"role": "assistant", "content": said}, question("and this ?", drawing(1))]
    logits = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0, -1].clone()) and None)
    try:
        list(session.stream("and this ?", [drawing(1)]))
        mine, logits[:] = list(logits), []
        answer(model, processor, messages)
    finally:
        hook.remove()
    for one, other in zip(mine, logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def answering():
    return [thread for thread in threading.enumerate() if thread.name == "hf_xattn answer"]


def ends(timeout=20):
    until = time.monotonic() + timeout
    while answering() and time.monotonic() < until:
        time.sleep(0.01)
    return not answering()


@pytest.mark.parametrize("way", ["close", "event"])
def test_a_stream_that_is_not_wanted_ends(way, model, processor):
    """A thread that generates for a closed tab."""
    session = ChatSession(model, processor, max_new_tokens=50, do_sample=False)
    whole = "".join(session.stream(TEXT, [drawing(0)]))
    session.clear()
    stop = threading.Event()
    calls = []
    hook = model.lm_head.register_forward_hook(lambda *_: (calls.append(1), time.sleep(0.05)) and None)
    try:
        pieces = session.stream(TEXT, [drawing(0)], stop)
        begun = next(pieces)
        if way == "close":
            pieces.close()
        else:
            stop.set()
            begun += "".join(pieces)
        assert ends()
    finally:
        hook.remove()
    assert len(calls) < 20
    text = session.answers[-1].text
    assert whole.startswith(text) and text.startswith(begun.strip()) and len(text) < len(whole)
    # What follows continues the conversation with the part that was said.
    said = "".join(session.stream("and ?"))
    messages = [
        question(TEXT, drawing(0)),
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and ?"},
    ]
    assert said == answer(model, processor, messages, max_new_tokens=50)


def test_a_question_waits_for_the_one_before(session, model, processor):
    """Two answers at once on one cache."""
    first, second = session.stream(TEXT, [drawing(0)]), session.stream("and ?")
    begun = next(first)
    assert second is not None
    follows = []
    thread = threading.Thread(target=lambda: follows.extend(second))
    thread.start()
    said = begun + "".join(first)
    thread.join(20)
    messages = [
        question(TEXT, drawing(0)),
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and ?"},
    ]
    assert "".join(follows) == answer(model, processor, messages)


def test_errors_reach_the_reader_of_a_stream(session):
    """A stream that waits for ever for a thread that has failed."""
    with pytest.raises(TypeError, match="got int"):
        list(session.stream(TEXT, [3]))
    assert session.messages == [] and session.answers == [] and ends()
    assert "".join(session.stream(TEXT, [drawing(0)]))


def test_a_dropped_cache_changes_no_answer(session, model, processor):
    """A conversation that is forgotten with its cache."""
    first = "".join(session.stream(TEXT, [drawing(0)]))
    session.drop_cache()
    messages = [
        question(TEXT, drawing(0)),
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and ?"},
    ]
    assert "".join(session.stream("and ?")) == answer(model, processor, messages)


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 3}, {"num_beams": 3}], ids=lambda given: next(iter(given))
)
def test_a_cache_that_holds_other_tokens(options, model, processor, monkeypatch):
    """Tokens that were proposed and not taken, or those of another beam, which the next turn takes for the chat's."""
    words = ("what is it ?", "and this ?", "and this colour ?", "which is red ?")
    for end in ("in", "a", "dog", "is", "describe", None):
        stop = None if end is None else processor.tokenizer.convert_tokens_to_ids(end)
        monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
        session, messages = ChatSession(model, processor, max_new_tokens=8, do_sample=False, **options), []
        for turn, text in enumerate(words):
            images = [drawing(turn + 1)] if turn < 3 else []
            messages.append(question(text, *images) if images else {"role": "user", "content": text})
            said = session.ask(text, images)
            assert said == answer(model, processor, messages, **options), (end, turn)
            messages.append({"role": "assistant", "content": said})


def test_beams_of_the_model_beside_a_configuration(model, processor, monkeypatch):
    """A configuration without a word on beams, where `generate` takes the model's: the next turn fails."""
    monkeypatch.setattr(model.generation_config, "num_beams", 3)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    config = GenerationConfig(do_sample=False, num_beams=None)
    session = ChatSession(model, processor, max_new_tokens=NEW_TOKENS, generation_config=config)
    messages = []
    for text, images in ((TEXT, [drawing(0)]), ("and this ?", [])):
        messages.append(question(text, *images) if images else {"role": "user", "content": text})
        said = session.ask(text, images)
        assert said == answer(model, processor, messages)
        messages.append({"role": "assistant", "content": said})


def test_a_model_whose_configuration_uses_no_cache(session, model, processor, monkeypatch):
    """A checkpoint that was saved in training: a chat with it fails, or reads its text again at each step."""
    first = session.ask(TEXT, [drawing(0)])
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    again = ChatSession(model, processor, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert again.ask(TEXT, [drawing(0)]) == first and again.ask("and this ?") == session.ask("and this ?")


def test_maps_of_an_answer(session, model, processor):
    """Maps of another answer, or of the whole conversation where the first answer was asked for."""
    for text, seed in ((TEXT, 0), ("and this ?", 1)):
        list(session.stream(text, [drawing(seed)]))
    messages = [question(TEXT, drawing(0))]
    for index, given in enumerate(session.answers):
        maps = session.maps(given)
        assert maps.num_images == index + 1
        inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        expected = attention_maps(model, inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert maps.num_given == 1 and torch.equal(maps.tokens, expected.tokens[:, expected.num_given - 1 :])
        assert torch.equal(maps.tokens[0, 1:], given.ids)
        for ours, theirs in zip(maps.weights, expected.weights, strict=True):
            mean = theirs[:, :, expected.num_given - 1 :].mean(dim=1, keepdim=True)
            torch.testing.assert_close(ours, mean, atol=1e-5, rtol=1e-4)
        messages += [{"role": "assistant", "content": given.text}, question("and this ?", drawing(1))]
    list(session.stream("and ?"))
    assert session.answers[-1].num_images == 2


def test_maps_without_images(session):
    """A map of nothing."""
    list(session.stream(TEXT))
    assert session.answers[0].num_images == 0
    with pytest.raises(ValueError, match="needs images"):
        session.maps(session.answers[0])


def test_words_of_an_answer(session):
    """Words whose tokens are another word's."""
    list(session.stream(TEXT, [drawing(0)]))
    given = session.answers[0]
    for word in given.words(session.tokenizer):
        assert session.tokenizer.decode(given.ids[word.tokens.start : word.tokens.stop]).strip() == word.text
        assert given.text[word.start :].startswith(word.text)
