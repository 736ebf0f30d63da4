"""PyTorch Geometric's attention modules in random batches, and what its models need besides."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models import SGFormer
from torch_geometric.nn.models.polynormer import Polynormer

from randombatch.nn.draws import Draws
from randombatch.nn.wrapper import apply_in_batches

_uncompiled = torch.compiler.disable(apply_in_batches)


class _InBatches(Draws, nn.Module):
    """The attention of the class that follows in the inheritance, inside each random batch of each graph's valid rows.

    Batches are never padded, so the keys of padding that those classes leave in their denominators never get there.
    """

    batch_size: int
    witness: Any = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.witness is not None:
            self.witness.add()
        return _uncompiled(self, super().forward, x, mask)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, batch_size={self.batch_size})"


class RandomBatchSGFormerAttention(_InBatches, SGFormerAttention):
    """PyTorch Geometric's `SGFormerAttention` in random batches."""


class RandomBatchPolynormerAttention(_InBatches, PolynormerAttention):
    """PyTorch Geometric's `PolynormerAttention` in random batches."""


class RandomBatchPerformerAttention(_InBatches, PerformerAttention):
    """PyTorch Geometric's `PerformerAttention` in random batches; `GPSConv` still knows it by its class."""


ATTENTIONS: dict[type[nn.Module], type[nn.Module]] = {
    SGFormerAttention: RandomBatchSGFormerAttention,
    PolynormerAttention: RandomBatchPolynormerAttention,
    PerformerAttention: RandomBatchPerformerAttention,
}


def adapt(model: nn.Module) -> None:
    """Mend what stands around converted attention: parameter lists, `batch=None`, Polynormer's switch.

    That switch only once: its attention would never run otherwise, but it may be off on purpose later.
    """
    for module in model.modules():
        if not isinstance(module, (SGFormer, Polynormer)):
            continue
        if not any(isinstance(m, _InBatches) for m in module.modules()):
            continue
        again = any(isinstance(hook, _OneGraph) for hook in module._forward_pre_hooks.values())
        if isinstance(module, SGFormer):
            module.params1 = list(module.trans_conv.parameters())
            module.params2 = [*module.graph_conv.parameters(), *module.fc.parameters()]
        elif not module._global and not again:
            module._global = True
        if not again:
            module.register_forward_pre_hook(_OneGraph(type(module)), with_kwargs=True)


def skipped_on_purpose(model: nn.Module) -> bool:
    """Whether a Polynormer is in its local phase, where no attention is meant to run."""
    return any(isinstance(m, Polynormer) and not m._global for m in model.modules())


class _OneGraph:
    """Lets `model(x, edge_index)` and `batch=None` mean a single graph, and keeps the rows of a graph in order.

    Of a class whose `forward` takes no `x` and `batch`, nor passes on what it takes, nothing is changed.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        every = list(inspect.signature(kind.forward).parameters.values())[1:]
        self.names = [p.name for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        kinds = {p.kind for p in every}
        if "batch" not in self.names and inspect.Parameter.VAR_KEYWORD in kinds:
            # What it passes on goes to the class of PyTorch Geometric.
            passed = ["x", "edge_index", "batch"]
            self.names = passed if inspect.Parameter.VAR_POSITIONAL in kinds else [*self.names, "batch"]

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        x, batch = given.get("x"), given.get("batch")
        if "batch" not in self.names or len(given) < len(args) + len(kwargs) or not isinstance(x, Tensor):
            # Something twice, too much or missing: the model says what is wrong.
            return args, kwargs
        if batch is None:
            batch = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        if isinstance(module, Polynormer):
            batch = batch.as_subclass(_SortsStably)
        place = self.names.index("batch")
        if place < len(args):
            return (*args[:place], batch, *args[place + 1 :]), kwargs
        return args, kwargs | {"batch": batch}


class _SortsStably(Tensor):
    """Polynormer sorts `batch` unstably: rows of a graph change places depending on the graphs beside it."""

    def sort(self, *args, **kwargs):
        return self.as_subclass(Tensor).sort(*args, **kwargs, stable=True)
