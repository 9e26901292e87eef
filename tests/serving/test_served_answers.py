"""What a client of `hf-xattn serve` may ask of an answer: bounds of the operator, sentences for what is refused, stop
strings.
"""

import itertools
import json
import random

import pytest
import torch
from transformers import GenerationConfig

from helpers.models.chat_models import NEW_TOKENS, drawing
from hf_xattn.commands.main import main


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from huggingface_hub.utils import httpx

from helpers.processes.model_server import TEXT, Served, asked
from hf_xattn.serving import served_requests
from hf_xattn.serving.answering import _Pieces, place_of_stop, shown_length
from hf_xattn.serving.request_limits import ServerLimits


CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def served(chat_folder):
    served = Served(chat_folder, "bounded", max_new_tokens=40, max_beams=3)
    yield served
    served.stop()


def body_of(**fields):
    return {"messages": [USER], "max_tokens": 3, **fields}


def post(served, body):
    return httpx.post(served.address + CHAT, json=body, timeout=60)


def check_refused(answer, *words):
    """A sentence in OpenAI's form, not an error of Python."""
    assert answer.status_code == 400, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and 20 < len(error["message"]) < 600
    assert not error["message"].startswith(("TypeError", "KeyError", "AttributeError", "IndexError", "UndefinedError"))
    assert all(word in error["message"] for word in words), error["message"]


def config(**fields):
    return {"generation_config": json.dumps(fields)}


WRONG_CONFIGS = {
    "num_beams": [4, 100_000, 0, -1, 2.5, True, "2", [2]],
    "max_new_tokens": [41, 10**9, 10**30, 0, -1, 1.5, "9", False],
    "min_new_tokens": [41, -1],
    "do_sample": [1, "yes"],
    "early_stopping": ["always", 3],
    "length_penalty": [11, -11, "a"],
    "temperature": [2.5, -1, "hot", True, 10**400, 1e-45],
    "top_k": [-1, 2.5, 10**9],
    "top_p": [5, -0.1],
    "min_p": [5],
    "typical_p": [0, 2],
    "epsilon_cutoff": [-1],
    "eta_cutoff": [2],
    "repetition_penalty": [0, -1, 100],
    "no_repeat_ngram_size": [-1, 101, 1.5],
    "stop_strings": ["", [""], [3], 3, ["a"] * 1000, "a" * 1000, {}],
}


@pytest.mark.parametrize("field", WRONG_CONFIGS)
def test_bounds_of_generation_config(served, field):
    """Three gigabytes and half a minute of everybody's time for one request."""
    for value in WRONG_CONFIGS[field]:
        check_refused(post(served, body_of(**config(**{field: value}))), f"generation_config.{field}")


def test_no_other_field_of_a_generation_config(served):
    """A field that nobody has thought of: another cache, a file as an assistant, hidden states in the memory of the
    server.
    """
    known = served_requests._config_fields(ServerLimits())
    others = sorted(set(GenerationConfig().to_dict()) - set(known) - {"transformers_version", "_from_model_config"})
    assert len(others) > 30 and {"cache_implementation", "num_return_sequences", "max_length"} <= set(others)
    for field in (*others, "a_field_of_a_later_release", "tokenizer", "assistant_model", "streamer"):
        check_refused(post(served, body_of(**config(**{field: 7}))), f"got '{field}'", "num_beams")
    for text in ("[1]", "{", '"a"', "3", "[" * 100_000, {"num_beams": 100_000}, [], 3, ""):
        check_refused(post(served, body_of(generation_config=text)), "generation_config")


def test_what_the_model_has_anyway(served):
    """A client that sends the configuration of the model back, as the documentation of transformers shows, and is
    refused.
    """
    own = served.model.generation_config
    for text in (
        own.to_json_string(),
        own.to_json_string(use_diff=False),
        GenerationConfig(num_beams=2).to_json_string(),
    ):
        answer = post(served, body_of(generation_config=text))
        assert answer.status_code == 200, answer.text
    check_refused(post(served, body_of(**config(eos_token_id=7, pad_token_id=8))), "'eos_token_id'")


def test_values_within_bounds(served):
    """A value that is allowed, and fails; an answer that is not what `generate` gives for it."""
    fields = {
        "num_beams": 3,
        "max_new_tokens": 9,
        "length_penalty": 0.5,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
    }
    text = post(served, {"messages": [USER], **config(**fields)}).json()["choices"][0]["message"]["content"]
    assert text == expected(served, **{**fields, "max_new_tokens": 9}) != expected(served, max_new_tokens=9)
    warpers = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}
    edges = [{"top_k": 0}, {"top_p": 0}, {"top_p": 1}, {"min_p": 1}, {"typical_p": 1}, {"repetition_penalty": 10}]
    edges += [{"epsilon_cutoff": 1}, {"eta_cutoff": 1}, {"temperature": 0}, {"temperature": 2}, {"temperature": 0.01}]
    for stream, each in itertools.product((False, True), ({**warpers, "temperature": 0.5}, *edges)):
        answer = post(served, body_of(stream=stream, **config(do_sample=True, **each)))
        assert answer.status_code == 200 and '"error"' not in answer.text, (each, answer.text)
    check_refused(post(served, body_of(stream=True, **config(num_beams=2))), "num_beams", "stream")


def test_a_model_that_searches_with_beams_by_itself(served, monkeypatch):
    """A refusal of every request, or more beams than the operator allows."""
    monkeypatch.setattr(served.model.generation_config, "num_beams", 2)
    body = {"messages": [USER], **config(do_sample=False, max_new_tokens=9)}
    text = post(served, body).json()["choices"][0]["message"]["content"]
    assert text == expected(served, num_beams=2, max_new_tokens=9)
    check_refused(post(served, {**body, "stream": True}), "num_beams", "stream")
    monkeypatch.setattr(served.model.generation_config, "num_beams", 100)
    assert post(served, body).json()["choices"][0]["message"]["content"] == expected(
        served, num_beams=3, max_new_tokens=9
    )


def expected(served, **options):
    from helpers.models.chat_models import answer, question

    return answer(served.reference, served.processor, [question(TEXT)], **options)


def test_the_default_length(served):
    """An answer without a length that is longer than the operator allows."""
    for fields in ({}, config(do_sample=False)):
        answer = post(served, {"messages": [USER], **fields}).json()
        assert answer["usage"]["completion_tokens"] == 40 and answer["choices"][0]["finish_reason"] == "length"


SAMPLING = {
    "temperature": [2.5, -1, "0.5", True, [1], 1e-45],
    "top_p": [5, -1, "a", {}],
    "seed": ["a", 2**70, 1.5, -(2**64)],
}
WRONG = {
    **SAMPLING,
    "max_tokens": [0, -3, 41, 10**9, "a", 1.5, True],
    "max_completion_tokens": [0, 10**9],
    "frequency_penalty": [-1, 1, 3, "a"],
    "generation_config": ["{", [], 3],
    "stop": ["", [""], [3], 3, ["a"] * 1000, "a" * 1000, {"a": "b"}],
    "logit_bias": [{"a": 1}, {"5": 1000}, {"5": "a"}, {"-1": 1}, {"100000": 1}, {"٣": 1}, [], "a", {str(n): 1 for n in range(999)}],  # noqa: E501
    "stream": ["yes", 1, []],
    "n": [2, 0, "a"],
    "chat_template_kwargs": [[], "a", {"a": 1}],
    "messages": [
        None,
        [],
        {},
        "a",
        [3],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": {}}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "wizard", "content": "a"}],
        [{"role": None, "content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [{"role": 3, "content": "a"}],
        [{"role": "User", "content": "a"}],
        [USER, {"role": "assistant", "content": None}],
        [USER, {"role": "assistant", "content": None, "tool_calls": []}],
        [USER, {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "look"}}]}],
        [USER, {"role": "tool", "content": "a", "tool_call_id": "1"}],
        [USER, {"role": "assistant", "content": "a", "refusal": "no"}],
        [USER, {"role": "assistant", "content": "a", "audio": {"id": "1"}}],
        [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
        [USER, {"role": "assistant", "content": "a", "function_call": {"name": "look", "arguments": "{}"}}],
    ],
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_table_of_wrong_values(served, field):
    """A value that stops the server, takes its memory, is passed over, or is answered with an error of Python or
    without words.
    """
    for value, stream in itertools.product(WRONG[field], (False, True)):
        check_refused(post(served, {**body_of(), "stream": stream, field: value}))
    assert post(served, body_of()).status_code == 200


def test_a_seed_is_of_one_request(served):
    """A request that decides what later requests, without a seed, are answered."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = (
        post(served, body_of(seed=7, temperature=1.5, max_tokens=20)).json()["choices"][0] for _ in range(2)
    )
    assert first == again and torch.equal(torch.get_rng_state(), before)
    post(served, body_of(temperature=1.5))
    assert not torch.equal(torch.get_rng_state(), before)


def test_what_stays_allowed(served):
    """A conversation of a real client that is refused: defaults are written out, null stands for what is not set."""
    turns = [
        {"role": "developer", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {"role": "assistant", "content": "a dog", "name": "one"},
        USER,
    ]
    unset = dict.fromkeys(
        ("temperature", "top_p", "stop", "seed", "generation_config", "chat_template_kwargs", "stream")
    )
    for fields in ({}, unset, {"stop": []}, {"logit_bias": {}}, {"logit_bias": {"5": -100, "6": 1.5}}, {"seed": 2**62}):
        answer = post(served, body_of(messages=turns, **fields))
        assert answer.status_code == 200, (fields, answer.text)


# --- stop strings


def pieces(text, seed):
    """A text in pieces, as tokens come."""
    rng = random.Random(seed)
    while text:
        cut = rng.randint(1, 4)
        yield text[:cut]
        text = text[cut:]


def test_stops_that_are_split_over_pieces():
    """A beginning of a stop string that is shown before the rest comes; text that is held back for ever; the wrong one
    of two.
    """
    alphabet = "ab<"
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 12)))
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]

        # A model stops at the first piece that completes a stop string, so what comes behind that piece is not seen.
        seen, shown = "", 0
        for piece in pieces(text, seed):
            seen += piece
            assert seen[: place_of_stop(seen, stops)][:shown] == seen[:shown], "it was shown too early"
            assert shown <= shown_length(seen, stops), "it is taken back"
            shown = shown_length(seen, stops)
            if (place := place_of_stop(seen, stops)) is not None:
                assert shown == place
                break
            rest = seen[shown:]
            assert not rest or any(stop.startswith(rest) for stop in stops), "it is held back for nothing"


def test_a_stream_is_the_whole_answer(served):
    """A character of several tokens that is cut or lost, also at the end."""
    tokenizer = served.processor.tokenizer
    given = []
    streamer = _Pieces(tokenizer, [], given.append)
    ids = tokenizer("a red circle ? a dog", add_special_tokens=False)["input_ids"]
    streamer.put(torch.tensor([[5, 6]]))  # the prompt
    for each in ids:
        streamer.put(torch.tensor([each]))
    streamer.finish(tokenizer.decode(ids))
    assert len(given) > 3 and "".join(given) == tokenizer.decode(ids)


def test_stops_are_not_part_of_the_answer(served):
    """An answer that ends with the string it should end before, or with a part of it; a stop string within a word, or
    over two words.
    """

    def ask(stream=False, **fields):
        answer = post(served, body_of(max_tokens=NEW_TOKENS, temperature=0, stream=stream, **fields))
        assert answer.status_code == 200, answer.text
        if not stream:
            (choice,) = answer.json()["choices"]
            return choice["message"]["content"]
        *lines, end = filter(None, answer.text.splitlines())
        assert end == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        parts = [chunk["choices"][0] for chunk in chunks]
        return "".join(part["delta"].get("content") or "" for part in parts)

    whole = ask()
    words = whole.split()
    assert len(words) > 3 and ask(stream=True) == whole
    stops = [
        words[1],
        words[0],
        words[2][-1],
        f"{words[1]} {words[2]}",
        f"{words[0][-1]} {words[1][0]}",
        "no such text",
        whole,
    ]
    for stop in (*stops, [words[2], words[1]], ["zzz", f"{words[2]} {words[3]}"]):
        place = place_of_stop(whole, [stop] if isinstance(stop, str) else stop)
        for stream in (False, True):
            assert ask(stream=stream, stop=stop) == whole[:place], (stop, stream)
    assert ask(**config(stop_strings=[words[1]], max_new_tokens=NEW_TOKENS)) == whole[: whole.index(words[1])]


def test_generation_ends_at_a_stop(served):
    """A model that goes on to the end of its length behind a stop string: alone, as a stream and with beams."""
    body = body_of(max_tokens=40, temperature=0)
    words = post(served, body).json()["choices"][0]["message"]["content"].split()
    for stop in (words[1], f"{words[1]} {words[2]}"):
        done = post(served, {**body, "stop": stop}).json()
        streamed = {**body, "stop": stop, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, usage, _ = filter(None, post(served, streamed).text.splitlines())
        last, usage = (json.loads(each.removeprefix("data: ")) for each in (last, usage))
        for each in (done, {**usage, "choices": last["choices"]}):
            assert each["usage"]["completion_tokens"] < 10 and each["choices"][0]["finish_reason"] == "stop"
    beams = {"messages": [USER], **config(num_beams=3, max_new_tokens=40, do_sample=False)}
    stop = post(served, beams).json()["choices"][0]["message"]["content"].split()[1]
    done = post(served, {**beams, "stop": stop}).json()
    assert done["usage"]["completion_tokens"] < 40 and stop not in done["choices"][0]["message"]["content"]


def test_special_tokens_stop(served):
    """A model that does not know its own end, and a client that names it: no special token stands in a text."""
    tokenizer = served.processor.tokenizer
    body = body_of(max_tokens=40, temperature=0)
    end = tokenizer.eos_token
    biased = {**body, "logit_bias": {str(tokenizer.eos_token_id): 100}, "stop": end}
    done = post(served, biased).json()
    assert done["usage"]["completion_tokens"] == 1 and done["choices"][0]["message"]["content"] == ""


def test_options_of_serve_become_limits_of_answers(chat_folder, monkeypatch, capsys):
    """Options without effect, or bounds that no request meets."""
    from hf_xattn.serving import serving

    for option in ("--max-new-tokens", "--max-beams", "--max-images", "--max-request-megapixels", "--max-requests"):
        with pytest.raises(SystemExit):
            main(["serve", str(chat_folder), option, "0"])
        assert f"{option}: invalid int of at least 1" in capsys.readouterr().err
    given, build_app = [], serving.build_app
    monkeypatch.setattr(serving, "build_app", lambda *arguments: given.append(arguments[-1]) or build_app(*arguments))
    monkeypatch.setattr(serving.Server, "run", lambda *_, **__: None)
    set_all = {"--max-new-tokens": 5, "--max-beams": 2, "--max-images": 3, "--max-request-megapixels": 4}
    set_all |= {"--max-requests": 6, "--max-image-mib": 7, "--max-request-mib": 8}
    every = [str(each) for option in set_all.items() for each in option]
    for options in ((), every, ("--fetch-images",), ("--private-addresses",)):
        assert main(["serve", str(chat_folder), "--port", "0", *options]) == 0
    assert given[0] == ServerLimits() and not (given[0].fetch or given[0].private_addresses)
    assert given[1] == ServerLimits(7 * 2**20, 8 * 2**20, 3, 4 * 10**6, 6, 5, 2)
    assert given[2] == ServerLimits(fetch=True) and given[3] == ServerLimits(fetch=True, private_addresses=True)


def test_others_are_answered_meanwhile(served):
    """One request that takes the server's memory and time from all others."""
    for fields in (config(num_beams=100_000), {"max_tokens": 10**9}, {"stop": ["a"] * 1000}, {"top_p": 5}):
        check_refused(post(served, body_of(**fields)))
    assert served.text([asked(TEXT, drawing(5))], max_tokens=3)
