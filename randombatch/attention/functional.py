"""The public entry: `scaled_dot_product_attention` restricted to random batches."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from randombatch.attention.rows import autocast_type, check_dense, check_numbers, refuse_tangents
from randombatch.attention.streamed import attention
from randombatch.checks import check_batch_size, check_generator
from randombatch.division import Division, draw_seed


class Named(NamedTuple):
    """A division as operators are given it: by its seed, so that compiled code takes any."""

    seed: Tensor
    batch_size: int
    ptr: Tensor | None = None
    rows: Tensor | None = None


def random_batch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch_size: int | None = None,
    *,
    division: Division | Named | None = None,
    generator: torch.Generator | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    self_correction: bool = False,
) -> Tensor:
    """Attention inside each batch of a random division of the L items: softmax(scale q k' + mask) v, batch by batch.

    `torch.nn.functional.scaled_dot_product_attention` on `(..., L, E)` with one division for all leading dimensions,
    which must agree; row i in is row i out. Time O(L p E), and only the inputs are kept for the backward pass: extra
    memory is a few blocks, whatever L is. Half precision is computed in float32 block by block.

    Args:
        query: `(..., L, E)`.
        key: `(..., L, E)`.
        value: `(..., L, Ev)`.
        batch_size: p >= 2; p >= L is full attention. Give either this or `division`.
        division: who shares a batch; default: drawn anew from `generator`.
        generator: where the seed of the division comes from (default: torch's).
        key_padding_mask: `(batch, L)`, True = ignore this key, where `batch` is the first dimension of `query`; `(L,)`
            or `(1, L)` for `(L, E)`, or `(heads, L, E)` with `enable_gqa`. Padded items are divided with the others.
        attn_mask: broadcasts to `(..., L, L)`; boolean, True = may attend, or numbers to add to the logits.
        is_causal: an item attends only to items of its batch at its own or an earlier original position.
        dropout_p: probability of dropping each weight; the choice depends on the division's seed only, so a division
            that is used again drops the same weights again.
        scale: factor of the logits, default E**-0.5.
        enable_gqa: key and value may have fewer heads (dimension -3), of which each serves several of the query's.
        self_correction: add log((N - 1) / (s - 1)) to every logit but the item's own, with s valid items in the batch
            and N in all (in the graph, if the division has several). Numerator and denominator of the softmax then
            each estimate those of full attention without bias; their ratio is still biased at order 1/s.

    Returns:
        `(..., L, Ev)`. Rows without any key to attend to are zero.
    """
    check_generator(generator)
    _check_options(dropout_p, scale, is_causal=is_causal, enable_gqa=enable_gqa, self_correction=self_correction)
    query_BHLD, key_BKLD, value_BKLE = _canonical(query, key, value, enable_gqa)
    padding = _padding(key_padding_mask, query, query_BHLD.shape[0], enable_gqa)
    mask = _mask(attn_mask, query, enable_gqa)
    # At last: a call that is refused must not have drawn anything.
    seed, batch_size, ptr, rows = _resolve(query.shape[-2], batch_size, division, generator)
    if query_BHLD.shape[:3].numel() == 0 or value.numel() == 0:
        # Nothing to compute, but the result stays connected to its inputs.
        return query.new_zeros(*query.shape[:-1], value.shape[-1]) + 0 * (query.sum() + key.sum() + value.sum())
    refuse_tangents(query, key, value, mask)
    dtype = autocast_type(query)
    if dtype is not None:
        query_BHLD, key_BKLD, value_BKLE = (x.to(dtype) for x in (query_BHLD, key_BKLD, value_BKLE))
    if query.shape[-1] == 0:
        # Everybody attends to all alike.
        query_BHLD, key_BKLD = (torch.nn.functional.pad(x, (0, 1)) for x in (query_BHLD, key_BKLD))
    scale = 1 / math.sqrt(query_BHLD.shape[-1]) if scale is None else scale
    out_BHLE = attention(
        query_BHLD, key_BKLD, value_BKLE, seed, batch_size, ptr, rows, padding, mask,
        is_causal, self_correction, float(dropout_p), float(scale),
    )  # fmt: skip
    return out_BHLE.reshape(*query.shape[:-1], value.shape[-1])


def _check_options(dropout_p: float, scale: float | None, **flags: bool) -> None:
    for name, number in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        # A tuple: torch 2.9 cannot compile a union of types.
        if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"`{name}` must be a number, got {type(number).__name__} {number!r}")
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite, got {scale}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"`dropout_p` must lie in [0, 1], got {dropout_p}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"`{name}` must be True or False, got {flag!r}")


def _canonical(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Check the three against each other and view them as `(B, H, L, D)`."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        check_numbers(name, x)
        if x.dim() < 2:
            raise ValueError(f"`{name}` must be (..., L, E), got shape {tuple(x.shape)}")
        if x.device != query.device:
            raise ValueError(f"`{name}` is on {x.device} but `query` on {query.device}: move them to one device")
        if x.dtype != query.dtype and autocast_type(x) is None:
            raise TypeError(f"`{name}` is {x.dtype} but `query` is {query.dtype}: convert them to one type")
    if key.shape[-2] != query.shape[-2] or value.shape[-2] != query.shape[-2]:
        raise ValueError(
            f"query, key and value must have one length, got {query.shape[-2]}, {key.shape[-2]} and {value.shape[-2]}: "
            "items are divided together with their keys, so cross-attention has no random batches"
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"query and key must have one width, got {query.shape[-1]} and {key.shape[-1]}")
    leading = {name: x.shape[:-2] for name, x in named.items()}
    if enable_gqa:
        if query.dim() < 3 or key.dim() != query.dim() or key.shape[:-2] != value.shape[:-2]:
            raise ValueError(f"with `enable_gqa` all must be (..., heads, L, E), got leading dimensions {leading}")
        if query.shape[:-3] != key.shape[:-3] or key.shape[-3] < 1 or query.shape[-3] % key.shape[-3]:
            raise ValueError(f"the query's heads must be a multiple of the key's, got leading dimensions {leading}")
    elif not (query.shape[:-2] == key.shape[:-2] == value.shape[:-2]):
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in leading.items())
        raise ValueError(
            f"query, key and value must agree in their leading dimensions, got {shapes}: "
            "for fewer heads of key and value set `enable_gqa=True`"
        )

    def view(x: Tensor) -> Tensor:
        if x.dim() == 3 and not enable_gqa:
            return x.unsqueeze(1)
        return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)

    return view(query), view(key), view(value)


def _resolve(
    length: int, batch_size: int | None, division: Division | Named | None, generator: torch.Generator | None
) -> Named:
    """The division that the caller gave or asked for."""
    if division is None:
        if batch_size is None:
            raise ValueError("give either `batch_size` or `division`")
        check_batch_size(batch_size, length)
        return Named(draw_seed(generator), batch_size)
    if isinstance(division, Named):
        return division
    if not isinstance(division, Division):
        raise TypeError(f"`division` must be a Division, got {type(division).__name__}")
    if batch_size is not None or generator is not None:
        raise ValueError("`division` already says the batches: give either it, or `batch_size` (and `generator`)")
    if division.rows is None and division.num_items != length:
        raise ValueError(
            f"`division` is of {division.num_items} items but query has {length} rows: "
            f"make one with Division.draw({length}, batch_size)"
        )
    if division.rows is not None and not torch.compiler.is_compiling() and not (division.rows < length).all():
        raise ValueError(f"`division` is on rows up to {int(division.rows.max())} but query has {length}")
    return Named(division.key, division.batch_size, division.ptr, division.rows)


def _padding(key_padding_mask: Tensor | None, query: Tensor, batch: int, enable_gqa: bool) -> Tensor | None:
    if key_padding_mask is None:
        return None
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"`key_padding_mask` must be a tensor, got {type(key_padding_mask).__name__}")
    check_dense("key_padding_mask", key_padding_mask)
    length = query.shape[-2]
    # What comes before (L, E) is heads with `enable_gqa`, a batch otherwise.
    alone = query.dim() <= (3 if enable_gqa else 2)
    leading = 1 if alone else query.shape[0]
    padding = key_padding_mask.unsqueeze(0) if key_padding_mask.dim() == 1 and alone else key_padding_mask
    if padding.dtype != torch.bool:
        raise TypeError(f"`key_padding_mask` must be boolean (True = ignore), got {padding.dtype}")
    if padding.shape != (leading, length):
        raise ValueError(
            f"`key_padding_mask` must be (batch, L) = {(leading, length)}, got shape {tuple(key_padding_mask.shape)}"
        )
    if padding.device != query.device:
        raise ValueError(f"`key_padding_mask` is on {padding.device} but `query` on {query.device}: move it there")
    if leading == 0:
        return padding.expand(batch, length) if batch == 0 else None
    return padding.repeat_interleave(batch // leading, dim=0) if batch >= leading else padding


def _mask(attn_mask: Tensor | None, query: Tensor, enable_gqa: bool) -> Tensor | None:
    """The mask as `(B | 1, H | 1, L | 1, L | 1)`, a view wherever torch can make one."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"`attn_mask` must be a tensor, got {type(attn_mask).__name__}")
    check_dense("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"`attn_mask` must be boolean (True = may attend) or floating point, got {attn_mask.dtype}")
    if attn_mask.is_floating_point() and attn_mask.dtype != query.dtype and autocast_type(query) is None:
        raise TypeError(f"`attn_mask` is {attn_mask.dtype} but `query` is {query.dtype}: convert one of them")
    full = (*query.shape[:-1], query.shape[-2])
    if attn_mask.device != query.device:
        raise ValueError(f"`attn_mask` is on {attn_mask.device} but `query` on {query.device}: move it there")
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, full) == full
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"`attn_mask` must broadcast to (..., L, L) = {full}, got shape {tuple(attn_mask.shape)}")
    mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
    if query.dim() > 4:
        leading = mask.shape[:-3]
        return (mask if math.prod(leading) == 1 else mask.expand(*full[:-3], -1, -1, -1)).flatten(0, -4)
    # As the query is viewed.
    mask = mask.unsqueeze(1) if query.dim() == 3 and not enable_gqa else mask
    return mask[(None,) * (4 - mask.dim())]
