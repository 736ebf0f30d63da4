"""`convert`: swap the attention inside an existing model, keep its weights, and prove that the swap took effect."""

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from randombatch.checks import check_batch_size
from randombatch.nn import torch as for_torch
from randombatch.nn.attention import RandomBatchAttention
from randombatch.nn.proof import Proof
from randombatch.nn.wrapper import RandomBatch

_SIZED = (RandomBatchAttention, RandomBatch)
_CHOOSE = "choose others with `names`"
_OURS = (for_torch.RandomBatchMultiheadAttention, *_SIZED)


def convert(
    model: nn.Module,
    batch_size: int,
    *,
    names: Iterable[str] | None = None,
    self_correction: bool = False,
    eval_rounds: int = 1,
) -> nn.Module:
    """Restrict the attention inside a model to random batches, in place, keeping its weights.

    Known attention: PyTorch Geometric's `SGFormerAttention`, `PolynormerAttention` and `PerformerAttention` (so
    `SGFormer`, `Polynormer`, `GPSConv`), `nn.MultiheadAttention` (so `nn.TransformerEncoder`, `GPSConv`), and Hugging
    Face encoders. State dicts keep their names. The first forward afterwards raises if no replaced attention was
    called, the first in `eval()` if one was not (in training a model may drop layers). With `batch_size` >= N the model
    computes what it did before, except where PyTorch Geometric's linear attentions left padded keys in denominators.
    Convert a model as a whole: it numbers the layers, so that they divide differently in `eval()`; layers converted one
    by one, or copied afterwards, divide alike there unless their `eval_seed` is set, and so does a layer that is called
    again and again (there is a warning then; `eval_rounds` helps).

    Args:
        model: changed in place; if it is itself an attention module, a new one that shares its weights is returned.
        batch_size: p >= 2.
        names: convert only these modules, by their names in `model.named_modules()` (default: all that are known).
        self_correction: see `random_batch_attention`; right for running an already trained softmax model.
        eval_rounds: divisions to average over in `eval()`.

    Returns:
        The model. `converted(model)` says what was replaced.

    Raises:
        ValueError: nothing could be replaced, or something would be skipped; the model is then unchanged.
    """
    check_batch_size(batch_size)
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise TypeError(f"`names` must be a list of names, got {names!r}")
    names = None if names is None else set(names)
    if names is not None and not names:
        raise ValueError("`names` is empty, so that nothing would be converted: leave it out to convert all")
    if not isinstance(self_correction, bool):
        raise TypeError(f"`self_correction` must be True or False, got {self_correction!r}")
    if isinstance(eval_rounds, bool) or not isinstance(eval_rounds, int) or eval_rounds < 1:
        raise ValueError(f"`eval_rounds` must be an int of at least 1, got {eval_rounds!r}")
    pyg, hf = _installed("torch_geometric", "pyg"), _installed("transformers", "hf")
    encoders = {} if hf is None or names is not None else hf.encoders(model)
    inside = {id(m) for encoder, _ in encoders.values() for m in encoder.modules()}
    if names is None:
        inside |= {id(part) for m in model.modules() if isinstance(m, RandomBatch) for part in m.module.modules()}
    targets = _targets(model, pyg, names, self_correction, inside)
    ours = {} if names is not None else {n: m for n, m in model.named_modules() if isinstance(m, _SIZED)}
    if not targets and not encoders and not ours:
        raise ValueError(
            f"found no attention to convert in {type(model).__name__}: known are nn.MultiheadAttention, PyTorch "
            "Geometric's SGFormer, Polynormer and Performer attention, and Hugging Face encoders; "
            "wrap others yourself with RandomBatch(module, batch_size)"
        )
    if self_correction and ours:
        name, module = next(iter(ours.items()))
        raise ValueError(f"cannot convert {name!r}: {type(module).__name__} has no `self_correction`; {_CHOOSE}")
    for encoder, attentions in encoders.values():
        hf.check(encoder, attentions)
    options: dict[str, Any] = {"batch_size": batch_size, "eval_rounds": eval_rounds}
    for module in ours.values():
        module.batch_size, module.eval_rounds = batch_size, eval_rounds
    in_encoders = sum(len(attentions) for _, attentions in encoders.values())
    numbers = {*range(len(targets) + in_encoders), *(module.eval_seed for module in ours.values())}
    if len(numbers) < len(targets) + in_encoders + len(ours):
        for number, module in enumerate(ours.values(), start=len(targets) + in_encoders):
            module.eval_seed = number
    correction = {"self_correction": self_correction}
    proof = Proof()
    for number, (old, kind) in enumerate(targets.values()):
        own = correction if kind is for_torch.RandomBatchMultiheadAttention else {}
        new = _adopt(kind, old, eval_seed=number, **options, **own)
        if old is model:
            return new
        _replace(model, old, new)
        proof.watch(new, "witness")
    first = len(targets)
    for encoder, attentions in encoders.values():
        for module in hf.convert_encoder(encoder, attentions, first=first, **options, **correction):
            proof.watch(module, "random_batch_witness", hf.is_converted)
        first += len(attentions)
    for_torch.forbid_bypass(model)
    if pyg is not None:
        pyg.adapt(model)
        proof.excused = pyg.skipped_on_purpose
    proof.arm(model)
    return model


def converted(model: nn.Module) -> dict[str, str]:
    """What `convert` replaced (and what else computes random batches), by name of the module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    pyg, hf = _installed("torch_geometric", "pyg"), _installed("transformers", "hf")
    ours = _OURS if pyg is None else (*_OURS, *pyg.ATTENTIONS.values())
    found = {
        name: f"{type(m).__name__}: random batches of {m.batch_size}"
        for name, m in model.named_modules()
        if isinstance(m, ours)
    }
    if hf is not None:
        for name, m in hf.attention_modules(model).items():
            if hf.is_converted(m):
                size = getattr(m.config, "random_batch_size", hf.DEFAULT_BATCH_SIZE)
                found[name] = f"{type(m).__name__}: random batches of {size}, attn_implementation={hf.NAME!r}"
    return found


def _installed(package: str, adapter: str):
    """Our adapter for a package, if the program uses that package; a model of it cannot exist otherwise."""
    return importlib.import_module(f"randombatch.nn.{adapter}") if package in sys.modules else None


def _targets(
    model: nn.Module, pyg, names: set[str] | None, self_correction: bool, inside: set[int]
) -> dict[str, tuple[nn.Module, type[nn.Module]]]:
    """Old module and new class for everything that will be replaced; raises before anything is touched.

    Modules `inside` Hugging Face encoders are left alone: what is not in their registry is cross-attention of a head.
    So are those inside a `RandomBatch`, which see one batch at a time already.
    """
    kinds: dict[type[nn.Module], type[nn.Module]] = {nn.MultiheadAttention: for_torch.RandomBatchMultiheadAttention}
    if pyg is not None:
        kinds |= pyg.ATTENTIONS
    # Converting again changes the batch size.
    kinds |= {kind: kind for kind in list(kinds.values())}
    candidates: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(module, kind) for kind in kinds)
        and id(module) not in inside
        and (names is None or name in names)
    }
    unknown = set() if names is None else names - set(candidates)
    if unknown:
        raise ValueError(
            f"no attention that can be converted by name is called {sorted(unknown)[0]!r} "
            "(Hugging Face models are converted as a whole, without `names`)"
        )
    for name, module in candidates.items():
        reason = _refusal(model, name, module, type(module) in kinds, self_correction)
        if reason:
            # A model that is an attention itself holds no others.
            advice = f"; {_CHOOSE}" if name else ""
            raise ValueError(f"cannot convert {name or type(module).__name__!r}: {reason}{advice}")
    return {name: (module, kinds[type(module)]) for name, module in candidates.items()}


def _refusal(model: nn.Module, name: str, module: nn.Module, known: bool, self_correction: bool) -> str | None:
    if not known:
        return f"{type(module).__name__} is a class of its own, whose behaviour could be lost"
    if not isinstance(module, nn.MultiheadAttention):
        return "`self_correction` is for softmax attention" if self_correction else None
    parent = model.get_submodule(name.rpartition(".")[0]) if name else None
    if isinstance(parent, nn.TransformerDecoderLayer) and parent.multihead_attn is module:
        return "it is the cross-attention of a decoder"
    return for_torch.refuse(module)


def _adopt(kind: type[nn.Module], old: nn.Module, **attributes: Any) -> nn.Module:
    """A module of another class around the same parameters, buffers, submodules and hooks."""
    new = kind.__new__(kind)
    # `nn.Module` keeps its tables in dicts of its own: copied, so that the old module stays as it was. Not those of
    # hooks, which whoever registered one removes it from.
    for name, value in old.__dict__.items():
        new.__dict__[name] = value.copy() if isinstance(value, dict) and "hooks" not in name else value
    for name, value in attributes.items():
        setattr(new, name, value)
    return new


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` stands, also where modules share it."""
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            if module is old:
                parent._modules[child] = new
