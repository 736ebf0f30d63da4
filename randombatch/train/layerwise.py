"""SGFormer over all nodes of a graph on disk, with all neighbours and random batches, layer by layer.

In evaluation every layer but two is a function of single rows. A graph convolution gathers rows at random, so its input
goes to disk first; so do the rows of random-batch attention, in the order of the division (`shuffle.py`). Everything
else is computed on the way. The logits are those of `model.eval()(x, edges)` up to rounding: of float32, or of float16
where the store's features are float16 and so are the arrays on disk (unless a number does not fit into those).

Disk: two arrays of N x D for up to two convolutions or more and one attention layer (one more for a second attention
layer). Memory: blocks of some 8 MiB, and 24 bytes for each random batch; nothing else grows with N.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from randombatch.data.graph import DataError
from randombatch.data.in_rows import GraphInRows
from randombatch.data.store.budget import size as in_words
from randombatch.distributed.exchange import finish
from randombatch.division import Division
from randombatch.given_batches import GivenBatches
from randombatch.models.global_attention import GlobalAttention
from randombatch.models.sgformer import GraphBranch, PlainGraphBranch, SGFormer, TransformerBranch
from randombatch.train.lazy_rows import (
    BLOCK_BYTES,
    Arrays,
    Computed,
    Convolved,
    LazyRows,
    OnDisk,
    Overflow,
    Scaled,
    as_stored,
    spans,
)
from randombatch.train.scratch import scratch_folder
from randombatch.train.shuffle import Shuffled

Advance = Callable[[str, int, int], None]
FOLDER = ".layers-"
# Arrays of a block that are alive at a time.
BLOCKS = 16


@torch.no_grad()
def stream_logits(
    model: SGFormer,
    graph: GraphInRows,
    consume: Callable[[int, Tensor], None],
    *,
    scratch: Path,
    device: torch.device | str = "cpu",
    advance: Advance | None = None,
) -> None:
    """Hand the logits of all nodes to `consume(start, logits)`, in order, block by block.

    Args:
        model: in `eval()`, on the device.
        graph: on disk or in memory.
        consume: called for consecutive nodes from `start` on.
        scratch: folder in which temporary arrays are made and removed.
        device: where it is computed.
        advance: hears (layer, rows done, rows in all).

    Raises:
        DataError: there is too little disk space, with the numbers.
    """
    if model.training:
        raise ValueError("layer-wise inference is for a model in eval()")
    try:
        _stream(model, graph, consume, scratch, torch.device(device), advance, _dtype(graph))
    except Overflow:
        # Nothing was handed out yet: arrays are written before the first logits.
        _stream(model, graph, consume, scratch, torch.device(device), advance, np.float32)


def _stream(
    model: SGFormer,
    graph: GraphInRows,
    consume: Callable[[int, Tensor], None],
    scratch: Path,
    device: torch.device,
    advance: Advance | None,
    dtype: Any,
) -> None:
    check_disk(disk_needed(model, graph, dtype), graph.num_nodes, scratch)
    with scratch_folder(scratch, FOLDER) as folder:
        arrays = Arrays(folder, graph.num_nodes, dtype, device)
        stages = _Stages(graph.num_nodes, advance)
        x = OnDisk(graph.x, device)
        branches: list[LazyRows] = []
        if model.graph is not None:
            branches.append(_graph_branch(model.graph, x, graph, arrays, stages))
        branches.insert(0, _transformer_branch(model.trans, x, arrays, stages))
        width = max(model.out.in_features, model.out.out_features, graph.num_features)
        tell = stages("output")
        for start, stop in spans(graph.num_nodes, width):
            h, *rest = [rows.block(start, stop) for rows in branches]
            for g in rest:
                h = torch.cat([h, g], 1) if model.aggregate == "cat" else torch.lerp(h, g, model.graph_weight)
            consume(start, model.out(h))
            tell(stop - start)


def disk_needed(model: nn.Module, graph: GraphInRows, dtype: Any = None) -> int:
    """Bytes of temporary arrays at the most, of this type (default: what is tried first)."""
    assert isinstance(model, SGFormer)
    convolutions = 0
    if isinstance(model.graph, GraphBranch):
        convolutions = len(model.graph.layers)
    elif model.graph is not None:
        convolutions = len(model.graph.linears)
    batches = sum(a.attention in ("random-batch", "full") for a in _attentions(model.trans))
    arrays = max(min(2, convolutions), min(1, convolutions) + min(2, batches))
    return arrays * graph.num_nodes * _width(model) * np.dtype(dtype or _dtype(graph)).itemsize


def memory_of_inference(model: nn.Module, num_nodes: int) -> int:
    """Bytes that it holds at the most: arrays of a block, the random batches' places, and one whole batch."""
    largest = batches = 0
    if isinstance(model, SGFormer):
        for attention in _attentions(model.trans):
            if attention.attention in ("random-batch", "full"):
                items = attention.items_per_batch(num_nodes)
                batches = max(batches, -(-num_nodes // items))
                largest = max(largest, bytes_of_batch(items, attention.channels))
    return BLOCKS * BLOCK_BYTES + 24 * batches + largest


def bytes_of_batch(items: int, width: int) -> int:
    """Of attention in one batch without gradients: rows, and the weights of each pair."""
    return 4 * items * (8 * width + 2 * items)


def _width(model: SGFormer) -> int:
    linear = model.trans.stem.linear
    assert linear is not None
    return linear.out_features


def _dtype(graph: GraphInRows) -> Any:
    return np.float16 if graph.x.dtype == np.float16 else np.float32


def _attentions(branch: TransformerBranch) -> list[GlobalAttention]:
    return [a for a in branch.attentions if isinstance(a, GlobalAttention)]


def check_disk(layers: int, num_nodes: int, folder: Path, result: int = 0) -> None:
    """Refuse arrays of all nodes, and a result beside them, for which there is no room."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if layers + result > free:
        what = f"all {num_nodes:,} nodes layer by layer need {in_words(layers)}"
        if result:
            what = f"{what} and {in_words(result)} for the result" if layers else f"the result needs {in_words(result)}"
        raise DataError(
            f"{what} in {there}, where {in_words(free)} are free: free some, or choose another place, a narrower model "
            "or sampled evaluation"
        )


class _Stages:
    """Numbers the layers and tells how far each is."""

    def __init__(self, num_rows: int, advance: Advance | None) -> None:
        self.num_rows, self.advance = num_rows, advance

    def __call__(self, name: str) -> Callable[[int], None]:
        done = 0

        def tell(rows: int) -> None:
            nonlocal done
            done += rows
            if self.advance is not None:
                self.advance(name, done, self.num_rows)

        return tell


def _graph_branch(
    branch: GraphBranch | PlainGraphBranch, x: LazyRows, graph: GraphInRows, arrays: Arrays, stages: _Stages
) -> LazyRows:
    """Before each convolution its input goes to disk, and the one before is removed."""
    g, width, others, functions = _row_functions(branch, x)
    stored: OnDisk | None = None
    for number, function in enumerate(functions):
        before, stored = stored, arrays.stored(Scaled(graph, g), width, stages(f"convolution {number + 1}"))
        if before is not None:
            arrays.drop(before)
            # Its space is free when nobody has it mapped any more.
            del before
        g = Computed(function, Convolved(graph, stored), *others)
    return g


def _row_functions(
    branch: GraphBranch | PlainGraphBranch, x: LazyRows
) -> tuple[LazyRows, int, list[LazyRows], list[Callable[..., Tensor]]]:
    """What the first convolution gathers, its width, other inputs, and what is done behind each convolution."""
    if isinstance(branch, GraphBranch):
        first = Computed(branch.stem, x)
        assert branch.stem.linear is not None
        functions: list[Any] = [_convolution_end(branch, layer) for layer in branch.layers]
        return first, branch.stem.linear.out_features, [first], functions
    linears: Any = branch.linears
    # Each function also does the next layer's projection, so that what goes to disk is gathered as it is.
    functions = [_plain_end(branch, number) for number in range(len(linears))]
    return Computed(lambda rows: nnf.linear(rows, linears[0].weight), x), linears[0].out_features, [], functions


def _convolution_end(branch: GraphBranch, layer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def function(convolved: Tensor, first: Tensor) -> Tensor:
        g = torch.cat([convolved, first], 1) if branch.use_init else convolved
        return layer(g, first if branch.use_residual else None)

    return function


def _plain_end(branch: PlainGraphBranch, number: int) -> Callable[[Tensor], Tensor]:
    def function(convolved: Tensor) -> Tensor:
        g = convolved + branch.linears[number].bias  # type: ignore[operator]
        if number == len(branch.ends):
            return g
        return nnf.linear(branch.ends[number](g), branch.linears[number + 1].weight)  # type: ignore[arg-type]

    return function


def _transformer_branch(branch: TransformerBranch, x: LazyRows, arrays: Arrays, stages: _Stages) -> LazyRows:
    h: LazyRows = Computed(branch.stem, x)
    for number, (attention, end) in enumerate(zip(_attentions(branch), branch.ends, strict=True)):

        def finished(rows: Tensor, attended: Tensor, end: Any = end) -> Tensor:
            return end(torch.lerp(rows, attended, branch.alpha) if branch.use_residual else attended)

        name = f"attention {number + 1}"
        if attention.attention == "none":
            h = Computed(_attending(attention, finished), h)
        elif attention.attention == "origin":
            h = Computed(_linear_attention(attention, h, arrays.num_rows, finished, stages(name)), h)
        else:
            before, h = h, _in_batches(attention, h, arrays, finished, (stages(f"{name}, divided"), stages(name)))
            arrays.drop(before)
    return h


def _attending(attention: GlobalAttention, finished: Callable) -> Callable[[Tensor], Tensor]:
    return lambda rows: finished(rows, attention(rows))


def _in_batches(
    attention: GlobalAttention,
    h: LazyRows,
    arrays: Arrays,
    finished: Callable,
    advance: tuple[Callable[[int], None], Callable[[int], None]],
) -> Shuffled:
    """All rows shuffled on disk, then replaced, some batches at a time, by what attention makes of them."""
    if attention.eval_rounds != 1:
        raise ValueError(f"layer-wise inference takes one division, got `eval_rounds` {attention.eval_rounds}")
    (seed,) = attention.draw()
    division = Division(arrays.num_rows, attention.items_per_batch(arrays.num_rows), int(seed))
    shuffled = Shuffled(arrays.new(attention.channels), division, arrays.device).fill(h, advance[0])
    for first, starts, places in shuffled.batches(max(1, BLOCK_BYTES // (4 * attention.channels))):
        rows = torch.from_numpy(shuffled.array[places].astype(np.float32)).to(arrays.device)
        order = torch.arange(len(rows), device=rows.device)
        batches = GivenBatches(order, starts, division.batch_size, division.seed, first=first)
        attended = finish(attention.stages(rows, None, [], batches=batches))
        shuffled.array[places] = as_stored(finished(rows, attended), arrays.dtype)
        advance[1](len(rows))
    return shuffled


def _linear_attention(
    attention: GlobalAttention, h: LazyRows, num_rows: int, finished: Callable, tell: Callable[[int], None]
) -> Callable[[Tensor], Tensor]:
    """SGFormer's attention over all rows: one pass for the sums over keys, then a function of each row."""
    heads = attention.heads

    def split(rows: Tensor, linear: Any) -> Tensor:
        out = rows.repeat(1, heads) if linear is None else linear(rows)
        return out.view(len(rows), heads, -1)

    def unit(rows: Tensor) -> Tensor:
        return nnf.normalize(rows, dim=-1)

    products: Any = 0.0
    keys: Any = 0.0
    for start, stop in spans(num_rows, heads * attention.channels):
        rows = h.block(start, stop)
        k, v = unit(split(rows, attention.key)), split(rows, attention.value)
        products = products + torch.einsum("nhd,nhe->hde", k, v).double()
        keys = keys + k.sum(0).double()
        tell(stop - start)
    products, keys = products.float(), keys.float()

    def function(rows: Tensor) -> Tensor:
        q, v = unit(split(rows, attention.query)), split(rows, attention.value)
        numerator = torch.einsum("nhd,hde->nhe", q, products) + num_rows * v
        denominator = torch.einsum("nhd,hd->nh", q, keys) + num_rows
        return finished(rows, (numerator / denominator[..., None]).mean(1))

    return function
