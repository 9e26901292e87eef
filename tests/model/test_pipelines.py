"""Pipelines and streamers of transformers: each gives the tokens of plain `generate`."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, TextIteratorStreamer, TextStreamer, pipeline

from helpers.models.chat_models import NEW_TOKENS, answer, drawing, question


TEXT = "what is in the picture ?"
OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture(scope="module")
def parts(chat_folder):
    return AutoModelForImageTextToText.from_pretrained(chat_folder), AutoProcessor.from_pretrained(chat_folder)


@pytest.fixture(scope="module")
def pipe(chat_folder):
    return pipeline("image-text-to-text", model=str(chat_folder))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """An address on this machine that has a drawing for each seed."""
    folder = tmp_path_factory.mktemp("web")
    for seed in range(3):
        drawing(seed).save(folder / f"{seed}.png")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def new_text(records):
    return [record["generated_text"] for record in records]


def test_a_pipeline_answers_a_chat_as_generate_does(pipe, parts):
    """A chat whose image the pipeline drops; an answer that `generate` would not give."""
    answers = set()
    for images in ((drawing(0),), (drawing(1),), (drawing(0), drawing(1)), ()):
        chat = [question(TEXT, *images)]
        expected = answer(*parts, chat)
        (record,) = pipe(text=chat, return_full_text=False, generate_kwargs=OPTIONS)
        assert record["generated_text"].strip() == expected
        (record,) = pipe(text=chat, generate_kwargs=OPTIONS)
        assert record["generated_text"][-1]["role"] == "assistant"
        assert record["generated_text"][-1]["content"].strip() == expected
        answers.add(expected)
    assert len(answers) == 4


def test_a_pipeline_reads_the_image_at_an_address(pipe, parts, address):
    """An image behind a URL that is not the image at its place."""
    for seed in range(3):
        url = f"{address}/{seed}.png"
        chat = [{"role": "user", "content": [{"type": "image", "url": url}, {"type": "text", "text": TEXT}]}]
        (record,) = pipe(text=chat, return_full_text=False, generate_kwargs=OPTIONS)
        assert record["generated_text"].strip() == answer(*parts, [question(TEXT, drawing(seed))])


def test_an_image_and_a_text(pipe, parts, address):
    """The pipeline's older way to ask, without a chat."""
    model, processor = parts
    inputs = processor(images=drawing(1), text=TEXT)
    tokens = model.generate(**inputs, **OPTIONS)[0, inputs["input_ids"].shape[1] :]
    for image in (drawing(1), f"{address}/1.png"):
        (record,) = pipe(images=image, text=TEXT, return_full_text=False, generate_kwargs=OPTIONS)
        assert record["generated_text"].strip() == processor.decode(tokens, skip_special_tokens=True)
    (record,) = pipe(text="what is it ?", return_full_text=False, generate_kwargs=OPTIONS)
    inputs = processor(text="what is it ?")
    tokens = model.generate(**inputs, **OPTIONS)[0, inputs["input_ids"].shape[1] :]
    assert record["generated_text"].strip() == processor.decode(tokens, skip_special_tokens=True)


COUNTS = [((1, 1, 1), 2), ((1, 2, 1), 4), ((3, 1, 2), 2), ((0, 2, 1), 4), ((1, 0, 0), 1), ((0, 0, 0), 2)]


@pytest.mark.parametrize("counts, batch_size", COUNTS)
def test_batches_of_chats_with_different_numbers_of_images(pipe, parts, counts, batch_size):
    """torch's error of sizes; an image that the pipeline gives to another chat, or padding that a chat sees."""
    texts = [TEXT, "how many ?", "which colour ?"]
    drawings = [[drawing(10 * row + image) for image in range(count)] for row, count in enumerate(counts)]
    chats = [[question(text, *images)] for text, images in zip(texts, drawings)]
    expected = [answer(*parts, chat) for chat in chats]
    assert len(set(expected)) == len(expected)
    records = pipe(text=chats, batch_size=batch_size, return_full_text=False, generate_kwargs=OPTIONS)
    assert [text.strip() for (text,) in map(new_text, records)] == expected


def test_a_tokenizer_that_pads_behind(chat_folder, parts):
    """Answers of padded prompts: an imported Llama 3.2 Vision has such a tokenizer."""
    pipe = pipeline("image-text-to-text", model=str(chat_folder))
    pipe.tokenizer.padding_side = pipe.processor.tokenizer.padding_side = "right"
    chats = [[question(text, drawing(seed))] for seed, text in enumerate(("how many ?", f"{TEXT} {TEXT}"))]
    records = pipe(text=chats, batch_size=2, return_full_text=False, generate_kwargs=OPTIONS)
    assert [text.strip() for (text,) in map(new_text, records)] == [answer(*parts, chat) for chat in chats]
    assert pipe.tokenizer.padding_side == "right"


def test_a_text_pipeline_answers_as_generate_does(chat_folder, parts):
    """A model that answers text alone otherwise, or not at all, as a language model."""
    model, processor = parts
    pipe = pipeline("text-generation", model=str(chat_folder))
    inputs = processor(text=TEXT)
    tokens = model.generate(**inputs, **OPTIONS)[0, inputs["input_ids"].shape[1] :]
    options = {**OPTIONS, "return_full_text": False, "clean_up_tokenization_spaces": False}
    (record,) = pipe(TEXT, **options)
    assert record["generated_text"].strip() == processor.decode(tokens, skip_special_tokens=True)
    pair = pipe([TEXT, "what is it ?"], batch_size=2, **options)
    assert pair[0][0]["generated_text"] == record["generated_text"]


def test_a_streamer_shows_the_text_of_generate(parts, capsys):
    """Text that the terminal shows and `generate` does not return."""
    model, processor = parts
    chat = [question(TEXT, drawing(2))]
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    assert answer(model, processor, chat, streamer=streamer) == capsys.readouterr().out.strip()


@pytest.mark.parametrize("whole", ["processor", "tokenizer"])
def test_an_iterator_streams_the_whole_answer(parts, whole):
    """A stream from another thread that ends early, or never."""
    model, processor = parts
    expected = answer(model, processor, [question(TEXT, drawing(2))])
    decoder = processor if whole == "processor" else processor.tokenizer
    streamer = TextIteratorStreamer(decoder, skip_prompt=True, timeout=30, skip_special_tokens=True)
    ask = partial(answer, model, processor, [question(TEXT, drawing(2))], streamer=streamer)
    thread = threading.Thread(target=ask)
    thread.start()
    pieces = list(streamer)
    thread.join(30)
    assert "".join(pieces).strip() == expected and len(pieces) > 2


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "sample"])
def test_a_tokenizer_for_generate(parts, options):
    """A server hands `generate` the tokenizer, which no step of a model takes."""
    model, processor = parts
    inputs = processor(images=drawing(0), text=TEXT)
    made = []
    for tokenizer in ({}, {"tokenizer": processor.tokenizer}):
        torch.manual_seed(0)
        made.append(model.generate(**inputs, **OPTIONS | options, **tokenizer))
    assert made[0].equal(made[1])
