"""What is computed in a layer's blocks, forward and backward, one block after the other.

    q, k, v = x W_in' + b_in     (heads split),     o = attention(q, k, v),     y = o W_out' + b_out

Written in the part of Python that TorchScript takes, see `compiled`. Everything goes into buffers that a block's `Room`
and `WayBack` name; `layer_block.py` makes them.

Shapes: R rows of a block, F input width, W stacked widths of the projections, H heads, D width of a head, P items in a
batch, G = (batches of the block) x H.
"""

import functools
import math
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Whole rows are taken as items of 16 bytes where they can: torch takes them item by item.
WIDE = torch.complex128

_compiling = threading.Lock()


class Table(NamedTuple):
    """Rows, and the same memory as wide items (or once more the rows, where it cannot be seen so)."""

    rows: Tensor
    wide: Tensor


class Room(NamedTuple):
    """A layer's weights and a block's buffers.

    Attributes:
        softmax: whether that is the kernel; else SGFormer's.
        parts: query, key and value; or (2) query and value, the input being the key.
        w_in_t: `(F, W)`.
        held: in one run of memory `x`, projections, and of the softmax `weights` and (if that is projected)
            `attended`, of SGFormer's kernel `norms`.
        projected: `(R, W)`.
        stacked: the projections once more, `(parts, H, R, D)`; None for one head.
        q, k, v: `(G, P, D)`, views of the projections; no k if the input is the key.
        weights: of the softmax, `(G, P, P)`.
        out: what was attended to, `(G, P, D)`; `attended` is the same as `(R, H D)`.
        norms: of SGFormer's kernel: of q and k before they were divided by them.
        sums: of SGFormer's kernel: k' v, sum of k, denominators.
    """

    softmax: bool
    heads: int
    parts: int
    w_in_t: Tensor
    b_in: Tensor | None
    w_out: Tensor | None
    b_out: Tensor | None
    held: Tensor
    x: Table
    projected: Tensor
    stacked: Tensor | None
    q: Tensor
    k: Tensor | None
    v: Tensor
    weights: Tensor
    out: Tensor
    attended: Tensor
    norms: list[Tensor]
    sums: list[Tensor]


class WayBack(NamedTuple):
    """A block's buffers for the backward pass, and the gradients of weights that it adds to.

    Attributes:
        grad: rows of the output's gradient.
        dattended, dout: gradient of what was attended to, `(R, H D)` and `(G, P, D)`.
        dlogits: `(G, P, P)`.
        dparts: gradients of the projections, `(parts, G, P, D)`, which lie in `dq`, `dk` and `dv`; no `dk` if the input
            is the key, whose gradient it is part of.
        dprojected: the same as products take them, `(parts, R, D)` for one head, else `(1, R, W)`.
        w_in: the weights that belong to them.
        dsums: of SGFormer's kernel.
        ones: `(len(dprojected), 1, R)`.
        w_in_sums, b_in_sums: side by side like `dprojected`: each alone is a short product that threads share badly.
    """

    grad: Table
    dattended: Tensor
    dout: Tensor
    dlogits: Tensor
    dparts: Tensor
    dq: Tensor
    dk: Tensor | None
    dv: Tensor
    dprojected: Tensor
    w_in: list[Tensor]
    dsums: list[Tensor]
    ones: Tensor
    w_in_sums: Tensor
    b_in_sums: Tensor
    w_out_sum: Tensor
    b_out_sum: Tensor


class Some(NamedTuple):
    """Blocks of one shape.

    Attributes:
        rows, homes: of each block, flat: of the input and of the output.
        first: the first of `rows` if the others follow it in order, so that they need not be taken; else -1.
        first_home: the same for `homes`.
        kept: what is, or will be, kept of each block: the end of its `held`. Nothing if nothing is kept.
        factors: of the softmax weights (dropout), like `weights`. Nothing if nothing is dropped.
    """

    rows: list[Tensor]
    homes: list[Tensor]
    first: list[int]
    first_home: list[int]
    kept: list[Tensor]
    factors: list[Tensor]


def forward_blocks(room: Room, some: Some, x: Table, results: Tensor) -> None:
    """Write each block's output to `results`, `(blocks, R, output width)`, and what is to be kept."""
    for i in range(len(some.rows)):
        x_RF = take(room.x, x, some.rows[i], some.first[i])
        project(room, x_RF)
        output(room, room.weights if len(some.factors) == 0 else room.weights * some.factors[i], results[i])
        if len(some.kept) > 0:
            kept = some.kept[i]
            kept.copy_(room.held[room.held.numel() - kept.numel() :])


def backward_blocks(room: Room, way: WayBack, some: Some, x: Table, grad: Table, results: Tensor | None) -> None:
    """Write the input's gradient to `results`, `(blocks, R, F)`, if it is needed, and add to those of weights."""
    for i in range(len(some.rows)):
        x_RF = room.x.rows
        # What is kept may bring the rows of x along, to where they are expected.
        if len(some.kept) == 0 or some.kept[i].numel() < room.held.numel():
            x_RF = take(room.x, x, some.rows[i], some.first[i])
        if len(some.kept) > 0:
            kept = some.kept[i]
            room.held[room.held.numel() - kept.numel() :].copy_(kept)
        else:
            project(room, x_RF)
        # SGFormer's kernel writes to these rows: it takes a copy even where they stand in order.
        grad_RF = take(way.grad, grad, some.homes[i], some.first_home[i] if room.softmax else -1)
        factors: Tensor | None = None
        weights = room.weights
        if len(some.factors) > 0:
            factors = some.factors[i]
            weights = room.weights * some.factors[i]
        # What was attended to is needed for the denominators' gradient, or for that of an output projection.
        if not room.softmax or (room.w_out is not None and len(some.kept) == 0):
            attend(room, weights, room.out)
        dx_RF: Tensor | None = None
        if results is not None:
            dx_RF = results[i]
        backward(room, way, x_RF, grad_RF, weights, factors, dx_RF)


def take(to: Table, table: Table, rows: Tensor, first: int) -> Tensor:
    """These rows of a table, where they stand if they begin with `first`, else in `to`."""
    if first >= 0 and table.rows.dtype == to.rows.dtype:
        return table.rows[first : first + rows.numel()]
    if to.wide.dtype == table.wide.dtype:
        # PyTorch Geometric puts a function of its own into the place of `torch.index_select`.
        torch.ops.aten.index_select(table.wide, 0, rows, out=to.wide)
    elif to.rows.dtype == table.rows.dtype:
        torch.ops.aten.index_select(table.rows, 0, rows, out=to.rows)
    else:
        to.rows.copy_(torch.ops.aten.index_select(table.rows, 0, rows))
    return to.rows


def linear(out: Tensor, x: Tensor, weight_t: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight_t, out=out)
    else:
        torch.addmm(bias, x, weight_t, out=out)


def key(room: Room, x_RF: Tensor) -> Tensor:
    k = room.k
    return x_RF.view(room.q.size()) if k is None else k


def project(room: Room, x_RF: Tensor) -> None:
    """Projections, and what each kernel makes of them first: softmax weights, or rows of norm one."""
    linear(room.projected, x_RF, room.w_in_t, room.b_in)
    stacked = room.stacked
    if stacked is not None:
        split = room.projected.view(room.projected.size(0), room.parts, room.heads, -1)
        stacked.copy_(split.permute(1, 2, 0, 3))
    if room.softmax:
        torch.bmm(room.q, key(room, x_RF).transpose(1, 2), out=room.weights)
        torch.softmax(room.weights, -1, out=room.weights)
    else:
        normalise(room.q, room.norms[0])
        normalise(key(room, x_RF), room.norms[1])


def output(room: Room, weights: Tensor, y: Tensor) -> None:
    """A block's output."""
    w_out, b_out = room.w_out, room.b_out
    if w_out is not None:
        attend(room, weights, room.out)
        linear(y, room.attended, w_out.t(), b_out)
        return
    # There is one head then.
    attend(room, weights, y.view(room.out.size()))
    if b_out is not None:
        y.add_(b_out)


def attend(room: Room, weights: Tensor, to: Tensor) -> None:
    """What is attended to; of several heads also as `attended`, for which `to` is `out`."""
    if room.softmax:
        torch.bmm(weights, room.v, out=to)
    else:
        sgformer(room, to)
    if room.heads > 1:
        heads_last(room.attended, to, room.heads)


def backward(
    room: Room,
    way: WayBack,
    x_RF: Tensor,
    grad_RF: Tensor,
    weights: Tensor,
    factors: Tensor | None,
    dx_RF: Tensor | None,
) -> None:
    """From the output's gradient to the input's, of a block that is attended to with these weights."""
    if room.b_out is not None:
        way.b_out_sum.add_(grad_RF.sum(0, dtype=way.b_out_sum.dtype))
    w_out = room.w_out
    if w_out is not None:
        wide = way.w_out_sum.dtype
        way.w_out_sum.addmm_(grad_RF.to(wide).t(), room.attended.to(wide))
        torch.mm(grad_RF, w_out, out=way.dattended)
        grad_RF = way.dattended
    if room.heads > 1:
        split = grad_RF.view(grad_RF.size(0), room.heads, -1).transpose(0, 1)
        way.dout.view(split.size()).copy_(split)
        grad_GPD = way.dout
    else:
        grad_GPD = grad_RF.view(room.out.size())
    if room.softmax:
        torch.bmm(weights.transpose(1, 2), grad_GPD, out=way.dv)
        torch.bmm(grad_GPD, room.v.transpose(1, 2), out=way.dlogits)
        if factors is not None:
            way.dlogits.mul_(factors)
        torch._softmax_backward_data(way.dlogits, room.weights, -1, room.weights.dtype, grad_input=way.dlogits)
        torch.bmm(way.dlogits, key(room, x_RF), out=way.dq)
        dk = way.dk
        if dk is not None:
            torch.bmm(way.dlogits.transpose(1, 2), room.q, out=dk)
        elif dx_RF is not None:
            torch.bmm(way.dlogits.transpose(1, 2), room.q, out=dx_RF.view(room.q.size()))
    else:
        sgformer_backward(room, way, grad_GPD)
    if room.heads > 1:
        heads_last(way.dprojected[0], way.dparts, room.heads)
    add_sums(room, way, x_RF)
    if dx_RF is not None:
        add_dx(room, way, dx_RF)


def add_dx(room: Room, way: WayBack, dx_RF: Tensor) -> None:
    """The input's gradient by way of the projections."""
    # With two parts the key's gradient is there already, to be added to.
    first = 0
    if room.parts == 3:
        torch.mm(way.dprojected[0], way.w_in[0], out=dx_RF)
        first = 1
    for i in range(first, len(way.w_in)):
        dx_RF.addmm_(way.dprojected[i], way.w_in[i])


def add_sums(room: Room, way: WayBack, x_RF: Tensor) -> None:
    """Gradients of the projections."""
    wide = way.w_in_sums.dtype
    dprojected = way.dprojected.to(wide)
    way.w_in_sums.baddbmm_(dprojected.transpose(1, 2), x_RF.to(wide).expand(dprojected.size(0), -1, -1))
    if room.b_in is not None:
        if wide == way.ones.dtype:
            way.b_in_sums.baddbmm_(way.ones, dprojected)
        else:
            way.b_in_sums.add_(dprojected.sum(1, keepdim=True))


def heads_last(to_RW: Tensor, x: Tensor, heads: int) -> None:
    """Stacked parts `(parts, G, P, D)`, or one, back to `(R, parts H D)`."""
    x = x.view(-1, heads, to_RW.size(0), x.size(-1)).permute(2, 0, 1, 3)
    to_RW.view(x.size()).copy_(x)


def sgformer(room: Room, to: Tensor) -> None:
    """SGFormer's attention, o_i = (sum_j <q_i, k_j> v_j + P v_i) / (sum_j <q_i, k_j> + P) with q, k of norm one.

    Linear in P.
    """
    k = room.k
    assert k is not None
    kv_GDD, k_sum_GD, den_GP1 = room.sums
    torch.bmm(k.transpose(1, 2), room.v, out=kv_GDD)
    torch.sum(k, [1], out=k_sum_GD)
    torch.bmm(room.q, k_sum_GD.unsqueeze(2), out=den_GP1)
    den_GP1.add_(room.q.size(1))
    torch.bmm(room.q, kv_GDD, out=to)
    to.add_(room.v, alpha=room.q.size(1)).div_(den_GP1)


def normalise(x_GPD: Tensor, norm_GP1: Tensor) -> None:
    torch.linalg.vector_norm(x_GPD, 2, [-1], True, out=norm_GP1)
    # A zero row has no direction: it stays zero, and so does its gradient.
    x_GPD.div_(norm_GP1.masked_fill_(norm_GP1 == 0, math.inf))


def sgformer_backward(room: Room, way: WayBack, grad_GPD: Tensor) -> None:
    """Gradients of `sgformer`, whose sums are still there, and of the rows that were normalised for it.

    `grad` is overwritten.
    """
    k, dk = room.k, way.dk
    assert k is not None
    assert dk is not None
    q_norm, k_norm = room.norms
    kv_GDD, k_sum_GD, den_GP1 = room.sums
    dkv_GDD, dsum_G1D = way.dsums
    grad_GPD.div_(den_GP1)
    dden_GP1 = torch.sum(grad_GPD * room.out, [-1], True).neg_()
    torch.bmm(grad_GPD, kv_GDD.transpose(1, 2), out=way.dq)
    way.dq.baddbmm_(dden_GP1, k_sum_GD.unsqueeze(1))
    torch.bmm(room.q.transpose(1, 2), grad_GPD, out=dkv_GDD)
    torch.bmm(room.v, dkv_GDD.transpose(1, 2), out=dk)
    dk.add_(torch.bmm(dden_GP1.transpose(1, 2), room.q, out=dsum_G1D))
    torch.bmm(k, dkv_GDD, out=way.dv)
    way.dv.add_(grad_GPD, alpha=room.q.size(1))
    along_norm(way.dq, room.q, q_norm)
    along_norm(dk, k, k_norm)


def along_norm(dx_GPD: Tensor, x_GPD: Tensor, norm_GP1: Tensor) -> None:
    """From the gradient of normalised rows to that of the rows."""
    dx_GPD.sub_(x_GPD * torch.sum(x_GPD * dx_GPD, [-1], True)).div_(norm_GP1)


def compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    """`forward_blocks` and `backward_blocks` without Python between their operations.

    Lanes pass Python's lock, and with it all of Python's objects, from core to core: an operation then takes some 25 us
    to begin, several times what it takes alone. TorchScript has no such lock, so blocks can be small enough for the
    cache. Where it is missing or switched off, the same functions run as they stand.
    """
    # Two threads that silence warnings at once may leave them silent.
    with _compiling:
        return _compile()


@functools.cache
def _compile() -> tuple[Callable[..., None], Callable[..., None]]:
    try:
        with warnings.catch_warnings():
            # That newer means are recommended; of these only compilers, which not every machine has.
            warnings.simplefilter("ignore")
            return torch.jit.script(forward_blocks), torch.jit.script(backward_blocks)
    except Exception as error:
        warnings.warn(f"blocks of layers run as plain Python, which is slower: {error}", RuntimeWarning, stacklevel=2)
        return forward_blocks, backward_blocks
