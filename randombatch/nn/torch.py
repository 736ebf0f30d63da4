"""`nn.MultiheadAttention` in random batches, and the encoder layers that would bypass it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from randombatch.attention.projected import projected_attention
from randombatch.attention.rows import check_fit, check_numbers, check_rows
from randombatch.nn.draws import Draws, mean_over
from randombatch.nn.sequences import attend_sequences


class RandomBatchMultiheadAttention(Draws, nn.MultiheadAttention):
    """`nn.MultiheadAttention` restricted to random batches; self-attention only, the weights are never returned.

    Only valid items of a sequence are divided: padding changes nothing, and padded positions come out as zero. But
    sequences of at most `batch_size` items are one batch: exactly the original. Without mask and correction it streams
    like `RandomBatchAttention`.
    """

    batch_size: int
    self_correction: bool = False
    witness: Any = None

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False keeps `nn.TransformerEncoderLayer` from computing full attention behind our back in `eval()`."""
        return False

    def _reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As in `nn.MultiheadAttention`, with None for the weights (there are no L x L of them)."""
        if self.witness is not None:
            self.witness.add()
        if isinstance(query, Tensor) and query.is_nested:
            raise ValueError(
                "nested tensors are not supported: pass a padded tensor with `key_padding_mask`. An "
                "nn.TransformerEncoder makes nested ones of such: convert it as a whole, not layer by layer, or "
                "make it with `enable_nested_tensor=False`"
            )
        check_numbers("query", query)
        if not _is_same(query, key) or not _is_same(query, value):
            raise ValueError(
                "random batches divide items together with their keys: call it as attention(x, x, x), with one tensor "
                "(and checkpoint it with `use_reentrant=False`); cross-attention cannot be converted"
            )
        if is_causal and attn_mask is None:
            raise ValueError("`is_causal` is only a hint about `attn_mask`: give the mask as well")
        for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if given is not None and not isinstance(given, Tensor):
                raise TypeError(f"`{name}` must be a tensor, got {type(given).__name__}")
        if query.dim() not in (2, 3):
            raise ValueError(f"`query` must be (L, E) or a batch of such, got shape {tuple(query.shape)}")
        check_fit(query, self.in_proj_weight, self.embed_dim, "query")
        x_BLF = query.unsqueeze(0) if query.dim() == 2 else query if self.batch_first else query.transpose(0, 1)
        padding = _boolean(key_padding_mask, x_BLF)
        mask = _sdpa_mask(attn_mask, x_BLF, self.num_heads)
        out_BLF = mean_over(self.seeds(), lambda seed: self._attend(x_BLF, seed, padding, mask))
        return (out_BLF[0] if query.dim() == 2 else out_BLF if self.batch_first else out_BLF.transpose(0, 1)), None

    def _attend(self, x_BLF: Tensor, seed: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
        batch, length, width = x_BLF.shape
        dropout_p = self.dropout if self.training else 0.0
        valid = None if padding is None else ~padding
        # Otherwise padded queries are computed with the others.
        apart = padding is not None and length > self.batch_size
        if mask is None and not self.self_correction and x_BLF.numel() and (padding is None or apart):
            out_NF = projected_attention(
                x_BLF.reshape(-1, width),
                self.in_proj_weight,
                self.in_proj_bias,
                self.out_proj.weight,
                self.out_proj.bias,
                seed,
                self.batch_size,
                heads=self.num_heads,
                ptr=check_rows(x_BLF, valid, None, None),
                mask=valid,
                dropout_p=dropout_p,
            )
            return out_NF.view(x_BLF.shape)
        if padding is not None and apart:
            # What is in the padding would reach the weights' gradients, NaN at least.
            x_BLF = x_BLF.masked_fill(padding.unsqueeze(-1), 0.0)
        q, k, v = (
            F.linear(x_BLF, self.in_proj_weight, self.in_proj_bias)
            .view(batch, length, 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        options: dict[str, Any] = {"dropout_p": dropout_p, "self_correction": self.self_correction}
        out_BHLD = attend_sequences(q, k, v, valid, seed, self.batch_size, mask, **options)
        out_BLF = self.out_proj(out_BHLD.transpose(1, 2).reshape(batch, length, width))
        return out_BLF.masked_fill(padding.unsqueeze(-1), 0.0) if padding is not None and apart else out_BLF

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, batch_size={self.batch_size}"


def _is_same(query: Tensor, other: Tensor) -> bool:
    """Whether both are one tensor, though full backward hooks on a module pass each argument on as one of its own."""
    if query is other:
        return True
    node = None if torch.compiler.is_compiling() or not isinstance(other, Tensor) else query.grad_fn
    if node is None or node is not other.grad_fn or node.name() != "BackwardHookFunctionBackward":
        return False
    origins = node.next_functions
    same_memory = query.data_ptr() == other.data_ptr() and query.shape == other.shape
    return same_memory and query.stride() == other.stride() and origins[query.output_nr] == origins[other.output_nr]


def _boolean(key_padding_mask: Tensor | None, x_BLF: Tensor) -> Tensor | None:
    """The padding as booleans, True = ignore; encoders pass it on as numbers 0 and -inf."""
    if key_padding_mask is None:
        return None
    padding = key_padding_mask.unsqueeze(0) if key_padding_mask.dim() == 1 else key_padding_mask
    if padding.shape != x_BLF.shape[:2]:
        raise ValueError(
            f"`key_padding_mask` must be {tuple(x_BLF.shape[:2])}, got shape {tuple(key_padding_mask.shape)}"
        )
    if padding.dtype == torch.bool:
        return padding
    ignored = padding == -torch.inf
    if not bool((ignored | (padding == 0)).all()):
        raise ValueError("`key_padding_mask` must be boolean, or numbers that are 0 (keep) or -inf (ignore)")
    return ignored


def _sdpa_mask(attn_mask: Tensor | None, x_BLF: Tensor, heads: int) -> Tensor | None:
    """From this class's convention (True = forbidden, or `(B heads, L, L)`) to SDPA's (True = allowed)."""
    if attn_mask is None:
        return None
    batch, length, _ = x_BLF.shape
    if attn_mask.shape not in ((length, length), (batch * heads, length, length)):
        raise ValueError(
            f"`attn_mask` must be (L, L) = {(length, length)} or (batch heads, L, L) = "
            f"{(batch * heads, length, length)}, got shape {tuple(attn_mask.shape)}"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"`attn_mask` must be boolean (True = may not attend) or floating point, got {attn_mask.dtype}")
    mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
    return mask if mask.dim() == 2 else mask.view(batch, heads, length, length)


def refuse(module: nn.MultiheadAttention) -> str | None:
    """Why this attention cannot be converted, or None."""
    if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
        return "it has its own key or value width (kdim, vdim), which is cross-attention"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys of its own (add_bias_kv, add_zero_attn)"
    return None


def forbid_bypass(model: nn.Module) -> None:
    """Keep encoders from turning padded input into nested tensors, which never reach `self_attn.forward`."""
    for module in model.modules():
        holds_ours = any(isinstance(m, RandomBatchMultiheadAttention) for m in module.modules())
        if isinstance(module, nn.TransformerEncoder) and holds_ours:
            module.use_nested_tensor = module.enable_nested_tensor = False
