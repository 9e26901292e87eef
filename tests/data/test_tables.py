"""Tables whose values are kept in a form of their own."""

import json
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hf_xattn
from helpers.inputs.data_sources import content, llava, questions, write_parquet, write_tar


ROWS = [
    {"messages": [{"role": "user", "content": "how ?"}, {"role": "assistant", "content": "so"}], "images": []},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "[2]"}], "weight": 1},
        ],
        "images": [{"bytes": content("red"), "path": None}],
    },
]


def stored(kind, folder):
    """The same rows, as `datasets` and other programs write them."""
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no type `Json`")
    message = {"role": datasets.Value("string"), "content": datasets.Json(), "weight": datasets.Value("int64")}
    picture = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    whole, features = datasets.Json(), {"messages": datasets.List(message), "images": datasets.List(picture)}
    if kind.startswith("whole"):
        features["messages"] = whole
    made = datasets.Dataset.from_list(ROWS, features=datasets.Features(features))
    if kind.endswith("saved"):
        made.save_to_disk(str(folder / "saved"))
        return folder / "saved"
    path = folder / "rows.parquet"
    if kind.endswith("folder"):
        (folder / "repository").mkdir()
        made.to_parquet(str(folder / "repository" / "train.parquet"))
        return folder / "repository"
    made.to_parquet(str(path))
    if kind == "strings":  # a program that keeps what the file says of itself, and does not know Arrow's type for JSON
        table = pq.read_table(path, arrow_extensions_enabled=False)
        plain = pa.schema([("role", pa.string()), ("content", pa.string()), ("weight", pa.int64())])
        fields = [pa.field("messages", pa.list_(pa.struct(list(plain)))), table.schema.field("images")]
        values = [table[name].to_pylist() for name in ("messages", "images")]
        pq.write_table(pa.table(values, pa.schema(fields, table.schema.metadata)), path)
    if kind == "arrow":  # a program that knows nothing of `datasets`
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata(None), path)
    return path


@pytest.mark.parametrize("kind", ["saved", "parquet", "folder", "whole saved", "whole parquet", "strings", "arrow"])
def test_messages_kept_as_json(kind, tmp_path):
    """Parts that are trained on as JSON text, without their picture; a text with quotation marks around it."""
    rows = hf_xattn.load_rows(stored(kind, tmp_path))
    assert [message["content"] for message in rows[0]["messages"]] == ["how ?", "so"]
    user, said = (message["content"] for message in rows[1]["messages"])
    assert user == [{"type": "image", "image": content("red")}, {"type": "text", "text": "1"}]
    assert said == [{"type": "text", "text": "[2]"}]


def test_a_row_group_that_cannot_be_read(tmp_path):
    """A disk error that is taken for the end of the data, or that names no rows."""
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", 12, rows_of_a_group=5)
    whole = bytearray((tmp_path / "b.parquet").read_bytes())
    place = pq.read_metadata(tmp_path / "b.parquet").row_group(1).column(0).data_page_offset
    whole[place : place + 400] = os.urandom(400)
    (tmp_path / "b.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=r"b.parquet, row 5 to row 9 \(row group 1\) cannot be read: "):
        hf_xattn.load_rows(f"{tmp_path}/*.parquet")


def test_parquet_files_of_different_columns(tmp_path):
    """Columns that the first file lacks, dropped without a word; values in the type of the first file's."""
    columns = {"question": ["a ?", "b ?"], "answer": ["c", "d"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    pq.write_table(pa.table({**columns, "system": ["be short"] * 2}), tmp_path / "b.parquet")
    pq.write_table(pa.table({**columns, "answer": [5, 6]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({**columns, "system": pa.nulls(2)}), tmp_path / "d.parquet")
    rows = hf_xattn.load_rows(f"{tmp_path}/{{d,a,b,a}}.parquet")
    assert [len(row["messages"]) for row in rows] == [2, 2, 2, 2, 3, 3, 2, 2]
    assert [rows.where(index) for index in (1, 4, 7)] == [
        f"{tmp_path}/{name}.parquet, row {place}" for name, place in (("d", 1), ("b", 0), ("a", 1))
    ]
    with pytest.raises(ValueError, match="c.parquet, row 0: .*'answer' must be a text"):
        hf_xattn.load_rows(f"{tmp_path}/{{a,c}}.parquet")[2]


@pytest.mark.parametrize("kind", ["parquet", "array", "tar"])
def test_a_file_that_is_written_anew(kind, tmp_path):
    """Rows of the file that stood there before, because it has the same name, size and time."""
    file = tmp_path / f"rows.{kind if kind != 'array' else 'json'}"
    for number in (1, 2):
        if kind == "parquet":
            pq.write_table(pa.table({"question": [f"q{number}"], "answer": ["a"]}), file)
        elif kind == "array":
            file.write_text(json.dumps([{"question": f"q{number}", "answer": "a"}]))
        else:
            write_tar(file, [(None, f"q{number}", "a")])
        os.utime(file, ns=(10**18, 10**18))
        (row,) = hf_xattn.load_rows(file)
        assert row["messages"][0]["content"] == f"q{number}"


def test_nothing_is_written_into_a_saved_data_set(tmp_path):
    """A copy of all pictures in the user's folder, or an error where it may not be written to."""
    features = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    )
    row = {"question": "what ?", "answer": "red", "images": [{"bytes": content("red"), "path": None}]}
    datasets.Dataset.from_list([row], features=features).save_to_disk(str(tmp_path / "saved"))
    before = sorted(tmp_path.rglob("*"))
    (read,) = hf_xattn.load_rows(tmp_path / "saved")
    assert content("red") in [part.get("image") for part in read["messages"][0]["content"]]
    assert sorted(tmp_path.rglob("*")) == before


def test_names_that_look_like_patterns(tmp_path):
    """A file that is taken for a pattern, and others in its place."""
    write_parquet(tmp_path / "a[1].parquet", 3)
    write_parquet(tmp_path / "a1.parquet", 5)
    assert len(hf_xattn.load_rows(tmp_path / "a[1].parquet")) == 3


def test_what_is_found_once(tmp_path):
    """Minutes at each start in which the files of all shards are listed; a list of files that have changed since."""
    given = list(questions(6))
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", given[:0] if number == 1 else given, first=6 * number)
    (tmp_path / "a.json").write_text(json.dumps([llava(*each) for each in given]))
    for source, words in ((f"{tmp_path}/*.tar", "sample 000012"), (f"{tmp_path}/a.json", "object 0")):
        rows, again = hf_xattn.load_rows(source), hf_xattn.load_rows(source)
        kept, others = (each.sources[0].files[0].table.cache_files for each in (rows, again))
        assert kept == others and rows.fingerprint == again.fingerprint
        assert rows.place_of(len(rows) - 6)[1] == words
    write_tar(tmp_path / "2.tar", given[:2])
    (tmp_path / "a.json").write_text(json.dumps([llava(*each) for each in given[:2]]))
    changed = [hf_xattn.load_rows(f"{tmp_path}/{name}") for name in ("*.tar", "a.json")]
    assert list(map(len, changed)) == [8, 2] and changed[1].fingerprint != rows.fingerprint
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="a.json to hold examples, got none"):
        hf_xattn.load_rows(tmp_path / "a.json")
    with pytest.raises(ValueError, match="1.tar to hold examples, got none"):
        hf_xattn.load_rows(tmp_path / "1.tar")


def test_a_damaged_shard_is_refused(tmp_path):
    """A shard that ends at a header that is damaged, and loses the samples behind it."""
    write_tar(tmp_path / "a.tar", list(questions(6)))
    whole = bytearray((tmp_path / "a.tar").read_bytes())
    whole[whole.index(b"000003.json") + 130] ^= 1
    (tmp_path / "a.tar").write_bytes(whole)
    with pytest.raises(ValueError, match="a.tar is cut off or damaged"):
        hf_xattn.load_rows(tmp_path / "a.tar")
