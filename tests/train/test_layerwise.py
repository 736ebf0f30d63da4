"""Layer-wise inference: the logits of the model in memory, in bounded memory, leaving nothing behind."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.in_rows import GraphInRows, of_store
from randombatch.data.store import write_store
from randombatch.models.propagation import Adjacency
from randombatch.models.sgformer import SGFormer
from randombatch.train import layerwise, lazy_rows, shuffle
from randombatch.train.layerwise import disk_needed, stream_logits

N = 501
EDGES = np.random.default_rng(1).integers(0, N, (2, 1500))
EDGES[0, :400] = 17  # a hub


def arrays(features: str) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((N, 9)).astype(np.float32)
    return {"x": x.astype(features), "edge_index": EDGES[:, EDGES[0] != 30], "y": rng.integers(0, 4, N)}


@pytest.fixture(scope="module", params=[True, False], ids=["undirected", "directed"])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphInRows:
    path = tmp_path_factory.mktemp("graph") / "store"
    return of_store(write_store(path, **arrays("float32"), undirected=request.param))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 40 rows at a time, 100 in a group."""
    for module in (lazy_rows, layerwise):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 8 * 40)
    monkeypatch.setattr(shuffle, "GROUP_BYTES", 4 * 8 * 100)


def trained(**options: Any) -> SGFormer:
    """A model whose weights and running statistics are not those of the beginning."""
    torch.manual_seed(5)
    model = SGFormer(9, 8, 4, **{"batch_size": 16, "gnn_num_layers": 2, **options})
    x, edges = torch.randn(80, 9) + 0.5, torch.randint(0, 80, (2, 300))
    for _ in range(3):
        model(x, edges)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def in_memory(model: SGFormer, graph: GraphInRows) -> Tensor:
    target = np.repeat(np.arange(N), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([graph.indices, target]).astype(np.int64))
    with torch.no_grad():
        return model(torch.from_numpy(graph.x.astype(np.float32)), Adjacency(edges, N))


def streamed(model: SGFormer, graph: GraphInRows, scratch: Path, **options: Any) -> Tensor:
    pieces: list[Tensor] = []

    def consume(start: int, logits: Tensor) -> None:
        assert start == sum(map(len, pieces))
        pieces.append(logits)

    stream_logits(model, graph, consume, scratch=scratch, **options)
    assert len(pieces) > 5, "it came in one piece"
    assert list(scratch.iterdir()) == []
    return torch.cat(pieces)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "two attention layers": {"trans_num_layers": 2},
    "three attention layers, heads": {"trans_num_layers": 3, "trans_num_heads": 2},
    "no attention": {"attention": "none", "trans_num_layers": 2},
    "origin": {"attention": "origin", "trans_num_layers": 2, "trans_num_heads": 2},
    "origin without weights": {"attention": "origin", "trans_use_weight": False},
    "full": {"attention": "full"},
    "no residual, no norm": {"trans_use_residual": False, "trans_use_bn": False, "trans_use_act": True},
    "init": {"gnn_use_init": True, "gnn_num_layers": 3},
    "propagation": {"gnn_use_weight": False, "gnn_use_bn": False, "gnn_use_act": False, "gnn_num_layers": 3},
    "no graph residual": {"gnn_use_residual": False},
    "plain": {"gnn_plain": True, "gnn_num_layers": 3},
    "one plain layer": {"gnn_plain": True, "gnn_num_layers": 1},
    "side by side": {"aggregate": "cat"},
    "no graph": {"use_graph": False},
    "no layers": {"gnn_num_layers": 0, "trans_num_layers": 0},
    "batch larger than a block": {"batch_size": 200},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_model_in_memory(graph: GraphInRows, tmp_path: Path, variant: str) -> None:
    model = trained(**VARIANTS[variant])
    expected = in_memory(model, graph)
    assert expected.std() > 0.01
    torch.testing.assert_close(streamed(model, graph, tmp_path), expected, atol=2e-5, rtol=1e-4)


def test_random_batches_are_those_of_evaluation(graph: GraphInRows, tmp_path: Path) -> None:
    """Another division gives other logits: equality above is not for lack of effect."""
    model = trained(alpha=0.9, graph_weight=0.1)
    here = streamed(model, graph, tmp_path)
    setattr(model.trans.attentions[0], "eval_seed", 99)  # noqa: B010
    assert not torch.allclose(here, in_memory(model, graph), atol=1e-3)
    torch.testing.assert_close(streamed(model, graph, tmp_path), in_memory(model, graph), atol=2e-5, rtol=1e-4)


def test_half_precision_on_disk(tmp_path: Path) -> None:
    graph = of_store(write_store(tmp_path / "store", **arrays("float16")))
    (tmp_path / "scratch").mkdir()
    model = trained(gnn_use_init=True)
    torch.testing.assert_close(
        streamed(model, graph, tmp_path / "scratch"), in_memory(model, graph), atol=2e-2, rtol=1e-2
    )


@pytest.mark.parametrize("branch", ["graph", "trans"])
def test_what_half_precision_cannot_hold_is_kept_in_single(tmp_path: Path, branch: str) -> None:
    """Rows beyond 65504 on their way to a convolution or to attention."""
    graph = of_store(write_store(tmp_path / "store", **arrays("float16")))
    (tmp_path / "scratch").mkdir()
    model = trained(trans_use_bn=False, gnn_use_bn=False, trans_use_act=False)
    with torch.no_grad():
        for parameter in getattr(model, branch).stem.parameters():
            parameter.mul_(1e6)
    expected = in_memory(model, graph)
    assert expected.isfinite().all()
    found = streamed(model, graph, tmp_path / "scratch")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert list((tmp_path / "scratch").iterdir()) == []


def held_in(folder: Path) -> int:
    """Bytes of files, removed ones too as long as they are mapped."""
    sizes = {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        span, *_, name = line.split(maxsplit=5)
        if name.startswith(str(folder)) and name.endswith(" (deleted)"):
            first, last = (int(number, 16) for number in span.split("-"))
            sizes[name] = last - first
    return sum(sizes.values())


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("variant", ["default", "plain", "two attention layers", "no graph", "no attention"])
def test_the_disk_that_it_needs_is_what_it_says(
    graph: GraphInRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, crowded: bool
) -> None:
    monkeypatch.setattr("randombatch.train.lazy_rows.is_cold", lambda *_: crowded)
    monkeypatch.setattr("randombatch.train.lazy_rows.DROPPED", 1000)
    model, most = trained(**VARIANTS[variant]), 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, held_in(tmp_path))

    found = streamed(model, graph, tmp_path, advance=look)
    torch.testing.assert_close(found, in_memory(model, graph), atol=2e-5, rtol=1e-4)
    assert most == disk_needed(model, graph)
    if most:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": most - 1}))
        with pytest.raises(DataError, match=r"501 nodes layer by layer need .* KiB in .* are free"):
            streamed(model, graph, tmp_path)


def test_a_failure_leaves_nothing_behind(graph: GraphInRows, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_logits(trained(), graph, fail, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "place", "value"), [("indices", 5, N), ("indices", 5, -1), ("indptr", 40, 10**6)])
def test_corrupt_arrays_are_refused(graph: GraphInRows, tmp_path: Path, name: str, place: int, value: int) -> None:
    """Not read out of bounds."""
    array = np.array(getattr(graph, name)).astype(np.int64)
    array[place] = value
    with pytest.raises(DataError, match="arrays are corrupt"):
        streamed(trained(), dataclasses.replace(graph, **{name: array}), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="space cannot be asked for")
def test_a_disk_that_fills_up_is_noticed(graph: GraphInRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"15\.66 KiB cannot be had in .* \(No space left on device\)"):
        streamed(trained(), graph, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_the_end(graph: GraphInRows, tmp_path: Path) -> None:
    told: dict[str, int] = {}
    streamed(trained(), graph, tmp_path, advance=lambda name, done, total: told.update({name: done - total}))
    assert told == {"convolution 1": 0, "convolution 2": 0, "attention 1, divided": 0, "attention 1": 0, "output": 0}


CHANGES: dict[str, Callable[[SGFormer], Any]] = {
    r"for a model in eval\(\)": lambda model: model.train(),
    "takes one division": lambda model: setattr(model.trans.attentions[0], "eval_rounds", 2),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_it_cannot_do_is_refused(graph: GraphInRows, tmp_path: Path, message: str) -> None:
    model = trained()
    CHANGES[message](model)
    with pytest.raises(ValueError, match=message):
        streamed(model, graph, tmp_path)
