"""Tables whose values are kept in a form of their own."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sources import content

import hf_xattn


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
