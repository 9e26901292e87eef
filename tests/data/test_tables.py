"""Tables whose values are kept in a form of their own."""

import http.server
import os
import re
import threading

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sources import content

import hf_xattn
from hf_xattn.data.loading import Rows
from hf_xattn.data.sources import Source
from hf_xattn.data.tables import UnreachableError, index_parquet
from hf_xattn.training.bad_rows import BadRowsFile, Place, RowReader


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


class Parts(http.server.BaseHTTPRequestHandler):
    """Sends the parts of a file that are asked for."""

    content = b""

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def do_GET(self):
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        sent = self.content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(sent) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


def test_a_network_that_fails(tmp_path):
    """Rows that are left out as broken, thousands of them, because the network was away for a minute."""
    pytest.importorskip("aiohttp")
    said = [{"role": "user", "content": "a ?"}, {"role": "assistant", "content": "b"}]
    blobs = [os.urandom(8 * 2**20) for _ in range(3)]  # larger than what fsspec reads ahead
    pq.write_table(pa.table({"messages": [said] * 3, "blob": blobs}), tmp_path / "a.parquet", row_group_size=1)
    Parts.content = (tmp_path / "a.parquet").read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Parts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/a.parquet"
    rows = Rows([Source("a", [index_parquet(address)], None, 1.0)], "what ?")
    file = BadRowsFile(tmp_path / "run", 1.0)
    reader = RowReader(lambda read: read, lambda read: read, file)
    assert reader([Place(rows, 0)])[0]["messages"] == said
    server.shutdown()
    server.server_close()
    with pytest.raises(UnreachableError, match="a.parquet2? cannot be reached"):
        reader([Place(rows, 1)])
    with pytest.raises(UnreachableError, match="a.parquet2? cannot be reached"):
        index_parquet(f"{address}2")
    assert not file.path.exists()
    broken = bytearray(Parts.content)  # of the contents, which stay a bad row
    broken[100:2000] = bytes(1900)
    (tmp_path / "broken.parquet").write_bytes(broken)
    with pytest.raises(ValueError, match="broken.parquet, row 0: row group 0 cannot be read"):
        Rows([Source("a", [index_parquet(f"file://{tmp_path}/broken.parquet")], None, 1.0)], "what ?")[0]
