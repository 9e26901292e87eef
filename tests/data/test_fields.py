"""Fields of rows, turns and parts that were dropped without a word: what they said was not learned, or not shown."""

import base64
import json

import pytest
from PIL import Image

import hf_xattn
from helpers.inputs.collator_rows import SHORT
from helpers.inputs.source_files import asked, picture, pictures_of, write_tar
from helpers.inputs.training_examples import draw
from helpers.models.template_models import CHATML, make_processor, save_chat_model
from helpers.processes.command_runs import run
from hf_xattn.data.rows import LEARNED, OF_PARTS, OF_TURNS, SHOWN, SYSTEM, WEIGHTS, keys_of_template


FAST = "--device cpu --log-steps 1000 --save-steps 1000".split()


USER, SAID = {"role": "user", "content": "how many ?"}, {"role": "assistant", "content": "three"}


def readers(tmp_path, row):
    """The two ways into training: a file of rows, and rows of Python."""

    def of_file():
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        return hf_xattn.load_rows(tmp_path / "rows.jsonl")[0]

    return of_file, lambda: hf_xattn.XAttnDataCollator(make_processor(CHATML))([row])


TURNS = [{"wieght": 0}, {"masked": True}, {"lossScale": 0}, {"step": 3}, {"from": "gpt"}]
PARTS = [{"max_pixels": 1000}, {"resized_height": 28}, {"txt": "a"}, {"width": 640}, {"fps": 2}]


@pytest.mark.parametrize("key", TURNS + PARTS, ids=lambda key: next(iter(key)))
def test_keys_that_nothing_reads(key, tmp_path):
    """An answer that is learned in spite of a mark, and a picture of another size than the row asks for."""
    user = {"role": "user", "content": [{"type": "text", "text": "how many ?", **(key if key in PARTS else {})}]}
    row = {"messages": [user, {**SAID, **(key if key in TURNS else {})}]}
    known = OF_PARTS if key in PARTS else OF_TURNS
    for read in readers(tmp_path, row):
        with pytest.raises(ValueError, match=f"Nothing reads the key '{next(iter(key))}' of ") as error:
            read()
        assert all(repr(name) in str(error.value) for name in known)
    for read in readers(tmp_path, json.loads(json.dumps(row).replace(json.dumps(next(iter(key.values()))), "null"))):
        read()  # None counts as absent


def test_keys_of_turns_of_other_forms(tmp_path):
    """A turn of LLaVA's or The Cauldron's form that is learned in spite of its mark."""
    asked = {"from": "human", "value": "a"}
    turns = {"user": "a", "assistant": "bad", "source": "x"}
    for mark in ("loss_weight", "loss_scale", "training"):
        good, bad = ({"from": "gpt", "value": text, mark: value} for text, value in (("good", 1.0), ("bad", 0.0)))
        for row in (
            {"conversations": [asked, bad, asked, good]},
            {"texts": [{**turns, mark: 0}, {**turns, "assistant": "good", mark: 1}]},
        ):
            read = readers(tmp_path, row)[0]()
            assert [message.get(mark) for message in read["messages"]] == [None, 0, None, 1]
            processor = make_processor(CHATML)
            labels = hf_xattn.XAttnDataCollator(processor)([read])["labels"][0]
            assert processor.tokenizer.decode(labels[labels != -100]) == "good<|im_end|>"
    for row in (
        {"conversations": [asked, {"from": "gpt", "value": "a", "wieght": 0}]},
        {"texts": [{**turns, "mask": 1}]},
    ):
        with pytest.raises(ValueError, match=r"Nothing reads the key '(wieght|mask)' of `messages\[1\]`"):
            readers(tmp_path, row)[0]()


def test_keys_that_templates_read(tmp_path):
    """A key that a chat template shows, refused."""
    said = {**SAID, "reasoning_content": "a", "name": "b", "tool_call_id": "c", "tool_calls": None, "annotations": []}
    for read in readers(tmp_path, {"messages": [USER, said]}):
        read()
    own = CHATML.replace("m.role +", "m.role + (m['mood'] or '') +")
    row = {"messages": [USER, {**SAID, "mood": "glad"}]}
    processor = make_processor(own)
    batch = hf_xattn.XAttnDataCollator(processor)([row])
    assert "assistantglad" in processor.tokenizer.decode(batch["input_ids"][0])
    with pytest.raises(ValueError, match="'mood'"):
        readers(tmp_path, row)[1]()
    assert {"a", "b", "c", "d"} <= keys_of_template("{{ m.a }}{{ m['b'] }}{{ m.get('c') }}{% if 'd' in m %}{{ m.x() }}")


WRONG = {
    **dict.fromkeys(("sytem", "System", "tool", "function", "vidoe", "quetsion"), "be short"),
    **dict.fromkeys(LEARNED + SHOWN, "be short"),
    **dict.fromkeys(("systemPrompt", "system-prompt"), "be short"),
    **dict.fromkeys(WEIGHTS, 0),
    "wieght": 0.5,
    "loss_scale": 0.5,
    "label": False,
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_were_meant_to_be_read(name, tmp_path):
    """A system message that is not shown, a preference learned the wrong way round, a weight dropped."""
    for read in readers(tmp_path, {**SHORT, name: WRONG[name]}):
        with pytest.raises(ValueError, match=f"`{name}`"):
            read()
    (tmp_path / "captions.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a circle", name: WRONG[name]}))
    with pytest.raises(ValueError, match=name):
        hf_xattn.load_rows(tmp_path / "captions.jsonl")[0]


def test_fields_of_public_data_sets(tmp_path):
    """A row of a known data set that is refused for a field of its own."""
    others = {
        "id": 1, "image_id": 7, "question_id": 3, "question_type": "what", "answers": ["a"], "answer_type": "other",
        "conversation_id": "x", "message_id": "y", "prompt_id": "z", "text_id": 5, "context_length": 3, "model": "m",
        "source": "s", "category": "c", "language": "en", "url": "https://a.b", "key": "0", "status": "success",
        "height": 32, "width": 32, "original_height": 64, "exif": "{}", "sha256": "f", "score": 0.5, "split": "train",
        "label": 3, "labels": [1, 2], "videoid": "v", "tests": "t", "competition": "c", "relevance_ratings": [5],
        "weight": 1, "loss": True, "history": [], "system_prompt": "", "mask": None, "tags": ["a"], "topic": "t",
    }  # fmt: skip
    for read in readers(tmp_path, {**SHORT, **others}):
        read()
    question = {"question": "a ?", "answer": "b"}
    read = readers(tmp_path, {**question, **{name: value for name, value in others.items() if name != "labels"}})[0]
    assert read()["messages"][0]["content"] == "a ?"


def test_the_field_system_in_python():
    """A column `system` that `load_rows` shows, and the collator does not."""
    processor = make_processor(CHATML)
    collate = hf_xattn.XAttnDataCollator(processor)
    expected = collate([{"messages": [{"role": "system", "content": "be short"}, USER, SAID]}])
    for row in ({"messages": [USER, SAID]}, {"prompt": [USER], "completion": [SAID]}):
        made = collate([{**row, SYSTEM: "be short"}])
        assert all((made[name] == value).all() for name, value in expected.items())


def test_pictures_by_their_index(tmp_path):
    """Parts that name the second picture first, and get the first."""
    parts = [{"type": "image", "index": index} for index in (1, 0)]
    row = {"messages": [{"role": "user", "content": parts}, SAID], "images": ["a.png", "b.png"]}
    with pytest.raises(ValueError, match=r"in the order of the column of images, got those with the `index` \[1, 0\]"):
        readers(tmp_path, row)[0]()
    parts.reverse()
    shown = readers(tmp_path, row)[0]()["messages"][0]["content"]
    assert [part["path"] for part in shown] == [str(tmp_path / name) for name in ("a.png", "b.png")]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    save_chat_model(folder)
    return folder


@pytest.mark.parametrize(
    "field",
    [
        {"media": [{"type": "image", "path": "red.png"}]},
        {"media": {"images": ["red.png"]}},
        {"meta": {"file_name": "red.png"}},
        {"address": "https://host/red.jpg?width=1"},
    ],
    ids=str,
)
def test_a_picture_inside_another_field(field, fresh, tmp_path, capsys):
    """A picture that nobody reads, in a row that becomes one of text."""
    draw("red").save(tmp_path / "red.png")
    rows = [{"file_name": "red.png", "question": "which ?", "answer": "red"}]
    rows.append({**field, "question": "which ?", "answer": "red"})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, _, error = run(capsys, "train", fresh, "--data", tmp_path, "--output", tmp_path / "out", *FAST)
    assert status != 0 and f"got it in {next(iter(field))!r}, which is not read" in error


def test_the_order_of_pictures_in_dicts(tmp_path):
    """Pictures in the order of their numbers, although the example names another."""
    members = {"0.0.png": picture("red"), "0.1.png": picture("blue")}
    names = [{"path": "0.1.png"}, {"path": "0.0.png"}]
    (row,) = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", {**members, "0.json": asked(images=names)}))
    assert pictures_of(row) == [picture("blue"), picture("red")]


@pytest.mark.parametrize("kind, key", [("text", "image"), ("text", "path"), ("text", "image_url"), ("image", "text")])
def test_a_part_with_a_text_and_a_picture(kind, key, tmp_path):
    """A part of a message that loses its picture, or its question."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    part = {"type": kind, "text": "what ?", "image": str(tmp_path / "a.png")}
    if kind == "text":
        part[key] = part.pop("image")
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "red"}]
    processor = make_processor()
    for read in (
        lambda: hf_xattn.XAttnDataCollator(processor)([{"messages": messages}]),
        lambda: processor.apply_chat_template(messages, tokenize=True, return_dict=True),
    ):
        with pytest.raises(ValueError, match=f"a part of type '{kind}' with `{key}` in it. Write two parts"):
            read()


def test_a_part_with_two_pictures(tmp_path):
    """The second of two names of a picture in a part, which is dropped."""
    part = {"type": "image", "image": "a.png", "path": "b.png"}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "red"}]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(ValueError, match="expected one image in a part, got 2"):
        hf_xattn.load_rows(tmp_path / "metadata.jsonl")[0]


def test_images_as_data_urls_and_base64_are_read(tmp_path):
    """A picture as a data URL or as base64, and a `file://` address with a blank: rows that are refused."""
    content = picture("red")
    (tmp_path / "a b.png").write_bytes(content)
    text = base64.b64encode(content).decode()
    address = f"data:image/png;base64,{text}"
    parts = [{"type": "image", "base64": text}, {"type": "image_url", "image_url": {"url": address}}]
    forms = [asked(image=address), asked(images=[{"bytes": None, "path": address}])]
    forms += [
        json.dumps(
            {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "red"}]}
        ).encode()
        for part in parts
    ]
    forms += [asked(image=(tmp_path / "a b.png").as_uri()), asked(image=f"file://localhost{tmp_path}/a%20b.png")]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(forms))
    collator, rows = hf_xattn.XAttnDataCollator(make_processor()), hf_xattn.load_rows(tmp_path / "rows.jsonl")
    expected = make_processor()(images=content)["pixel_values"]
    for row in rows:
        assert (collator([row])["pixel_values"] == expected).all()
    for wrong in ("data:image/png;base64,no!", "data:image/png,abc"):
        (tmp_path / "rows.jsonl").write_bytes(asked(image=wrong))
        with pytest.raises(ValueError, match="expected an image "):
            hf_xattn.load_rows(tmp_path / "rows.jsonl")[0]


@pytest.mark.parametrize("name", ["id", "image_id", "__key__", "sample_uuid"])
def test_an_id_that_looks_like_a_picture(name, tmp_path):
    """A row without a picture that is refused for its number."""
    (tmp_path / "a.jsonl").write_bytes(asked(**{name: "x/000.jpg"}))
    assert hf_xattn.load_rows(tmp_path / "a.jsonl")[0]["messages"][0]["content"] == "what colour ?"
    (tmp_path / "a.jsonl").write_bytes(asked(scene="x/000.jpg"))
    with pytest.raises(ValueError, match="got it in 'scene', which is not read"):
        hf_xattn.load_rows(tmp_path / "a.jsonl")[0]
