"""`RandomBatchAttention`: a self-attention layer whose projections and attention stream through the cache."""

from typing import Any

import torch
from torch import Tensor, nn

from randombatch.attention.projected import KERNELS, projected_attention
from randombatch.attention.rows import check_fit, check_rows
from randombatch.checks import check_batch_size
from randombatch.distributed.exchange import check_shard, in_batches, interleave
from randombatch.distributed.shard import Shard
from randombatch.division import Division
from randombatch.given_batches import GivenBatches
from randombatch.nn.draws import Draws, mean_over


class RandomBatchAttention(Draws, nn.Module):
    """Multi-head self-attention inside random batches of about `batch_size` items, drawn anew at every training step.

    y = concat_h(attention_h(x W_q', x W_k', x W_v')) W_out', attention restricted to the item's batch. Time O(N p F +
    N F^2). Gathering, projections, attention and output projection run block by block and only the input is kept for
    the backward pass (see `recompute`), so memory beyond output and gradients is some MB for each thread whatever N is
    (as long as one batch, H p^2 numbers, is not more). Parameters are named and shaped as in `nn.MultiheadAttention`: a
    state dict of one loads into the other.

    Args:
        embed_dim: F, width of input and output.
        num_heads: H, a divisor of `embed_dim`.
        batch_size: p >= 2; p >= N is full attention.
        bias: whether the projections have one.
        dropout: of the attention weights, in training (softmax kernel only).
        kernel: "softmax", or "sgformer": SGFormer's linear attention, q and k divided by their row norms,
            o_i = (sum_j <q_i, k_j> v_j + s v_i) / (sum_j <q_i, k_j> + s) over a batch of s, for each head.
        recompute: False keeps rows in batch order, projections, softmax weights and what they attend to for the
            backward pass, up to N (5 F + p H) numbers (float32 for half precision) and N integers: less time for more
            memory. On the CPU it waits for the next step; `attention.recycled.trim_memory()` gives it back.
        block_rows: rows per block; default: from the size of the cache (CPU) or a byte budget (accelerators).
        eval_seed: names the divisions of `eval()`, which are fixed ones. Give the layers of a stack different numbers,
            or call `convert(model, batch_size)`, which numbers them: layers of one number divide alike, and items of
            different batches never meet.

    `eval_rounds` (see `Draws`) may be set on the module.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        batch_size: int = 256,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        kernel: str = "softmax",
        recompute: bool = True,
        block_rows: int | None = None,
        eval_seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_batch_size(batch_size)
        whole = {"embed_dim": embed_dim, "num_heads": num_heads, "eval_seed": eval_seed}
        for name, number in (whole | {"block_rows": 1 if block_rows is None else block_rows}).items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"`{name}` must be an int, got {number!r}")
        for name, flag in (("bias", bias), ("recompute", recompute)):
            if not isinstance(flag, bool):
                raise TypeError(f"`{name}` must be True or False, got {flag!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"`dtype` must be a floating-point torch.dtype, got {dtype!r}")
        if not isinstance(dropout, int | float):
            raise TypeError(f"`dropout` must be a number, got {dropout!r}")
        if block_rows is not None and block_rows < 1:
            raise ValueError(f"`block_rows` must be at least 1, got {block_rows}")
        for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}")
        if embed_dim % num_heads:
            raise ValueError(f"`embed_dim` must be a multiple of `num_heads`, got {embed_dim} and {num_heads}")
        if kernel not in KERNELS:
            raise ValueError(f"`kernel` must be one of {', '.join(KERNELS)}, got {kernel!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"`dropout` must lie in [0, 1), got {dropout}")
        if kernel == "sgformer" and embed_dim == num_heads:
            raise ValueError(
                "heads of width one have directions +1 and -1 only, which may cancel in the sgformer kernel's "
                f"denominator: take fewer than {num_heads} heads"
            )
        if dropout and kernel == "sgformer":
            raise ValueError("the sgformer kernel never forms weights that could be dropped: set `dropout` to 0")
        self.embed_dim, self.num_heads, self.batch_size = embed_dim, num_heads, batch_size
        self.dropout, self.kernel = dropout, kernel
        self.recompute, self.block_rows, self.eval_seed = recompute, block_rows, eval_seed
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, device=device, dtype=dtype))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.MultiheadAttention` starts: Xavier for the stacked input projections, zero biases."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for b in (self.in_proj_bias, self.out_proj.bias):
            if b is not None:
                nn.init.zeros_(b)

    # GPSConv and nn.MultiheadAttention call it by this name.
    _reset_parameters = reset_parameters

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        ptr: Tensor | None = None,
        shard: Shard | None = None,
    ) -> Tensor:
        """Attend inside random batches of each graph.

        Args:
            x: `(N, F)`, or `(B, N, F)` for B graphs padded to one size.
            mask: `(B, N)`, True = valid. Only valid rows are divided: what the others hold, and how many there are,
                changes nothing (but rounding). They come out as zero.
            batch: graph number of each row of an `(N, F)` input, in any order.
            ptr: graph boundaries of an `(N, F)` input, from 0 to N.
            shard: which rows of the whole table this rank passes (and gets), as `(n, F)`; `mask` and `ptr` then
                describe the whole table, on every rank alike. The first rank's division counts.
        """
        ptr = check_rows(x, mask, batch, ptr) if shard is None else check_shard(x, mask, batch, ptr, shard)
        check_fit(x, self.in_proj_weight, self.embed_dim)
        if not x.numel() and shard is None:
            # Nothing to compute, but every parameter gets a gradient, as other ranks expect (DistributedDataParallel).
            return self.out_proj(x) + 0 * sum(p.sum() for p in self.parameters())
        rows = x.reshape(-1, x.shape[-1])
        if shard is None:
            out = mean_over(self.seeds(), lambda seed: self._attend(rows, seed, ptr=ptr, batch=batch, mask=mask))
            return out.view(x.shape)

        def attend(own: Tensor, batches: Division | GivenBatches) -> Tensor:
            return self._attend(own, None, division=batches, pieces=shard.num_pieces)

        stages = [in_batches(rows, attend, shard, seed, self.batch_size, ptr, mask) for seed in self.seeds()]
        return mean_over(interleave(*stages), lambda result: result)

    def _attend(self, rows: Tensor, seed: Tensor | None, **which: Any) -> Tensor:
        return projected_attention(
            rows,
            self.in_proj_weight,
            self.in_proj_bias,
            self.out_proj.weight,
            self.out_proj.bias,
            seed,
            self.batch_size,
            heads=self.num_heads,
            kernel=self.kernel,
            dropout_p=self.dropout if self.training else 0.0,
            recompute=self.recompute,
            block_rows=self.block_rows,
            **which,
        )

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, batch_size={self.batch_size}, kernel={self.kernel!r}"
