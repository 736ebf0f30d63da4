"""Random batch attention on given query, key and value, as one operator that streams through blocks of batches.

Nothing but the inputs is kept for the backward pass, which computes each block's weights again. The division enters
as its seed (a tensor, so that a compiled graph need not be compiled anew for every step) and is unrolled inside.

Shapes: B leading, H heads of the query, K heads of key and value (H is a multiple), L rows, D and E widths;
in a block C batches of P items.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from randombatch.attention import buffers
from randombatch.attention.rows import refuse_second_derivatives
from randombatch.attention.softmax import Softmax, compute_dtype, dropout_scale
from randombatch.division import Division


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restriction:
    """What weighs on the logits beside sharing a batch."""

    padding_BL: Tensor | None
    mask: Tensor | None
    is_causal: bool
    self_correction: bool
    division: Division

    def bias(self, rows_CP: Tensor, lead: slice, dtype: torch.dtype) -> Tensor | None:
        """The sum of all of them for one block: broadcasts to `(B, H, C, P, P)`, or None where nothing weighs."""
        terms = []
        if self.mask is not None:
            mask = self.mask if self.mask.shape[0] == 1 else self.mask[lead]
            queries, keys = _places(mask, rows_CP)
            terms.append(_additive(mask[:, :, queries, keys], dtype))
        if self.padding_BL is not None:
            terms.append(_additive(~self.padding_BL[lead][:, rows_CP], dtype)[:, None, :, None, :])
        if self.is_causal:
            terms.append(_additive(rows_CP[:, :, None] >= rows_CP[:, None, :], dtype)[None, None])
        if self.self_correction and rows_CP.shape[1] > 1:
            others = ~torch.eye(rows_CP.shape[1], dtype=torch.bool, device=rows_CP.device)
            terms.append(others * self._correction(rows_CP, lead).to(dtype)[:, None, :, None, None])
        return sum(terms[1:], terms[0]) if terms else None

    def _correction(self, rows_CP: Tensor, lead: slice) -> Tensor:
        """log((N - 1) / (s - 1)), `(B | 1, C)`: N valid items of the graph, s valid items of the batch."""
        graph_C = self.division.graph_of(rows_CP[:, 0])
        if self.padding_BL is None:
            total = self.division.graph_sizes.to(graph_C.device)[None, graph_C]
            here = torch.full_like(total, rows_CP.shape[1])
        else:
            total = self._valid_BG[lead][:, graph_C]
            here = (~self.padding_BL[lead][:, rows_CP]).sum(-1)
        return torch.where(here > 1, (total - 1).double() / (here - 1), 1.0).log()

    @functools.cached_property
    def _valid_BG(self) -> Tensor:
        """How many items of each graph are not padding."""
        assert self.padding_BL is not None
        order = self.division.order(device=self.padding_BL.device)
        valid = (~self.padding_BL)[:, order].long()
        counts = valid.new_zeros(len(valid), self.division.graph_sizes.numel())
        return counts.index_add_(1, self.division.graph_of(order), valid)


def _places(mask: Tensor, rows_CP: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys in a mask `(B, H, L | 1, L | 1)`, which broadcast to `(C, P, P)`."""
    return rows_CP[:, :, None] * (mask.shape[2] > 1), rows_CP[:, None, :] * (mask.shape[3] > 1)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean permission as a term of the logits; numbers pass through."""
    if allowed.dtype != torch.bool:
        return allowed.to(dtype)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


class _Table:
    """The rows of a `(B, H, L, D)` tensor as a flat table, whichever of its leading dimensions varies fastest."""

    def __init__(self, x_BHLD: Tensor) -> None:
        width = x_BHLD.shape[3]
        strides = x_BHLD.stride()[:3]
        dense = sorted(zip(strides, x_BHLD.shape[:3], strict=True)) if width else []
        expected = width
        for stride, size in dense:
            if size != 1 and stride != expected:
                x_BHLD = x_BHLD.contiguous()
                break
            expected *= size
        if x_BHLD.stride(3) != 1:
            x_BHLD = x_BHLD.contiguous()
        self.steps = tuple(s // max(1, width) for s in x_BHLD.stride()[:3])
        self.shape = x_BHLD.shape
        self.flat = x_BHLD.as_strided((x_BHLD.numel() // max(1, width), width), (width, 1))

    def index(self, rows: Tensor, lead: slice) -> Tensor:
        """Flat rows `(B, H, len(rows))` of these rows for some of the leading dimension."""
        b, h, length = self.steps
        device = rows.device
        leading = torch.arange(self.shape[0], device=device)[lead, None, None] * b
        heads = torch.arange(self.shape[1], device=device)[:, None] * h
        return (leading + heads + rows * length).flatten()


@dataclasses.dataclass
class _Block:
    """One block, gathered: query (scaled), key and value with equal numbers of heads, and its weights."""

    rows_CP: Tensor
    lead: slice
    softmax: Softmax


def _stream(
    scratch: buffers.Scratch,
    division: Division,
    tables: tuple[_Table, _Table, _Table],
    restriction: Restriction,
    dropout_p: float,
    scale: float,
) -> Iterator[_Block]:
    """Gather each block and compute its weights: the part that forward and backward share."""
    q_table, k_table, v_table = tables
    batch, heads, _, width = q_table.shape
    device = scratch.device
    widest = max(width, v_table.shape[3], min(division.batch_size, division.num_items))
    budget = buffers.rows_per_block(widest, device)
    for rows_CP in division.blocks(max(1, budget // (batch * heads)), device):
        leads = max(1, budget // (heads * rows_CP.numel()))
        for first in range(0, batch, leads):
            lead = slice(first, min(first + leads, batch))
            q = _gather(scratch, "q", q_table, rows_CP, lead, heads).mul_(scale)
            k = _gather(scratch, "k", k_table, rows_CP, lead, heads)
            v = _gather(scratch, "v", v_table, rows_CP, lead, heads)
            softmax = Softmax(scratch, q, k, v)
            bias = restriction.bias(rows_CP, lead, scratch.dtype)
            softmax.weigh(bias, (lead.stop - first, heads, len(rows_CP)))
            if dropout_p:
                numbers = torch.arange(first * heads, lead.stop * heads, device=device)
                keep = dropout_scale(division.ids_of(rows_CP), numbers, dropout_p, division.seed, scratch.dtype)
                softmax.drop(keep.view_as(softmax.weights))
            yield _Block(rows_CP, lead, softmax)


def _gather(scratch: buffers.Scratch, name: str, table: _Table, rows_CP: Tensor, lead: slice, heads: int) -> Tensor:
    """A block's rows as `(G, P, width)`, each head repeated for all of the query's that it serves."""
    rows = rows_CP.flatten()
    taken = buffers.take_rows(scratch, name, table.flat, table.index(rows, lead))
    taken = taken.view(lead.stop - lead.start, table.shape[1], 1, rows.numel(), table.shape[3])
    taken = taken.expand(-1, -1, heads // table.shape[1], -1, -1)
    return taken.reshape(-1, rows_CP.shape[1], table.shape[3])


@torch.library.custom_op("randombatch::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seed: Tensor,
    batch_size: int,
    ptr: Tensor | None,
    rows: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    self_correction: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Attention of `(B, H, L, D)` inside each batch of the division named by seed, batch size, `ptr` and `rows`.

    `rows` (item -> row) may name some of the rows only; the others come out as zero.
    """
    division = named_division(query.shape[2], seed, batch_size, ptr, rows)
    out_BHLE = buffers.new_rows(query, *query.shape[:3], value.shape[3], zero=division.num_items < query.shape[2])
    restriction = Restriction(
        padding_BL=padding, mask=mask, is_causal=is_causal, self_correction=self_correction, division=division
    )
    scratch = buffers.Scratch(query.device, compute_dtype(query.dtype))
    tables = _Table(query), _Table(key), _Table(value)
    table = _Table(out_BHLE)
    for block in _stream(scratch, division, tables, restriction, dropout_p, scale):
        out_GPE = block.softmax.attend(scratch("out", *block.softmax.v.shape))
        index = table.index(block.rows_CP.flatten(), block.lead)
        buffers.put_rows(table.flat, index, out_GPE.view(-1, out_GPE.shape[2]))
    return out_BHLE


def named_division(num_rows: int, seed: Tensor, batch_size: int, ptr: Tensor | None, rows: Tensor | None) -> Division:
    """The division that an operator's arguments name."""
    return Division(num_rows if rows is None else rows.numel(), batch_size, int(seed), ptr=ptr)._on_rows(rows)


@attention.register_fake
def _(query, key, value, *_):
    return query.new_empty((*query.shape[:3], value.shape[3]))


@torch.library.custom_op("randombatch::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seed: Tensor,
    batch_size: int,
    ptr: Tensor | None,
    rows: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    self_correction: bool,
    dropout_p: float,
    scale: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and (where asked for, else empty) the additive mask."""
    division = named_division(query.shape[2], seed, batch_size, ptr, rows)
    dq, dk, dv = (buffers.new_rows(x, *x.shape, zero=division.num_items < query.shape[2]) for x in (query, key, value))
    dmask = grad.new_empty(0)
    if mask_grad and mask is not None:
        dmask = mask.new_zeros(mask.shape, dtype=compute_dtype(mask.dtype))
    restriction = Restriction(
        padding_BL=padding, mask=mask, is_causal=is_causal, self_correction=self_correction, division=division
    )
    scratch = buffers.Scratch(query.device, compute_dtype(query.dtype))
    tables = _Table(query), _Table(key), _Table(value)
    grad_table, grad_tables = _Table(grad), (_Table(dq), _Table(dk), _Table(dv))
    for block in _stream(scratch, division, tables, restriction, dropout_p, scale):
        rows_flat, softmax = block.rows_CP.flatten(), block.softmax
        do_GPE = buffers.take_rows(scratch, "grad", grad_table.flat, grad_table.index(rows_flat, block.lead))
        parts = scratch("dq", *softmax.q.shape), scratch("dk", *softmax.k.shape), scratch("dv", *softmax.v.shape)
        dlogits = softmax.backward(do_GPE.view_as(softmax.v), *parts)
        parts[0].mul_(scale)
        for table, part in zip(grad_tables, parts, strict=True):
            buffers.put_rows(table.flat, table.index(rows_flat, block.lead), _sum_groups(part, table, block, rows_flat))
        if mask_grad:
            _add_mask_gradient(dmask, dlogits, block)
    return dq, dk, dv, dmask.to(mask.dtype) if mask_grad and mask is not None else dmask


def _sum_groups(part_GPD: Tensor, table: _Table, block: _Block, rows: Tensor) -> Tensor:
    """Add up the gradients of the query heads that shared one key head."""
    batch, heads, width = block.lead.stop - block.lead.start, table.shape[1], part_GPD.shape[2]
    parts = part_GPD.view(batch, heads, -1, rows.numel(), width)
    return (parts.sum(2) if parts.shape[2] > 1 else parts).reshape(-1, width)


def _add_mask_gradient(dmask: Tensor, dlogits_GPP: Tensor, block: _Block) -> None:
    batches, size = block.rows_CP.shape
    part = dlogits_GPP.view(block.lead.stop - block.lead.start, -1, batches, size, size)
    target = dmask if dmask.shape[0] == 1 else dmask[block.lead]
    # Each place once: what shares one is added up.
    tall, wide = dmask.shape[2] > 1, dmask.shape[3] > 1
    once = slice(None if tall or wide else 1), slice(None if tall else 1), slice(None if wide else 1)
    queries, keys = (places[once] for places in torch.broadcast_tensors(*_places(dmask, block.rows_CP)))
    target[:, :, queries, keys] += part.sum_to_size(*target.shape[:2], *queries.shape).to(dmask.dtype)


@attention_backward.register_fake
def _(grad, query, key, value, seed, batch_size, ptr, rows, padding, mask, *rest):
    mask_grad = rest[-1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    dmask = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device) if mask_grad else grad.new_empty(0)
    return dq, dk, dv, dmask


def _setup(ctx, inputs, output):
    query, key, value, seed, batch_size, ptr, rows, padding, mask, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, seed, ptr, rows, padding, mask)
    ctx.batch_size = batch_size


def _backward(ctx, grad):
    query, key, value, seed, ptr, rows, padding, mask = ctx.saved_tensors
    mask_grad = ctx.needs_input_grad[8]
    arguments = (query, key, value, seed, ctx.batch_size, ptr, rows, padding, mask, *ctx.rest)
    dq, dk, dv, dmask = attention_backward(grad, *arguments, mask_grad)
    return dq, dk, dv, None, None, None, None, None, dmask if mask_grad else None, None, None, None, None


attention.register_autograd(_backward, setup_context=_setup)
attention_backward.register_autograd(refuse_second_derivatives)
