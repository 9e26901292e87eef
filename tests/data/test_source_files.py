"""Files of data of which a part would be left out, doubled or read as another, without a word."""

import gzip

import pytest

import hf_xattn
from helpers.inputs.source_files import asked, picture, pictures_of, write_tar
from hf_xattn.data.loading import Shuffled
from hf_xattn.training.bad_rows import check_pictures, find_problems


@pytest.mark.parametrize("ending, kind", [("avif", "AVIF"), ("jp2", "JPEG2000"), ("jfif", "JPEG"), ("ppm", "PPM")])
def test_pictures_of_other_endings(ending, kind, tmp_path):
    """A row of a shard that is trained as a text, because its picture has an ending that few have."""
    content = picture("red", kind)
    (row,) = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", {f"0.{ending}": content, "0.json": asked()}))
    assert pictures_of(row) == [content]
    (tmp_path / "metadata.jsonl").write_bytes(asked(path=f"a.{ending}"))
    with pytest.raises(ValueError, match="the name of an image in one of .* got it in 'path'"):
        hf_xattn.load_rows(tmp_path / "metadata.jsonl")[0]


@pytest.mark.parametrize("ending", ["svg", "mp4"])
def test_pictures_that_nothing_reads(ending, tmp_path):
    """The same for a kind that Pillow does not read, and for a video."""
    rows = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", {f"0.{ending}": b"<svg/>", "0.json": asked()}))
    with pytest.raises(ValueError, match=f"expected images of a kind that Pillow reads, got 0.{ending}"):
        rows[0]


def test_files_of_a_sample_that_are_no_pictures(tmp_path):
    """A row that is refused for its class number."""
    (row,) = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", {"0.cls": b"3", "0.json": asked()}))
    assert row["messages"][0]["content"] == "what colour ?"


def test_files_that_go_on_behind_their_end(tmp_path):
    """A second array or archive of a file, which is left out."""
    rows = b"[%s, %s]" % (asked(), asked())
    for more in (rows, b', {"question": "lost"}]', b"]"):
        (tmp_path / "a.json").write_bytes(rows + b"\n" + more)
        with pytest.raises(ValueError, match="holds more than one array: it goes on behind character"):
            hf_xattn.load_rows(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(rows + b"\n \r\n" * 10)
    assert len(hf_xattn.load_rows(tmp_path / "a.json")) == 2
    first, second = (write_tar(tmp_path / f"{name}.tar", {f"{name}.json": asked()}).read_bytes() for name in "ab")
    (tmp_path / "both.tar").write_bytes(first + second)
    with pytest.raises(ValueError, match="both.tar is cut off or damaged, or holds a second archive, behind byte"):
        hf_xattn.load_rows(tmp_path / "both.tar")


def test_patterns_of_all_folders(tmp_path):
    """`**` that is read as `*`, so that files of deeper folders are left out."""
    for depth, folder in enumerate((tmp_path, tmp_path / "x", tmp_path / "x" / "y")):
        folder.mkdir(exist_ok=True)
        (folder / f"{depth}.jsonl").write_bytes(asked())
    assert len(hf_xattn.load_rows(f"{tmp_path}/**/*.jsonl")) == 3
    with pytest.raises(ValueError, match=r"Expected `\*\*` to be the whole name of a folder"):
        hf_xattn.load_rows(f"{tmp_path}/**.jsonl")


def test_byte_order_marks_are_no_text(tmp_path):
    """A mark that is trained as the first token of an answer, and one in the middle that hides the last row."""
    shard = {"0.png": picture("red"), "0.txt": b"\xef\xbb\xbfa red square\r\n"}
    (row,) = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", shard))
    assert row["messages"][1]["content"] == "a red square"
    lines = [b"\xef\xbb\xbf" + asked("one ?"), b"\xef\xbb\xbf", asked("two ?"), asked("three ?")]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    rows = hf_xattn.load_rows(tmp_path / "a.jsonl")
    assert [rows[index]["messages"][0]["content"] for index in (0, 2, 3)] == ["one ?", "two ?", "three ?"]
    with pytest.raises(ValueError, match="line 2: broken JSON"):
        rows[1]


def test_a_loop_over_shuffled_rows_ends(tmp_path):
    """A loop that goes on with rows of a next epoch, for ever."""
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(asked(str(number)) for number in range(3)))
    rows = Shuffled(hf_xattn.load_rows(tmp_path / "a.jsonl"), length=5)
    assert len([row for row, _ in zip(rows, range(100))]) == 5
    with pytest.raises(IndexError, match="Expected a place from 0 to 4, got 5"):
        rows[5]


def test_twins_that_macos_leaves(tmp_path):
    """Pictures that are torn from their rows: `._0.png` stands between the files of a sample."""
    left = {"._{}.png": b"\0\5\26\7", "._{}.json": b"\0\5\26\7", "__MACOSX/{}.json": b"x"}
    members = {".DS_Store": b"x", "Thumbs.db": b"x"}
    for number, colour in enumerate(("red", "blue")):
        first, second, third = ({name.format(number): content} for name, content in left.items())
        members |= first | {f"{number}.png": picture(colour)} | second | third
        members |= {f"{number}.json": asked(), f"__MACOSX/._{number}.png": b"x"}
    rows = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", members))
    assert [pictures_of(row) for row in rows] == [[picture("red")], [picture("blue")]]
    (tmp_path / "lines").mkdir()
    for name in ("train.jsonl", "._train.jsonl"):
        (tmp_path / "lines" / name).write_bytes(asked())
    assert len(hf_xattn.load_rows(tmp_path / "lines")) == 1


def test_files_of_a_sample_that_stand_apart(tmp_path):
    """A question without its picture, and a picture without a question: two rows of one sample."""
    members = {"0.png": picture("red"), "1.png": picture("blue"), "0.json": asked(), "1.json": asked()}
    with pytest.raises(ValueError, match="to stand together in .*a.tar, got those of '0' apart"):
        hf_xattn.load_rows(write_tar(tmp_path / "a.tar", members))


@pytest.mark.parametrize("name", ["0.img", "0.jpg_large", "0", "0.heic", "0.jxl", "0.npy"])
def test_pictures_of_unknown_endings(name, tmp_path):
    """A row that is trained as a text, because its picture has an ending that nobody knows."""
    content = b"\x93NUMPY" if name.endswith("npy") else picture("red", "JPEG")
    rows = hf_xattn.load_rows(write_tar(tmp_path / "a.tar", {name: content, "0.json": asked()}))
    with pytest.raises(ValueError, match=f"expected .*image.* got {name}"):
        rows[0]


def test_lines_that_are_packed(tmp_path):
    """A packed file of a data set that is read as it was downloaded."""
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl.gz").write_bytes(gzip.compress(asked("one ?") + b"\n" + asked("two ?")))
    rows = hf_xattn.load_rows(f"{tmp_path}/data#train")
    assert [row["messages"][0]["content"] for row in rows] == ["one ?", "two ?"]


ROW = asked().decode()
COMMAS = {"missing": f"[{ROW} {ROW}]", "doubled": f"[{ROW},, {ROW}]", "first": f"[,{ROW}]", "last": f"[{ROW},]"}


@pytest.mark.parametrize("case", COMMAS)
@pytest.mark.parametrize("space", ["", " " * 2**20])
def test_commas_of_an_array(case, space, tmp_path):
    """An array that is read until an epoch comes to its broken place, and then loses 256 rows."""
    (tmp_path / "a.json").write_text(COMMAS[case].replace(" ", f" {space}").replace(",", f",{space}"))
    with pytest.raises(
        ValueError, match="a.json holds an array of JSON that cannot be read: object .*one comma between"
    ):
        hf_xattn.load_rows(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(f"[{ROW},{space}{ROW}{space},{ROW}{space}]")
    assert len(hf_xattn.load_rows(tmp_path / "a.json")) == 3


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_values_that_are_nested_deeply(depth, tmp_path):
    """One line of brackets that ends a run which is to leave bad rows out."""
    deep = asked()[:-1] + b', "a": ' + b"[" * depth + b"]" * depth + b"}"
    (tmp_path / "a.jsonl").write_bytes(deep + b"\n" + asked())
    write_tar(tmp_path / "a.tar", {"0.json": deep, "1.json": asked()})
    for name in ("a.jsonl", "a.tar"):
        rows = hf_xattn.load_rows(tmp_path / name)
        assert rows[1]["messages"][0]["content"] == "what colour ?"
        try:
            rows[0]
        except ValueError as error:
            assert name in str(error) and "nested too deeply" in str(error) and depth > 300
        else:
            assert depth < 100_000
        problems, _ = find_problems(rows, range(2), check_pictures)
        assert [problem.row for problem in problems] in ([0], []) and not rows.is_caption(0)
    (tmp_path / "a.json").write_bytes(b"[" + asked() + b"," + deep + b"]")
    try:
        assert len(hf_xattn.load_rows(tmp_path / "a.json")) == 2
    except ValueError as error:
        assert "object 1" in str(error)
