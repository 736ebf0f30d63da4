"""Hugging Face encoders in random batches, through transformers' own registry of attention functions.

`register()` adds `attn_implementation="random_batch"` together with a padding mask of size O(L); without a mask
function of its own, transformers would silently drop the padding of a registered attention.
"""

import copy
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from randombatch.checks import check_batch_size
from randombatch.division import draw_seed
from randombatch.nn.draws import fixed_seeds, mean_over
from randombatch.nn.sequences import attend_sequences

NAME = "random_batch"
DEFAULT_BATCH_SIZE = 256
# What is added to a logit to forbid it is at most this: models take -10000, or the least number of their type.
FORBIDS = -1000.0


def register() -> None:
    """Make `attn_implementation="random_batch"` known to transformers. Calling it again does no harm.

    The batch size comes from `config.random_batch_size` (default 256); `config.random_batch_self_correction` and
    `config.random_batch_eval_rounds` as in `convert`.
    """
    AttentionInterface.register(NAME, random_batch_forward)
    AttentionMaskInterface.register(NAME, padding_mask)


class _Registered:
    """Stays with a converted model; where that is unpickled, the name of its attention becomes known."""

    def __reduce__(self) -> tuple:
        return _registered, ()


def _registered() -> _Registered:
    register()
    return _Registered()


def padding_mask(
    *,
    kv_length: int,
    mask_function=bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding as `(batch, L)`, True = valid, or None: never L x L. Refuses every mask that is more than padding.

    A pooling head, which has queries of its own and another attention, gets the mask that it expects.
    """
    if mask_function is not bidirectional_mask_function:
        raise ValueError(
            "random batch attention is for encoders: this model asks for a mask that is more than padding, such as a "
            f"causal, sliding-window or packed one ({getattr(mask_function, '__name__', mask_function)}); "
            "`model.set_attn_implementation('sdpa')` gives it its own attention back"
        )
    q_length, q_offset = kwargs.get("q_length"), kwargs.get("q_offset", 0)
    if q_length is None:
        # transformers 5.0
        q_length, q_offset = len(kwargs["cache_position"]), int(kwargs["cache_position"][0])
    if int(q_length) != int(kv_length) or int(q_offset) or int(kwargs.get("kv_offset", 0)):
        return sdpa_mask(kv_length=kv_length, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    return None if attention_mask is None else attention_mask[:, :kv_length].bool()


# Arguments of transformers' attention functions that change the result.
_UNSUPPORTED = {
    "position_bias": "a position bias of size L x L",
    "softcap": "logits that are capped",
    "s_aux": "attention sinks",
    "sliding_window": "a sliding window",
    "head_mask": "a mask of heads",
    "cu_seq_lens_q": "packed sequences",
}

_NO_CROSS = (
    "random batches divide items together with their keys, so cross-attention and key-value caches cannot use them"
)


def random_batch_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: `(B, H, L, D)` in, `(B, L, H, D)` out."""
    witness = getattr(module, "random_batch_witness", None)
    if witness is not None:
        witness.add()
    if is_causal or (is_causal is None and getattr(module, "is_causal", False)):
        raise ValueError(f"{type(module).__name__} is causal: random batch attention is for encoders")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"query length {query.shape[2]} and key length {key.shape[2]} differ: {_NO_CROSS}")
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {what} (`{name}`), which random batches do not have")
    config: Any = module.config
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError("random batch attention has no L x L weights to return: turn `output_attentions` off")
    attention_mask = _as_padding(module, attention_mask)
    batch_size = getattr(config, "random_batch_size", DEFAULT_BATCH_SIZE)
    check_batch_size(batch_size, name="config.random_batch_size")
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "dropout_p": dropout if module.training else 0.0,
        "scale": scaling,
        "self_correction": getattr(config, "random_batch_self_correction", False),
        "enable_gqa": key.shape[1] != query.shape[1],
    }
    layer = getattr(module, "random_batch_layer", getattr(module, "layer_idx", None))
    if layer is None:
        warnings.warn(
            f"{type(module).__name__} does not know its layer, so that all layers divide alike in evaluation: "
            "call randombatch.convert(model, batch_size), which numbers them",
            stacklevel=2,
        )
        layer = 0
    rounds = getattr(config, "random_batch_eval_rounds", 1)
    seeds = [draw_seed()] if module.training else fixed_seeds(layer, rounds, "config.random_batch_eval_rounds")

    def attend(seed: Tensor) -> Tensor:
        return attend_sequences(query, key, value, attention_mask, seed, **options)

    out_BHLD = mean_over(seeds, attend)
    return out_BHLD.transpose(1, 2).contiguous(), None


def _as_padding(module: nn.Module, mask: Tensor | None) -> Tensor | None:
    """The mask as `(batch, L)`, True = valid; some models pass it on as `(batch, 1, 1, L)` of 0 and large negatives."""
    if mask is None or mask.dim() == 2:
        return None if mask is None else mask.bool()
    if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
        mask = mask[:, 0, 0]
        if mask.dtype == torch.bool:
            return mask
        if not bool(((mask == 0) | (mask <= FORBIDS)).all()):
            raise ValueError(
                f"{type(module).__name__} passes a mask of other numbers than 0 and large negatives, which is more "
                "than padding: random batch attention cannot follow it"
            )
        return mask == 0
    raise ValueError(
        f"{type(module).__name__} passes a mask of shape {tuple(mask.shape)}, which is more than padding: "
        "random batch attention cannot follow it"
    )


def is_converted(module: nn.Module) -> bool:
    """Whether it still asks for our function: the user may have set another one since."""
    return getattr(module.config, "_attn_implementation", None) == NAME


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules of a model that ask transformers' registry for their attention function."""
    return {name: m for name, m in model.named_modules() if _asks_registry(type(m))}


def _asks_registry(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def encoders(model: nn.Module) -> dict[str, tuple[PreTrainedModel, dict[str, Any]]]:
    """The outermost Hugging Face models in a model, each with its attention modules, by name."""
    found: dict[str, tuple[PreTrainedModel, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[name] = module, attention_modules(module)
    return found


def check(model: PreTrainedModel, attentions: dict[str, Any]) -> None:
    """Refuse a model whose attention cannot be restricted to random batches."""
    if not attentions or not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' registry: it cannot be converted"
        )
    own = [name for name, m in model.named_modules() if type(m).__name__.endswith("Attention") and _attends_alone(m)]
    if own:
        raise ValueError(
            f"{type(model).__name__} has attention outside transformers' registry ({own[0]}), left as it was"
        )
    for name, module in attentions.items():
        about = f"{name} {type(module).__name__}".lower()
        if getattr(module, "is_causal", False) or getattr(module, "is_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is a decoder ({name} is causal): random batch attention is for encoders; "
                "if it has an encoder, convert that alone"
            )
        if "cross" in about or "encoder_attn" in about:
            raise ValueError(f"{name} of {type(model).__name__} is cross-attention: {_NO_CROSS}")
        if hasattr(module, "has_relative_attention_bias"):
            raise ValueError(f"{name} of {type(model).__name__} adds a position bias of size L x L: not supported")


def _attends_alone(module: nn.Module) -> bool:
    """Whether neither the module, nor a part of it, nor what it is a part of asks the registry for attention."""
    parts = [type(m) for m in module.modules()]
    leaf = not isinstance(module, nn.MultiheadAttention) and any(True for _ in module.parameters())
    return leaf and not any(_asks_registry(kind) for kind in parts)


def convert_encoder(
    model: PreTrainedModel,
    attentions: dict[str, Any],
    *,
    batch_size: int,
    eval_rounds: int,
    self_correction: bool = False,
    first: int = 0,
) -> list[nn.Module]:
    """Set the attention of one checked model, numbered from `first` on; returns its attention modules."""
    register()
    # A configuration may be shared with other models, which are to stay as they are.
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config, copies)
    model.set_attn_implementation(NAME)
    model.__dict__["random_batch_registered"] = _Registered()
    for number, module in enumerate(attentions.values(), start=first):
        module.random_batch_layer = number
        config = module.config
        config.random_batch_size, config.random_batch_eval_rounds = batch_size, eval_rounds
        config.random_batch_self_correction = self_correction
        # Parts of a composite model have other configurations than the model that was told.
        config._attn_implementation = NAME
    return list(attentions.values())
