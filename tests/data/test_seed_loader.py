"""Mini-batches are a function of (seed, epoch, step): whatever is prefetched, by whom, and from where on."""

import ctypes
import mmap
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from sampled_graphs import mixed_graph, rows_of, store_of

from randombatch.data.graph import DataError
from randombatch.data.sampling import MiniBatch, Rows, SeedLoader, naive
from randombatch.data.sampling import rows as rows_file
from randombatch.data.sampling.background import ahead
from randombatch.data.sampling.cold import is_cold, single_pages, will_need
from randombatch.permutation import Permutation, fold_in


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return store_of(*mixed_graph(), tmp_path)


def same(a: MiniBatch, b: MiniBatch) -> bool:
    tensors = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("nodes", "x", "edge_index", "y"))
    return tensors and (a.epoch, a.step, a.num_nodes, a.num_edges) == (b.epoch, b.step, b.num_nodes, b.num_edges)


def background_threads() -> int:
    return sum(thread.name.startswith("randombatch-ahead") for thread in threading.enumerate())


def test_equals_the_parts_it_is_made_of(store: Any) -> None:
    """Every number of every mini-batch, from the naive sampler and NumPy indexing."""
    loader = SeedLoader(store, "train", 30, (4, 3), seed=5)
    ids = store.split("train")
    order = Permutation(len(ids), fold_in(5, 2)).items(torch.arange(len(ids))).numpy()
    seen = []
    for step, batch in enumerate(loader.batches(2)):
        nodes, arcs, _ = naive.sample(
            store.indptr, store.indices, batch.nodes[: batch.num_seeds].tolist(), (4, 3), fold_in(5, 2, step)
        )
        assert batch.nodes.tolist() == nodes
        assert [tuple(arc) for arc in batch.edge_index.T.tolist()] == arcs
        assert batch.x.dtype == torch.float32
        assert np.array_equal(batch.x.numpy(), store.x[nodes].astype(np.float32))
        assert np.array_equal(batch.y.numpy(), store.y[nodes[: batch.num_seeds]].astype(np.int64))
        assert (batch.epoch, batch.step, batch.num_companions) == (2, step, 0)
        seen += nodes[: batch.num_seeds]
    assert seen == ids[order].tolist()


def test_sizes_differ_by_at_most_one(store: Any) -> None:
    loader = SeedLoader(store, "all", 90, (1,), seed=0)
    sizes = [batch.num_seeds for batch in loader.batches(0)]
    assert sizes == [75, 75, 75, 75]
    assert loader.num_steps == 4
    assert sorted(i for b in loader.batches(0) for i in b.nodes[: b.num_seeds].tolist()) == list(range(300))
    sizes = [batch.num_seeds for batch in SeedLoader(store, np.arange(10), 4, (1,), seed=0).batches(0)]
    assert sizes == [4, 3, 3]


@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (2, 1), (2, 2), (5, 3), (1, 4), (50, 2)])
def test_prefetch_and_threads_change_nothing(store: Any, prefetch: int, threads: int) -> None:
    expected = list(SeedLoader(store, "train", 20, (5, 4), seed=3, companions=9, prefetch=0).batches(1))
    loader = SeedLoader(store, "train", 20, (5, 4), seed=3, companions=9, prefetch=prefetch, threads=threads)
    got = list(loader.batches(1))
    assert len(got) == len(expected) == loader.num_steps > 3
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert background_threads() == 0


def test_continues_in_mid_epoch(store: Any) -> None:
    loader = SeedLoader(store, "train", 20, (5, 4), seed=3, companions=4)
    whole = list(loader.batches(7))
    rest = list(loader.batches(7, start_step=3))
    assert len(rest) == len(whole) - 3 > 0
    assert all(same(a, b) for a, b in zip(rest, whole[3:], strict=True))
    assert list(loader.batches(7, start_step=loader.num_steps)) == []


def test_epochs_and_seeds_differ(store: Any) -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return next(SeedLoader(store, "train", 20, (5,), seed=seed).batches(epoch)).nodes.tolist()

    assert len({tuple(first(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_without_shuffling_the_order_is_kept(store: Any) -> None:
    loader = SeedLoader(store, "val", 13, (2,), seed=0, shuffle=False)
    seeds = torch.cat([batch.nodes[: batch.num_seeds] for batch in loader.batches(0)])
    assert seeds.tolist() == store.split("val").tolist()


def test_companions_are_new_nodes_without_edges(store: Any) -> None:
    for batch in SeedLoader(store, "train", 20, (3, 2), seed=1, companions=25).batches(0):
        n = len(batch.nodes) - batch.num_companions
        assert batch.num_companions == 25
        assert batch.nodes.unique().numel() == len(batch.nodes)
        assert int(batch.edge_index.max()) < n == sum(batch.num_nodes)
        assert np.array_equal(batch.x.numpy(), store.x[batch.nodes.numpy()].astype(np.float32))


def test_companions_are_uniform_over_what_was_not_sampled() -> None:
    """Isolated nodes: 3 seeds of 40 nodes leave 37, of which 10 are drawn: 10 / 37 each."""
    store = store_of(*rows_of([0] * 40, 40))
    loader = SeedLoader(store, np.arange(3), 3, (2,), seed=0, companions=10, prefetch=0)
    epochs = 1500
    hits = np.zeros(40)
    for epoch in range(epochs):
        hits[next(loader.batches(epoch)).nodes[3:].numpy()] += 1
    p = 10 / 37
    z = (hits[3:] - epochs * p) / np.sqrt(epochs * p * (1 - p))
    assert (hits[:3] == 0).all()
    assert np.abs(z).max() < 4.5
    assert 0.4 < (z**2).mean() < 1.8


def test_fewer_companions_than_asked_for_where_nodes_run_out() -> None:
    store = store_of(*rows_of([0] * 12, 12))
    batch = next(SeedLoader(store, np.arange(5), 5, (2,), seed=0, companions=100).batches(0))
    assert batch.num_companions == 7
    assert sorted(batch.nodes.tolist()) == list(range(12))


def test_errors_come_to_the_caller(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SeedLoader(store, "train", 20, (5, 4), seed=3, prefetch=3, threads=2)
    read = loader.rows.read

    def failing(nodes: Any, **options: Any) -> Any:
        if set(expected[2].nodes.tolist()) == set(nodes.tolist()):
            raise OSError("disk on fire")
        return read(nodes, **options)

    expected = list(loader.batches(0))
    monkeypatch.setattr(loader.rows, "read", failing)
    batches = loader.batches(0)
    assert same(next(batches), expected[0])
    assert same(next(batches), expected[1])
    with pytest.raises(OSError, match="disk on fire"):
        next(batches)
    assert background_threads() == 0


def test_stopping_early_ends_the_threads(store: Any) -> None:
    for _ in SeedLoader(store, "train", 5, (5, 4), seed=3, prefetch=4, threads=2).batches(0):
        assert background_threads() > 0
        break
    assert background_threads() == 0
    batches = SeedLoader(store, "train", 5, (5, 4), seed=3, prefetch=4, threads=2).batches(0)
    next(batches)
    batches.close()
    assert background_threads() == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_works_ahead_while_the_caller_is_busy(depth: int) -> None:
    """While one is in use, the next `depth` are begun, and not more; all in order."""
    begun = []

    def make(i: int) -> int:
        begun.append(i)
        return -i

    things = ahead(make, range(10), depth=depth, threads=1)
    assert next(things) == 0
    deadline = time.monotonic() + 10
    while len(begun) < 1 + depth and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert begun == list(range(1 + depth))
    assert list(things) == [-i for i in range(1, 10)]
    assert list(ahead(make, range(4), depth=0)) == [0, -1, -2, -3]
    assert list(ahead(make, [], depth=2)) == []


def test_every_half_becomes_its_float() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    order = np.random.default_rng(0).permutation(256)
    expected = every[order].astype(np.float32)
    assert np.array_equal(Rows(every, threads=2).read(order).numpy(), expected, equal_nan=True)


def test_halves_without_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_file, "_converts_halves", lambda: False)
    test_every_half_becomes_its_float()


def test_rows_of_float32(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    rows = pickle.loads(pickle.dumps(Rows(np.load(tmp_path / "x.npy", mmap_mode="r"), threads=3)))
    ids = torch.tensor([49, 0, 7, 7])
    assert np.array_equal(rows.read(ids).numpy(), x[ids.numpy()])
    assert rows.read(ids[:0]).shape == (0, 3)
    for bad in ([50], [-1]):
        with pytest.raises(ValueError, match="0 to 49"):
            rows.read(np.array(bad))
    with pytest.raises(TypeError, match="float16 or float32"):
        Rows(x.astype(np.float64))


def test_files_larger_than_memory_are_mapped_a_second_time(store: Any) -> None:
    """Only then, and only whole files: a slice of a map keeps the file's name and first byte."""
    assert is_cold(store.x, store.indices, memory=store.x.nbytes)
    assert not is_cold(store.x, store.indices, memory=store.x.nbytes + store.indices.nbytes)
    assert not is_cold(store.x, store.indices)
    assert not is_cold(np.zeros(1000), memory=100)
    again = single_pages(store.x)
    assert again.base is not store.x.base
    assert np.array_equal(again, store.x)
    assert not again.flags.writeable
    for other in (store.x[5:], np.zeros(10)):
        assert single_pages(other) is other


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="the system cannot be asked for pages")
def test_asking_for_pages_ahead_changes_nothing(store: Any) -> None:
    """The same mini-batches, every page of the rows being asked for, and no other."""
    options: dict[str, Any] = {"seed": 3, "companions": 9, "threads": 2}
    expected = list(SeedLoader(store, "train", 20, (5, 4), **options, cold=False).batches(1))
    loader = SeedLoader(store, "train", 20, (5, 4), **options, cold=True)
    assert loader.rows.cold
    assert loader.sampler.cold
    assert loader.together == 8
    assert all(same(a, b) for a, b in zip(loader.batches(1), expected, strict=True))


@pytest.mark.parametrize(("together", "prefetch"), [(1, 2), (2, 0), (3, 2), (100, 1)])
@pytest.mark.parametrize("cold", [True, False])
def test_mini_batches_made_together_are_the_same(store: Any, cold: bool, together: int, prefetch: int) -> None:
    options: dict[str, Any] = {"seed": 3, "companions": 9}
    expected = list(SeedLoader(store, "train", 20, (5, 4), **options, cold=False).batches(1))
    assert len(expected) > 3
    loader = SeedLoader(store, "train", 20, (5, 4), **options, cold=cold, together=together, prefetch=prefetch)
    assert all(same(a, b) for a, b in zip(loader.batches(1), expected, strict=True))
    assert all(same(a, b) for a, b in zip(loader.batches(1, 1, 2), expected[1::2], strict=True))
    sizes = [(len(batch.nodes), batch.edge_index.shape[1]) for batch in loader.batches(0)]
    assert loader.sizes(range(loader.num_steps)) == sizes
    assert all(batch.x.untyped_storage().nbytes() == batch.x.nbytes for batch in loader.batches(0)), "others stay alive"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied")
def test_asking_brings_pages_into_memory(tmp_path: Path) -> None:
    """A page dropped from the page cache is there again soon after it was asked for; its neighbours are not."""
    size, page = 64 * mmap.PAGESIZE, mmap.PAGESIZE
    path = tmp_path / "cold.bin"
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    array = single_pages(np.memmap(path, np.uint8, "r"))
    if resident(array, 20) or resident(array, 40):
        pytest.skip("this file system keeps what it was told to drop")
    will_need(array.ctypes.data + 20 * page + 5, 10)
    deadline = time.monotonic() + 10
    while not resident(array, 20) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert resident(array, 20)
    assert not resident(array, 40)


def resident(array: np.ndarray, page: int) -> bool:
    """Whether a page of a memory map is in memory."""
    state = (ctypes.c_ubyte * 1)()
    address = ctypes.c_void_p(array.ctypes.data + page * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(mmap.PAGESIZE), state) == 0
    return bool(state[0] & 1)


def test_bad_input(store: Any) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"part": "tran"}, "one of train"),
        ({"part": [0, 300]}, "nodes 0 to 299"),
        ({"part": [4, 5, 4]}, "1 duplicates"),
        ({"part": np.ones(300, bool)}, "list of node ids"),
        ({"seeds": 0}, "`seeds`"),
        ({"companions": -1}, "`companions`"),
        ({"prefetch": -1}, "`prefetch`"),
        ({"threads": 0}, "`threads`"),
        ({"together": 0}, "`together`"),
    ]
    for arguments, message in cases:
        with pytest.raises(DataError, match=message):
            SeedLoader(**{"store": store, "part": "train", "seed": 0, **arguments})
    loader = SeedLoader(store, "train", 16, (2,), seed=0)
    with pytest.raises(ValueError, match=f"0 to {loader.num_steps - 1}, got {loader.num_steps}"):
        loader.make(0, loader.num_steps)
    with pytest.raises(DataError, match="start_step"):
        SeedLoader(store, "train", seed=0).batches(0, start_step=-1)
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match="GPU"):
            SeedLoader(store, "train", seed=0, pin_memory=True)


def test_no_nodes_no_steps(store: Any) -> None:
    loader = SeedLoader(store, [], seed=0)
    assert loader.num_steps == 0
    assert list(loader.batches(0)) == []


def test_to_moves_every_tensor(store: Any) -> None:
    batch = next(SeedLoader(store, "train", 20, (2,), seed=0).batches(0)).to("meta")
    assert {batch.nodes.device.type, batch.x.device.type, batch.edge_index.device.type, batch.y.device.type} == {"meta"}
