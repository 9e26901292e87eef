"""The order of rows in training: every row once in an epoch, in shares of processes and workers."""

import itertools
import pickle
from collections import Counter

import pytest
import torch
from data_sources import questions, write_parquet, write_tar

import hf_xattn
from hf_xattn.data.loading import OPEN_UNITS
from hf_xattn.data.order import STREAMS, Shuffled
from hf_xattn.training.bad_rows import Places


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources that are cut in different ways: shards, row groups, and blocks of lines."""
    folder = tmp_path_factory.mktemp("order")
    for shard in range(16):
        write_tar(folder / f"{shard:02d}.tar", list(questions(64)), first=64 * shard)
    write_parquet(folder / "a.parquet", 501, rows_of_a_group=7)
    (folder / "b.jsonl").write_text(
        "\n".join(f'{{"question": "{index} ?", "answer": "b{index}"}}' for index in range(999))
    )
    return folder


@pytest.fixture(scope="module")
def shards(folder):
    return hf_xattn.load_rows(f"{folder}/{{00..15}}.tar")


@pytest.fixture(scope="module")
def mixed(folder):
    return hf_xattn.load_rows([f"{folder}/*.tar", f"{folder}/a.parquet:0.3", f"{folder}/b.jsonl:2"])


@pytest.mark.parametrize("batch_size, processes", [(1, 1), (4, 1), (4, 2), (3, 3), (7, 2), (64, 2)])
def test_an_epoch_has_every_row_once(shards, batch_size, processes):
    """A row that is read twice before another is read once, at the seams of epochs, shares and batches."""
    order = Shuffled(shards, 0, seed=1, batch_size=batch_size, processes=processes)
    count = order.epoch_rows
    assert count == len(shards) == 1024
    epochs = [[order.index(epoch * count + place) for place in range(count)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = Shuffled(shards, 0, seed=2, batch_size=batch_size, processes=processes)
    assert [again.index(place) for place in range(count)] != epochs[0]


def test_weights(mixed):
    """A source that is read more or less often than its weight says; a row that comes again before others came."""
    order = Shuffled(mixed, 0, seed=3, batch_size=4)
    assert order.counts == [1024, 150, 1998] and order.epoch_rows == 3172
    seen = Counter(order.index(place) for place in range(10 * order.epoch_rows))
    by_source = [Counter(), Counter(), Counter()]
    for index, times in seen.items():
        by_source[0 if index < 1024 else 1 if index < 1525 else 2][times] += 1
    assert by_source[0] == {10: 1024} and by_source[2] == {20: 999}
    assert set(by_source[1]) == {2, 3} and sum(by_source[1].values()) == 501  # 1500 rows of 501
    first = [order.index(place) for place in range(order.epoch_rows)]
    early = sum(index < 1024 for index in first[:500])
    assert 60 < early < 260  # sources are mixed: about 160 of 500


def read_by(rows, order, processes, workers):
    """The rows that each worker of each process reads, as a `DataLoader` deals batches."""
    batches = list(itertools.batched(range(len(order)), order.batch_size)) if hasattr(itertools, "batched") else [
        range(start, min(start + order.batch_size, len(order))) for start in range(0, len(order), order.batch_size)
    ]  # fmt: skip
    read = {}
    for number, places in enumerate(batches):
        key = number % processes, number // processes % workers
        read.setdefault(key, []).extend(order.index(place) for place in places)
    return read


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_of_ranks_and_workers(shards, workers):
    """Two ranks, or two workers of a rank, that read the same shard, or all shards."""
    order = Shuffled(shards, 1024, seed=1, batch_size=4, processes=2)
    assert order.streams == 2 * STREAMS
    read = read_by(shards, order, 2, workers)
    assert len(read) == 2 * workers and sorted(itertools.chain(*read.values())) == list(range(1024))
    shards_of = {key: {index // 64 for index in rows} for key, rows in read.items()}
    assert all(len(each) == 16 // (2 * workers) for each in shards_of.values())
    assert sum(map(len, shards_of.values())) == 16  # each is read by one alone


def test_order_does_not_depend_on_workers(shards):
    """A run with more workers that trains on other batches."""
    order = Shuffled(shards, 256, seed=1, batch_size=4)
    expected = [order.index(place) for place in range(256)]
    for workers in (0, 2, 3):
        loader = torch.utils.data.DataLoader(Places(order), batch_size=4, num_workers=workers, collate_fn=_indices)
        assert [index for batch in loader for index in batch] == expected
    copied = pickle.loads(pickle.dumps(order))
    assert [copied.index(place) for place in range(256)] == expected and copied[3] == order[3]


def _indices(places):
    return [place.rows.index(place.place) for place in places]


def test_a_place_is_known_without_what_came_before(mixed):
    """A resumed run that reads other rows than the one that was killed."""
    order = Shuffled(mixed, 0, seed=5, batch_size=4, processes=2)
    whole = [order.index(place) for place in range(7000)]
    for start in (1, 2999, 6998):
        fresh = Shuffled(mixed, 0, seed=5, batch_size=4, processes=2)
        assert fresh.index(start) == whole[start]


def test_few_units_are_open(folder):
    """A data set that is held in memory, because its units stay open."""
    rows = hf_xattn.load_rows([f"{folder}/*.tar", f"{folder}/a.parquet", f"{folder}/b.jsonl"])
    order = Shuffled(rows, 1500, seed=5, batch_size=4)
    for place in range(1500):
        order[place]
    assert len(rows._open) <= OPEN_UNITS


def test_rows_of_one_file_are_mixed(tmp_path):
    """Rows of a sorted file that come sorted: a batch of one kind alone."""
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"question": "a", "answer": "{i // 1000}"}}' for i in range(20_000)))
    rows = hf_xattn.load_rows(tmp_path / "a.jsonl")
    order = Shuffled(rows, 0, batch_size=8)
    kinds = [len({order.index(place) // 1000 for place in range(start, start + 64)}) for start in range(0, 20_000, 64)]
    assert min(kinds) >= 8 and sum(kinds) / len(kinds) > 12  # of 20


@pytest.mark.parametrize("weight, batch_size, processes", [(3, 4, 1), (0.5, 3, 2), (0.001, 1, 1), (2, 64, 1)])
def test_a_source_that_is_spread(folder, weight, batch_size, processes):
    """Rows of a small source that stand together between large units; a row of the others that is lost for them; a
    row of the small source that comes again before others came.
    """
    rows = hf_xattn.load_rows([f"{folder}/*.tar", f"{folder}/a.parquet:{weight}"])
    order = Shuffled(rows, 0, seed=4, batch_size=batch_size, processes=processes, spread=1)
    count = order.epoch_rows
    assert count == 1024 + order.counts[1] and order.counts[1] == max(1, round(501 * weight))
    read = [order.index(place) for place in range(3 * count)]
    for epoch in range(3):
        own = read[epoch * count : (epoch + 1) * count]
        assert sorted(index for index in own if index < 1024) == list(range(1024))
    times = Counter(index for index in read if index >= 1024)
    seen = [times[index] for index in range(1024, 1525)]
    assert sum(seen) == 3 * order.counts[1] and max(seen) - min(seen) <= 1
    if weight > 0.01:  # in each part of the run as many as anywhere
        parts = [sum(index >= 1024 for index in read[start : start + 300]) for start in range(0, count - 300, 300)]
        assert all(share == pytest.approx(300 * order.counts[1] / count, rel=0.35) for share in parts), parts
    again = pickle.loads(pickle.dumps(order))
    assert [again.index(place) for place in range(50)] == read[:50]


def test_a_small_source_in_large_shards(tmp_path):
    """A long row of texts, which all stand beside the one picture that follows."""
    for shard in range(8):
        write_tar(tmp_path / f"{shard}.tar", list(questions(512)), first=512 * shard)
    write_parquet(tmp_path / "a.parquet", 20, rows_of_a_group=20)
    rows = hf_xattn.load_rows([f"{tmp_path}/*.tar", f"{tmp_path}/a.parquet:36"])

    def longest(**spread):
        order = Shuffled(rows, 0, batch_size=8, **spread)
        of_texts = [order.index(place) >= 4096 for place in range(order.epoch_rows)]
        return max(len(list(run)) for text, run in itertools.groupby(of_texts) if text)

    assert longest(spread=1) < 10 < longest()
