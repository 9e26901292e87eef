"""Many requests from many clients, some of them broken: each gets its answer or its error, and the server keeps
nothing of them.
"""

import gc
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from helpers.models.chat_models import drawing, question
from helpers.processes.model_server import TEXT, asked, openai
from helpers.references.memory_checks import STATUS, resident, tensors_alive


PICTURES = 5
BROKEN = (
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "sound", "sound": "x"}]}],
    [{"content": "who ?"}],
    [],
)


def requests(count):
    """Messages and the number of the picture that they ask about; None for broken ones, which are every tenth."""
    rng = random.Random(count)
    for number in range(count):
        if number % 10 == 9:
            yield BROKEN[number // 10 % len(BROKEN)], None
        else:
            picture = rng.randrange(PICTURES)
            yield [asked(TEXT, drawing(picture))], picture


@pytest.mark.parametrize("count, parts", [(20, 2), pytest.param(1000, 10, marks=pytest.mark.slow)], ids=["20", "1000"])
def test_requests_of_eight_clients(count, parts, served):
    """A request without an answer, an answer to another one, or a server that a broken request stops; memory that
    grows.
    """
    served.model.enable_image_store(20_000)  # less than the pictures need
    expected = [served.expected([question(TEXT, drawing(seed))]) for seed in range(PICTURES)]
    clients = [
        openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=300) for _ in range(8)
    ]
    outcomes, measured = [], []

    def send(numbered):
        number, (messages, picture) = numbered
        client, stream = clients[number % 8], number % 3 == 0
        try:
            answer = served.ask(messages, client=client, stream=stream)
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                text = answer.choices[0].message.content
        except openai.BadRequestError as error:
            return picture is None and bool(error.message)
        return picture is not None and text == expected[picture]

    work = list(enumerate(requests(count)))
    with ThreadPoolExecutor(8) as pool:
        for part in range(parts):
            outcomes += list(pool.map(send, work[part * count // parts : (part + 1) * count // parts]))
            gc.collect()
            pictures = sum(issubclass(type(thing), Image.Image) for thing in gc.get_objects())
            measured.append((*tensors_alive(), pictures, resident() if STATUS.exists() else 0))
            print(
                f"{len(outcomes)} requests: {measured[-1][0]} tensors, {measured[-1][1]:,} bytes, RSS "
                f"{measured[-1][3]:,}"
            )
    for client in clients:
        client.close()
    assert len(outcomes) == count and all(outcomes)
    first, last = measured[parts // 2 - 1], measured[-1]
    blocks = len(served.model.blocks)
    assert (
        last[0] <= first[0] + 2 * blocks * PICTURES and last[1] <= first[1] + 40_000
    )  # the store holds other pictures
    assert last[2] <= first[2] + PICTURES
    if count >= 1000:
        assert last[3] - first[3] < 500 * 16 * 2**10  # less than 16 KB a request
    assert torch.is_inference_mode_enabled() is False
    served.check_goes_on()
