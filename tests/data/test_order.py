"""The order of rows in training: every row once in an epoch, whatever processes and workers there are."""

import itertools
import pickle
from collections import Counter

import pytest
import torch

import hf_xattn
from helpers.inputs.data_sources import questions, write_parquet, write_tar
from hf_xattn.data.loading import Shuffled
from hf_xattn.training.bad_rows import Places


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources of different kinds: shards, a table, and lines."""
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


def test_an_epoch_has_every_row_once(shards):
    """A row that is read twice before another is read once, at the seams of epochs."""
    order = Shuffled(shards, 0, seed=1)
    count = order.epoch_rows
    assert count == len(shards) == 1024
    epochs = [[order.index(epoch * count + place) for place in range(count)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = Shuffled(shards, 0, seed=2)
    assert [again.index(place) for place in range(count)] != epochs[0]


def test_a_source_is_read_as_often_as_its_weight_says(mixed):
    """A source that is read more or less often than its weight says; a row that comes again before others came."""
    order = Shuffled(mixed, 0, seed=3)
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


def test_order_does_not_depend_on_workers(shards):
    """A run with more workers that trains on other batches."""
    order = Shuffled(shards, 256, seed=1)
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
    order = Shuffled(mixed, 0, seed=5)
    whole = [order.index(place) for place in range(7000)]
    for start in (1, 2999, 6998):
        fresh = Shuffled(mixed, 0, seed=5)
        assert fresh.index(start) == whole[start]


def test_rows_of_one_file_are_mixed(tmp_path):
    """Rows of a sorted file that come sorted: a batch of one kind alone."""
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"question": "a", "answer": "{i // 1000}"}}' for i in range(20_000)))
    rows = hf_xattn.load_rows(tmp_path / "a.jsonl")
    order = Shuffled(rows, 0)
    kinds = [len({order.index(place) // 1000 for place in range(start, start + 64)}) for start in range(0, 20_000, 64)]
    assert min(kinds) >= 8 and sum(kinds) / len(kinds) > 12  # of 20


@pytest.mark.parametrize("weight", [3, 0.5, 0.001])
def test_a_small_source_among_shards(folder, weight):
    """Rows of a small source that stand together; a row of the others that is lost for them; a row of the small source
    that comes again before others came.
    """
    rows = hf_xattn.load_rows([f"{folder}/*.tar", f"{folder}/a.parquet:{weight}"])
    order = Shuffled(rows, 0, seed=4)
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
        longest = max(len(list(run)) for text, run in itertools.groupby(index >= 1024 for index in read) if text)
        assert longest < (40 if weight == 3 else 10)
    again = pickle.loads(pickle.dumps(order))
    assert [again.index(place) for place in range(50)] == read[:50]


def test_the_order_of_rows_that_are_left(folder, mixed):
    """A row that was left out, or held out, and is read; a source that is taken for its neighbour."""
    gone = [0, 5, 1023, 1024, 1100, *range(1525, 1925)]
    left, held_out = mixed.split(gone)
    assert left.sizes() == [1021, 499, 599] and held_out.sizes() == [3, 2, 400] and mixed.sizes() == [1024, 501, 999]
    order = Shuffled(left, 0)
    assert order.counts == [1021, 150, 1198]
    read = Counter(left.where(order.index(place)) for place in range(order.epoch_rows))
    assert not read.keys() & {mixed.where(index) for index in gone} and set(read.values()) == {1, 2}
    more = left.with_source(held_out.sources[0])
    assert more.sizes() == [1021, 499, 599, 1024] and more[2119 + 7] == mixed[7]
