"""From a source to a store, in bounded memory, resumable, all or nothing.

Stages: labels, splits, edges into buckets, buckets into the CSR, features. Labels and splits are small: what is wrong
with them is found before the long work begins. Edges come before features, so that the buckets are gone before the
features need their room on the disk.
"""

import shutil
import time
from pathlib import Path
from typing import Any

from randombatch.data.graph import DataError
from randombatch.data.options import one_of
from randombatch.data.raw import metric_name
from randombatch.data.store import kernels
from randombatch.data.store.budget import Plan, Watch, parse_size, size
from randombatch.data.store.csr import KEY, Advance, Keys, merge, partition
from randombatch.data.store.features import write_features
from randombatch.data.store.labels import write_labels
from randombatch.data.store.layout import FORMAT, VERSION, ShortFile, smallest
from randombatch.data.store.ordered import one_thread_each
from randombatch.data.store.parts import write_splits
from randombatch.data.store.sources.base import Source
from randombatch.data.store.workspace import Workspace
from randombatch.machine import highest_resident, machine, resident_anonymous
from randombatch.version import __version__

FEATURES = ("float16", "float32")
MAX_MEMORY = 4 << 30


def prepare(
    source: Source,
    path: str | Path,
    *,
    max_memory: int | str = MAX_MEMORY,
    undirected: bool = True,
    features: str | None = None,
    metric: str | None = None,
    skip_bad: bool = False,
    advance: Advance = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write the graph of a source as a store.

    A killed or interrupted call goes on where it was if it is called again.

    Args:
        source: see `open_source`.
        path: the folder to make; it must not exist.
        max_memory: bytes (or "4GiB") of anonymous memory that the process may hold, everything included.
        undirected: store both directions of every edge.
        features: "float16" or "float32" instead of the source's.
        metric: "accuracy", "roc_auc" or "f1" instead of the source's.
        skip_bad: leave out lines of text that hold no edge, instead of refusing the file.
        advance: called with (stage, done, total).

    Returns:
        Settings, machine, one row of figures and ratios, as every `--json` file has them.

    Raises:
        DataError: bad input, too little memory or disk; nothing is left behind.

    Cost: time linear in edges and features. Disk, beside the result, 8 bytes per arc before the features are written.
    """
    path = Path(path).expanduser().absolute()
    max_memory = parse_size(max_memory)
    if not isinstance(undirected, bool):
        raise DataError(f"`undirected` must be True or False, got {undirected!r}")
    features = one_of("features", features or source.feature_dtype, FEATURES)
    source.metric = metric_name(metric or source.metric)
    settings = {"source": source.where, "undirected": undirected, "features": features, "metric": source.metric}
    begun_by = {"program": __version__, "identity": source.identity, "skip_bad": skip_bad}
    work = Workspace(path, settings | begun_by)
    start = time.perf_counter()
    with Watch() as watch, one_thread_each(), work.opened():
        seconds = dict(work.stage("seconds"))
        try:
            figures = _run(source, work, max_memory, undirected, features, skip_bad, advance, seconds)
        except ShortFile:
            work.restart()
            figures = _run(source, work, max_memory, undirected, features, skip_bad, advance, {})
    elapsed = time.perf_counter() - start
    return _report(figures, settings | {"max_memory": max_memory}, watch.peak, elapsed, work.resumed)


def _run(
    source: Source, work: Workspace, max_memory: int, undirected: bool, features: str, skip_bad: bool,
    advance: Advance, seconds: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    plan, keys = _plan(source, work, max_memory, undirected, features)
    began = time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal began
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began
        began = time.perf_counter()
        work.note("seconds", seconds)

    labels = write_labels(source, work, advance)
    splits = write_splits(source, work, labels, advance)
    lap("labels and splits")
    edges = partition(source, keys, plan, undirected, skip_bad, work, advance)
    lap("edges")
    csr = merge(keys, edges, plan, work, advance)
    if not csr["arcs"]:
        raise DataError(f"{source.where} has no edges between different nodes: there is nothing to pass along")
    lap("sort")
    x = write_features(source, features, plan, work, advance)
    lap("features")
    arrays = {"x": x, "indptr": csr["indptr"], "indices": csr["indices"], "y": labels["entry"], **splits["entries"]}
    kept = sum(edges["lengths"]) // KEY
    description = {
        "format": FORMAT, "version": VERSION, "name": source.name, "source": source.where, "metric": source.metric,
        "num_nodes": source.num_nodes, "num_edges": csr["arcs"], "num_features": source.num_features,
        "num_classes": labels["num_classes"], "num_splits": splits["num_splits"], "undirected": undirected,
        "removed": {"self_loops": edges["self_loops"], "duplicates": kept - csr["arcs"], "bad_lines": edges["bad"]},
        "warnings": splits["warnings"], "arrays": arrays,
    }  # fmt: skip
    work.finish(description)
    return {"description": description, "edges": edges["edges"], "seconds": seconds}


def _plan(source: Source, work: Workspace, max_memory: int, undirected: bool, features: str) -> tuple[Plan, Keys]:
    """What is held at a time. The cut into pieces stays as it was noted first, or the pieces would not be the same.

    Where the budget does not allow such pieces any more, the stage that was cut into them begins anew.
    """
    kernels.warm()
    held = resident_anonymous() or highest_resident()
    plan = Plan.of(max_memory, held, source.held_bytes)
    arcs = source.edge_bound * (2 if undirected else 1)
    keys = Keys.of(source.num_nodes, arcs, plan)
    _check_disk(source, work, arcs, features)
    noted = work.stage("plan")
    if noted:
        # The same budget allows a little more or less from call to call: that is no reason.
        if max_memory < noted.get("max_memory", 0):
            for stage, key in (("partition", "chunk_edges"), ("features", "chunk_bytes")):
                if noted[key] > getattr(plan, key) and not work.stage(stage).get("done"):
                    work.journal["stages"][stage] = {}
                    noted[key] = getattr(plan, key)
            work.note("plan", noted | {"max_memory": max_memory})
        plan = Plan(chunk_edges=noted["chunk_edges"], chunk_bytes=noted["chunk_bytes"], bucket_bytes=plan.bucket_bytes)
        return plan, Keys(num_nodes=source.num_nodes, bits=keys.bits, shift=noted["shift"])
    noted = {"chunk_edges": plan.chunk_edges, "chunk_bytes": plan.chunk_bytes, "shift": keys.shift}
    work.note("plan", noted | {"max_memory": max_memory})
    return plan, keys


def _check_disk(source: Source, work: Workspace, arcs: int, features: str) -> None:
    """Refuse at the start what cannot fit."""
    x = source.num_nodes * source.num_features * (2 if features == "float16" else 4)
    small = (source.num_nodes + 1) * smallest("indptr", arcs).itemsize
    small += source.num_nodes * (2 + 4 * source.default_splits)
    needed = small + max(KEY * arcs, arcs * smallest("indices", source.num_nodes - 1).itemsize + x)
    free = shutil.disk_usage(work.folder).free + work.used()
    if needed > free:
        raise DataError(
            f"{work.path} needs up to {size(needed)} of disk ({source.num_nodes:,} nodes, {arcs:,} arcs, {size(x)} of "
            f"features), {size(free)} are free: make room or choose another place"
        )


def _report(
    figures: dict[str, Any], settings: dict[str, Any], peak: int, elapsed: float, resumed: bool
) -> dict[str, Any]:
    description, edges, seconds = figures["description"], figures["edges"], figures["seconds"]
    total = sum(seconds.values())
    row = {
        "name": "prepare", "nodes": description["num_nodes"], "edges": edges, "arcs": description["num_edges"],
        "removed": description["removed"], "seconds": total, "stage_seconds": seconds, "this_call_seconds": elapsed,
        "edges_per_s": edges / total, "peak_bytes": peak, "resumed": resumed, "warnings": description["warnings"],
    }  # fmt: skip
    ratios = {"prepare_edges_per_s": edges / total, "prepare_peak_bytes": peak}
    return {"settings": settings, "machine": machine(), "rows": [row], "ratios": ratios}
