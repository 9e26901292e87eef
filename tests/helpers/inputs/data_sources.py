"""The same rows, written as every kind of source that `--data` takes."""

import io
import json
import tarfile

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from helpers.inputs.training_examples import COLOURS, draw


def content(colour):
    file = io.BytesIO()
    draw(colour).save(file, "PNG")
    return file.getvalue()


def questions(count):
    """`count` questions; every third has no picture."""
    for index in range(count):
        colour = None if index % 3 == 2 else COLOURS[index % len(COLOURS)]
        yield colour, f"which colour has number {index} ?", f"{colour} {index}."


def write_pictures(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for colour in COLOURS:
        draw(colour).save(folder / f"{colour}.png")
    return folder


def llava(colour, question, answer):
    turns = [
        {"from": "human", "value": question if colour is None else f"<image>\n{question}"},
        {"from": "gpt", "value": answer},
    ]
    return {"id": answer, "conversations": turns, **({} if colour is None else {"image": f"{colour}.png"})}


def own(colour, question, answer):
    return {"question": question, "answer": answer, **({} if colour is None else {"file_name": f"{colour}.png"})}


def table(count):
    """Columns as `datasets` writes them, with the bytes of pictures."""
    rows = list(questions(count))
    return {
        "image": [None if colour is None else {"bytes": content(colour), "path": None} for colour, _, _ in rows],
        "question": [question for _, question, _ in rows],
        "answer": [answer for _, _, answer in rows],
    }


def write_parquet(path, count, rows_of_a_group=5):
    pq.write_table(pa.table(table(count)), path, row_group_size=rows_of_a_group)
    return path


def write_tar(path, rows, first=0):
    """A shard of WebDataset."""
    with tarfile.open(path, "w") as tar:
        for index, (colour, question, answer) in enumerate(rows, start=first):
            fields = json.dumps({"question": question, "answer": answer}).encode()
            files = {"json": fields} if colour is None else {"png": content(colour), "json": fields}
            for kind, data in files.items():
                about = tarfile.TarInfo(f"{index:06d}.{kind}")
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
    return path


def write_all(folder, count):
    """Returns sources by their kind."""
    rows = list(questions(count))
    pictures = write_pictures(folder / "pictures")
    (pictures / "metadata.jsonl").write_text("\n".join(json.dumps(own(*row)) for row in rows))
    (pictures / "llava.json").write_text(json.dumps([llava(*row) for row in rows], indent=1))
    write_parquet(folder / "rows.parquet", count)
    half = count // 2
    write_tar(folder / "shards-000.tar", rows[:half])
    write_tar(folder / "shards-001.tar", rows[half:], first=half)
    made = datasets.Dataset.from_dict(table(count)).cast_column("image", datasets.Image())
    made.save_to_disk(str(folder / "saved"))
    (folder / "repository" / "data").mkdir(parents=True)
    write_parquet(folder / "repository" / "data" / "train-00000-of-00001.parquet", count)
    write_parquet(folder / "repository" / "data" / "test-00000-of-00001.parquet", 4)
    (pictures / "metadata.jsonl").rename(folder / "kept.jsonl")
    own_folder = write_pictures(folder / "own")
    (folder / "kept.jsonl").rename(own_folder / "metadata.jsonl")
    return {
        "folder": own_folder,
        "llava": pictures / "llava.json",
        "parquet": folder / "rows.parquet",
        "tar": f"{folder}/shards-{{000..001}}.tar",
        "saved": folder / "saved",
        "repository": folder / "repository",
    }
