"""What a server may read or obey only in part: `hf-xattn serve` obeys it, or refuses it with a sentence."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from huggingface_hub.utils import httpx

from helpers.processes.model_server import TEXT, Served


CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def served(chat_folder):
    served = Served(chat_folder, "whole", max_new_tokens=40)
    yield served
    served.stop()


def post(served, **fields):
    return httpx.post(served.address + CHAT, json={"messages": [USER], "max_tokens": 3, **fields}, timeout=60)


def done(served, **fields):
    answer = post(served, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def read(served, *messages):
    """The number of tokens of a prompt: what of the messages has reached it."""
    return done(served, messages=list(messages))["usage"]["prompt_tokens"]


def config(**fields):
    return {"generation_config": json.dumps(fields)}


def test_what_is_drawn(served):
    """A temperature without an effect on a model that takes the likeliest token by itself; one that is obeyed where the
    client wants the likeliest.
    """
    greedy = served.text([USER], max_tokens=20)
    for fields in ({"temperature": 2.0}, {"top_p": 1.0}, config(temperature=2.0, top_k=50), config(top_p=1.0)):
        said = {
            served.text([USER], **({"temperature": None, "max_tokens": 20} | self_seeded(fields, seed)))
            for seed in (1, 2)
        }
        assert len(said - {greedy}) == 2, fields
    for fields in (config(do_sample=False, temperature=2.0), {"temperature": 0.0, "top_p": 1.0}, config(temperature=0)):
        assert served.text([USER], **({"temperature": None, "max_tokens": 20} | self_seeded(fields, 1))) == greedy
    refused = post(served, temperature=2.0, **config(do_sample=False))
    assert refused.status_code == 400 and "`temperature`" in refused.json()["error"]["message"]


def self_seeded(fields, seed):
    """Fields that OpenAI's client does not know go into its `extra_body`."""
    own = {name: value for name, value in fields.items() if name == "generation_config"}
    return {**{name: value for name, value in fields.items() if name not in own}, "seed": seed, "extra_body": own}


def test_seeds_of_requests_that_wait(served):
    """An answer that depends on the requests in front of it."""

    def ask(_):
        fields = {"seed": 7, "temperature": 1.5, "max_tokens": 20}
        return done(served, **fields)["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as clients:
        assert len(set(clients.map(ask, range(8)))) == 1


def test_the_length_that_the_model_has_anyway(served):
    """A length that is forgotten because it is the model's own."""
    own = served.model.generation_config
    own.max_new_tokens = 4
    try:
        for length in (4, 5):
            body = {"messages": [USER], **config(max_new_tokens=length)}
            usage = httpx.post(served.address + CHAT, json=body, timeout=60).json()["usage"]
            assert usage["completion_tokens"] == length
    finally:
        own.max_new_tokens = None


def test_the_end_of_the_context(served):
    """A prompt that is longer than the model can read, and an answer that goes on behind its end."""
    longest = served.model.config.get_text_config().max_position_embeddings
    short = read(served, {"role": "user", "content": "a"})
    for stream in (False, True):
        long = {"role": "user", "content": "a " * longest}
        refused = post(served, messages=[long], stream=stream)
        assert refused.status_code == 400 and f"fewer than {longest} tokens" in refused.json()["error"]["message"]
    nearly = {"role": "user", "content": "a " * (longest - short - 1)}
    answer = done(served, messages=[nearly], max_tokens=40)
    assert answer["usage"]["total_tokens"] == longest and answer["choices"][0]["finish_reason"] == "length"
