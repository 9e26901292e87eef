"""Sources of rows: every kind of file gives the same rows, and none is lost, changed or taken for another."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
from PIL import Image

import hf_xattn
from helpers.inputs.data_sources import content, llava, questions, write_all, write_pictures
from helpers.inputs.training_examples import COLOURS
from helpers.models.template_models import make_chat_model, make_processor
from hf_xattn.data.pictures import digest_of, picture_of, picture_parts


COUNT = 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("sources"), COUNT)


def said(row):
    """The texts of a row, and the SHA-256 of its pictures."""
    texts = []
    for message in row["messages"]:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
        texts.append((message["role"], *parts))
    return texts, [digest_of(picture_of(part)) for part in picture_parts(row)]


@pytest.mark.parametrize("kind", ["folder", "llava", "parquet", "tar", "saved", "repository"])
def test_every_kind_gives_the_same_rows(kind, sources):
    """A question with another answer or picture, a row too many, and a place that errors name wrongly."""
    rows = hf_xattn.load_rows(sources[kind])
    assert len(rows) == COUNT
    for index, (colour, question, answer) in enumerate(questions(COUNT)):
        texts, pictures = said(rows[index])
        assert texts == [("user", question), ("assistant", answer)]
        assert pictures == ([] if colour is None else [digest_of(content(colour))])
    first = {"folder": "line 1", "llava": "object 0", "tar": "sample 000000"}.get(kind, "row 0")
    assert rows.place_of(0)[1] == first and str(COUNT - 1) not in rows.place_of(0)[1]
    assert [said(row) for row in pickle.loads(pickle.dumps(rows))[3:6]] == [said(rows[index]) for index in (3, 4, 5)]
    with pytest.raises(IndexError):
        rows[COUNT]


def test_a_batch_is_the_same_from_bytes_and_from_files(sources):
    """Pixels that differ because a picture came as bytes."""
    collator = hf_xattn.XAttnDataCollator(make_processor())
    batches = [collator(hf_xattn.load_rows(sources[kind])[:4]) for kind in ("folder", "tar", "parquet", "saved")]
    for batch in batches[1:]:
        assert batch.keys() == batches[0].keys()
        assert all((batch[name] == value).all() for name, value in batches[0].items())


def test_trl_takes_the_rows_as_they_are(sources, tmp_path):
    """Rows that TRL's trainer refuses, changes, or reads all at once."""
    for kind in ("llava", "tar"):
        rows = hf_xattn.load_rows(sources[kind])
        made = rows.as_dataset()
        assert len(made) == COUNT
        assert [said(made[index]) for index in (0, 2, 19)] == [said(rows[index]) for index in (0, 2, 19)]
    trl = pytest.importorskip("trl")
    processor = make_processor()
    model = make_chat_model(processor)
    settings = {"skip_prepare_dataset": True}
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=2, report_to="none", bf16=False, use_cpu=True, save_strategy="no",
        remove_unused_columns=False, dataset_kwargs=settings,
    )  # fmt: skip
    collator = hf_xattn.XAttnDataCollator(processor)
    trainer = trl.SFTTrainer(model, arguments, collator, made, processing_class=processor)
    assert trainer.train().global_step == 2


def test_several_sources_and_weights(sources):
    """Rows of the second source that are taken for those of the first; a weight that is part of the name."""
    rows = hf_xattn.load_rows([f"{sources['folder']}:0.5", sources["tar"]])
    assert len(rows) == 2 * COUNT and [source.weight for source in rows.sources] == [0.5, 1.0]
    assert rows.source_of(COUNT - 1) == str(sources["folder"]) and rows.source_of(COUNT) == sources["tar"]
    assert said(rows[COUNT + 3]) == said(rows[3])
    with pytest.raises(ValueError, match="Expected a weight above 0"):
        hf_xattn.load_rows(f"{sources['folder']}:0")


def test_every_row_is_in_one_part_of_a_split(sources):
    """A row in both parts, or in none."""
    rows = hf_xattn.load_rows([sources["parquet"], sources["folder"]])
    kept, taken = rows.split([0, 7, 8, 9, 10, 11, 25, 39])
    again, more = kept.split([0, 31])
    assert [said(row) for row in taken] == [said(rows[index]) for index in (0, 7, 8, 9, 10, 11, 25, 39)]
    assert len(kept) == 32 and [said(row) for row in more] == [said(rows[1]), said(rows[38])]
    left = [index for index in range(40) if index not in (0, 7, 8, 9, 10, 11, 25, 39, 1, 38)]
    assert [said(row) for row in again] == [said(rows[index]) for index in left]


def one(tmp_path, example, name="rows.jsonl"):
    write_pictures(tmp_path)
    (tmp_path / name).write_text(json.dumps(example) if name.endswith("l") else json.dumps([example]))
    return hf_xattn.load_rows(tmp_path / name)


@pytest.mark.parametrize(
    "example, expected",
    [
        # markers are places of pictures, with the space around them
        (
            {
                "images": ["red.png", "blue.png"],
                "conversations": [
                    {"from": "system", "value": "be short"},
                    {"from": "human", "value": "is <image>\nlike <image>?"},
                    {"from": "gpt", "value": "no"},
                    {"from": "human", "value": "why ?"},
                    {"from": "gpt", "value": "colours"},
                ],
            },
            [["be short"], ["is ", "red.png", "\nlike ", "blue.png", "?"], ["no"], ["why ?"], ["colours"]],
        ),
        # ShareGPT's, with the system message in a field, and names of OpenAI
        (
            {
                "system": "be short",
                "tools": "",
                "conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
            },
            [["be short"], ["hi"], ["yes"]],
        ),
        ({"system": "be short", "question": "a ?", "answer": "b"}, [["be short"], ["a ?"], ["b"]]),
        ({"system": "be short", "prompt": [{"role": "user", "content": "a ?"}], "completion": [{"role": "assistant", "content": "b"}]}, [["be short"], ["a ?"], ["b"]]),  # noqa: E501
        # pictures without markers come first
        (
            {
                "image": "red.png",
                "conversations": [{"from": "human", "value": "what ?"}, {"from": "gpt", "value": "red"}],
            },
            [["red.png", "what ?"], ["red"]],
        ),
        (
            {"messages": [{"role": "user", "content": "<image>what ?"}, {"role": "assistant", "content": "red"}], "images": ["red.png"]},  # noqa: E501
            [["red.png", "what ?"], ["red"]],
        ),
        # The Cauldron
        (
            {"images": ["red.png"], "texts": [{"user": "a ?", "assistant": "b", "source": "x"}, {"user": "c ?", "assistant": "d"}]},  # noqa: E501
            [["red.png", "a ?"], ["b"], ["c ?"], ["d"]],
        ),
        ({"image": "red.png", "caption": "a circle", "width": 32}, [["red.png", "Describe the image."], ["a circle"]]),
        ({"image": "red.png", "caption": "a circle ", "text": "a circle"}, [["red.png", "Describe the image."], ["a circle"]]),  # noqa: E501
        # a picture in a part, and a name that nothing reads beside it
        ({"id": "1.jpg", "messages": [{"role": "user", "content": [{"type": "image", "path": "red.png"}]}, {"role": "assistant", "content": "red"}]}, [["red.png"], ["red"]]),  # noqa: E501
    ],
)  # fmt: skip
def test_every_form_of_an_example_becomes_its_chat(example, expected, tmp_path):
    """A picture at another place of the chat, a turn that is lost, or an answer that is taken for a question."""
    row = one(tmp_path, example)[0]
    found = []
    for message in row.get("messages") or row["prompt"] + row["completion"]:
        parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        found.append([Path(part["path"]).name if "path" in part else part["text"] for part in parts])
    assert found == expected


@pytest.mark.parametrize(
    "example, words",
    [
        ({"image": "red.png", "conversations": [{"from": "human", "value": "<image><image> ?"}, {"from": "gpt", "value": "a"}]}, "2 image part"),  # noqa: E501
        ({"conversations": [{"from": "human", "value": "<image> ?"}, {"from": "gpt", "value": "a"}]}, "has no image for it"),  # noqa: E501
        ({"conversations": [{"from": "robot", "value": "?"}]}, "turn 0 of `conversations` to have `from`"),
        ({"conversations": []}, "list of turns that is not empty"),
        ({"texts": [{"user": "a"}]}, "turn 0 of `texts` to have `user` and `assistant`"),
        ({"image": "red.png", "text": "a", "question": "b", "answer": "c"}, "fields of one of"),
        ({"imagee": "red.png", "question": "b", "answer": "c"}, "`imagee`, which is not read. Did you mean `images`?"),
        ({"img_path": "red.png", "question": "b", "answer": "c"}, "got it in 'img_path', which is not read: 'red.png'"),
        ({"shots": ["a.b", "red.PNG"], "question": "b", "answer": "c"}, "got it in 'shots', which is not read"),
        ({"system": ["be short"], "question": "b", "answer": "c"}, "'system' must be a text, got ['be short']"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}]}, "one in 'messages' and the field 'system'"),
        ({"image": "red.png", "file_name": "blue.png", "text": "a"}, "got both 'file_name' and 'image'"),
        ({"image": "https://a.b/c.png", "text": "a"}, "expected images as files, got the web address"),
        ({"image": 3, "text": "a"}, "names of files, got [3]"),
        ({"question": "b", "answer": 3}, "'answer' must be a text"),
        ({"question": "b", "answer": "c", "tools": [{"name": "f"}]}, "`tools`"),
    ],
)  # fmt: skip
def test_examples_that_are_refused(example, words, tmp_path):
    """A row that is trained on without its picture, or with the picture of another place."""
    rows = one(tmp_path, example, "rows.json")
    with pytest.raises(ValueError) as error:
        rows[0]
    assert words in str(error.value) and "rows.json, object 0: " in str(error.value)


def test_json_in_every_layout(tmp_path):
    """An array whose objects are found at a wrong byte: characters of several bytes, brackets in texts, long objects
    that lie over the ends of what is read at once, and any white space.
    """
    texts = ["a", "ü€🤗", '}],[{"', "\\", "x" * 3_000_000, "a\u2028b", 'end "quoted"', "{" * 50]
    rows = [{"question": f"{index} ?", "answer": text} for index, text in enumerate(texts * 80)]
    for row in rows[24:]:  # three long ones are enough
        row["answer"] = row["answer"][:100]
    for name, options in (("flat", {}), ("indented", {"indent": 2}), ("escaped", {"separators": (",", ":")})):
        path = tmp_path / f"{name}.json"
        path.write_bytes(
            b"\xef\xbb\xbf  " + json.dumps(rows, ensure_ascii=name == "escaped", **options).encode() + b"\n"
        )
        found = hf_xattn.load_rows(path)
        assert len(found) == len(rows)
        for index in (*range(24), *range(0, 640, 37), 639):
            assert found[index]["messages"][1]["content"] == rows[index]["answer"], (name, index)


def test_lines_that_are_broken(tmp_path):
    """A line that is not JSON and hides those behind it; a line number that counts no empty lines."""
    (tmp_path / "rows.jsonl").write_bytes(
        b'\xef\xbb\xbf\n{"question": "a", "answer": "b"}\r\n\n{"question"\n"\xff"\n{"question": "a", "answer": "c"}'
    )
    rows = hf_xattn.load_rows(tmp_path / "rows.jsonl")
    assert [rows.place_of(index)[1] for index in range(4)] == ["line 2", "line 4", "line 5", "line 6"]
    assert said(rows[0])[0][1] == ("assistant", "b") and said(rows[3])[0][1] == ("assistant", "c")
    for index, words in ((1, "line 4: broken JSON"), (2, "line 5: expected UTF-8, got the byte 0xff")):
        with pytest.raises(ValueError, match=words):
            rows[index]
    (tmp_path / "cut.json").write_text(json.dumps([{"question": "a", "answer": "b"}] * 3)[:-20])
    with pytest.raises(ValueError, match="cut.json holds an array of JSON that cannot be read: object 2"):
        hf_xattn.load_rows(tmp_path / "cut.json")
    (tmp_path / "bytes.json").write_bytes(b'[{"question": "a", "answer": "\xff"}]')
    with pytest.raises(ValueError, match="bytes.json holds an array of JSON that cannot be read: .* byte 0xff"):
        hf_xattn.load_rows(tmp_path / "bytes.json")


def test_tar_shards_are_read_whatever_wrote_them(tmp_path):
    """Names that stand outside the header, folders between files, several pictures of a sample in another order, and
    files of another kind.
    """
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        path = tmp_path / f"{form}.tar"
        long = f"folder/{'d' * 90}/n" if form == tarfile.USTAR_FORMAT else f"folder/{'n' * 120}"
        with tarfile.open(path, "w", format=form) as tar:
            tar.add(tmp_path, "folder", recursive=False)
            for name, data in (
                (f"{long}.1.png", content("red")),
                (f"{long}.0.png", content("blue")),
                (f"{long}.txt", b" two circles "),
                ("b.jpeg", b"no picture"),
                ("b.json", b'{"question": "a", "answer": "b"}'),
                ("b.cls", b"7"),
                ("c.json", b"[]"),
            ):
                about = tarfile.TarInfo(name)
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
        rows = hf_xattn.load_rows(path)
        assert len(rows) == 3
        assert said(rows[0])[0] == [("user", "Describe the image."), ("assistant", "two circles")]
        assert said(rows[0])[1] == [digest_of(content("blue")), digest_of(content("red"))]
        with pytest.raises(ValueError, match="sample c: expected c.json to hold a JSON object"):
            rows[2]
    whole = (tmp_path / f"{tarfile.GNU_FORMAT}.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:3000])
    with pytest.raises(ValueError, match="cut.tar is cut off or damaged"):
        hf_xattn.load_rows(tmp_path / "cut.tar")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as tar:
        tar.add(tmp_path / "cut.tar", "a.png")
    with pytest.raises(ValueError, match="Is it compressed"):
        hf_xattn.load_rows(tmp_path / "packed.tar")


def write_tar(path, files):
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path


def test_the_order_of_the_pictures_of_a_sample(tmp_path):
    """Pictures in the order of their letters, whatever the fields or the numbers in their names say; a text that is
    lost.
    """
    asked = {"question": "<image> or <image> ?", "answer": "a"}

    def rows(files, **fields):
        files = [(f"s.{name}", data) for name, data in files]
        return hf_xattn.load_rows(
            write_tar(tmp_path / "a.tar", [*files, ("s.json", json.dumps({**asked, **fields}).encode())])
        )

    two = [("left.png", content("red")), ("right.png", content("blue"))]
    turned = [digest_of(content(colour)) for colour in ("blue", "red")]
    assert said(rows(two, images=["s.right.png", "here/s.left.png"])[0])[1] == turned
    assert said(rows(two)[0])[1] == said(rows(two, images=["cat.png", "dog.png"])[0])[1] == turned[::-1]
    assert said(rows([("10.png", content("red")), ("9.png", content("blue"))])[0])[1] == turned
    with pytest.raises(ValueError, match=r"\['s.left.png', 's.right.png'\], got \['s.left.png', 'dog.png'\]"):
        rows(two, images=["s.left.png", "dog.png"])[0]
    with pytest.raises(ValueError, match=r"a field once in a sample, got \['text'\] again in s.b.txt"):
        rows([("a.txt", b"one"), ("b.txt", b"two")])[0]


def test_links_in_a_shard(tmp_path):
    """A picture that was packed as a link, and a sample that becomes a text without it."""
    for name, form in (("picture.png", content("red")), ("picture.json", b'{"question": "a", "answer": "b"}')):
        (tmp_path / name).write_bytes(form)
    (tmp_path / "other.png").hardlink_to(tmp_path / "picture.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("picture.png", "picture.json", "other.png"):
            tar.add(tmp_path / name, name)
    with pytest.raises(ValueError, match="got a link, other.png, whose content is elsewhere"):
        hf_xattn.load_rows(tmp_path / "a.tar")


def test_pictures_of_several_folders(tmp_path):
    """Names that are looked for in the folder of the first file, which has others of the same names."""
    for colour in ("red", "blue"):
        (tmp_path / colour).mkdir()
        (tmp_path / colour / "0.png").write_bytes(content(colour))
        (tmp_path / colour / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": colour}) + "\n")
    for name in ("*/metadata.jsonl", "{blue,red}/metadata.jsonl"):
        rows = hf_xattn.load_rows(str(tmp_path / name))
        assert [said(row)[1] for row in rows] == [[digest_of(content(colour))] for colour in ("blue", "red")]
    elsewhere = hf_xattn.load_rows(str(tmp_path / "*/metadata.jsonl"), pictures=tmp_path / "red")
    assert said(elsewhere[0])[1] == said(elsewhere[1])[1] == [digest_of(content("red"))]


def test_a_data_set_is_read_by_the_split_that_is_named(sources, tmp_path):
    """Another split than the one that is named; a file that is none."""
    assert len(hf_xattn.load_rows(f"{sources['repository']}#test")) == 4
    with pytest.raises(ValueError, match=r"one of \['test', 'train'\], got 'val'"):
        hf_xattn.load_rows(f"{sources['repository']}#val")
    (tmp_path / "a.parquet").write_bytes(sources["parquet"].read_bytes()[:-100])
    with pytest.raises(ValueError, match="a.parquet, which cannot be read"):
        hf_xattn.load_rows(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("a")
    for name, words in (
        ("a.csv", "of the kind \\['.csv'\\]"),
        ("gone.json", "no such file"),
        ("owner/name", "owner/name"),
    ):
        with pytest.raises(ValueError, match=words):
            hf_xattn.load_rows(tmp_path / name if "." in name else name)
    with pytest.raises(ValueError, match="6 files .* 4 that do not exist"):
        hf_xattn.load_rows(str(sources["tar"]).replace("001", "005"))
    with pytest.raises(ValueError, match="`pictures` to be a folder"):
        hf_xattn.load_rows(sources["llava"], pictures=tmp_path / "none")
    for wrong in (3, [], [None]):
        with pytest.raises((TypeError, ValueError), match="Expected `source`"):
            hf_xattn.load_rows(wrong)


STRAYS = {"parquet": "train.parquet", "tar": "data/a.tar", "llava": "llava.json", "lines": "train/rows.jsonl"}


@pytest.mark.parametrize("kind", STRAYS)
def test_a_folder_of_two_kinds_of_rows(kind, sources, tmp_path):
    """A stray file of lines that is trained on in place of the data."""
    other = tmp_path / STRAYS[kind]
    other.parent.mkdir(exist_ok=True)
    lines = json.dumps({"question": "stray ?", "answer": "b"})
    given = {"parquet": sources["parquet"], "tar": Path(str(sources["tar"]).replace("{000..001}", "000"))}
    other.write_bytes(given[kind].read_bytes() if kind in given else f"[{lines}]".encode())
    if kind in given:
        assert len(hf_xattn.load_rows(tmp_path)) == len(hf_xattn.load_rows(other))
    (tmp_path / "eval.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=rf"got \['eval.jsonl', '{STRAYS[kind]}'\]. Name what to read"):
        hf_xattn.load_rows(tmp_path)
    (tmp_path / "eval.jsonl").rename(tmp_path / "metadata.jsonl")
    assert hf_xattn.load_rows(tmp_path)[0]["messages"][0]["content"] == "stray ?"


def test_a_folder_with_other_files_beside_its_rows(sources, tmp_path):
    """A folder that is refused for a list of labels, or what is hidden; tables of two kinds, of which one is lost."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a ?", "answer": "b"}))
    (tmp_path / "labels.json").write_text('["red", "blue"]')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "a.parquet").write_bytes(b"x")
    assert len(hf_xattn.load_rows(tmp_path)) == 1
    (tmp_path / "rows.jsonl").rename(tmp_path / ".rows.jsonl")
    for name in ("a.parquet", "b.tar"):
        (tmp_path / name).write_bytes(sources["parquet"].read_bytes())
    with pytest.raises(ValueError, match=r"or rows of one kind, got \['a.parquet', 'b.tar'\]"):
        hf_xattn.load_rows(tmp_path)
    import datasets

    datasets.load_from_disk(str(sources["saved"])).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "eval.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"got \['eval.jsonl', 'dataset_info.json', 'state.json'\]"):
        hf_xattn.load_rows(tmp_path / "saved")


def test_pictures_lie_elsewhere(tmp_path):
    """Names of pictures that are looked for beside the file."""
    pictures = write_pictures(tmp_path / "elsewhere")
    (tmp_path / "llava.json").write_text(json.dumps([llava("red", "what ?", "red")]))
    row = hf_xattn.load_rows(tmp_path / "llava.json", pictures=pictures)[0]
    assert said(row)[1] == [digest_of(pictures / "red.png")]


def test_rows_of_a_parquet_of_names(tmp_path):
    """A table whose pictures are files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_pictures(tmp_path)
    columns = {"image": [f"{colour}.png" for colour in COLOURS], "text": [f"a {colour} circle" for colour in COLOURS]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = hf_xattn.load_rows(tmp_path / "a.parquet")
    assert [said(row)[1] for row in rows] == [[digest_of(tmp_path / f"{colour}.png")] for colour in COLOURS]


def test_bytes_that_are_no_picture(tmp_path):
    """Bytes that become a picture of noise, or an error that does not name the row."""
    collator = hf_xattn.XAttnDataCollator(make_processor())
    with pytest.raises(ValueError, match="Row 0 of the batch.*4 bytes, which cannot be read as an image"):
        collator(
            [
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "image", "image": b"none"}, {"type": "text", "text": "a"}],
                        },
                        {"role": "assistant", "content": "b"},
                    ]
                }
            ]
        )
    whole = io.BytesIO()
    Image.new("RGB", (4, 4)).save(whole, "PNG")
    limited = hf_xattn.XAttnProcessor(make_processor().image_processor, make_processor().tokenizer)
    assert limited(images=[[whole.getvalue()]])["pixel_values"].shape[1] == 1
