"""Models of PyTorch Geometric under our training loop, as they are or converted, and the choice of a model by name."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from randombatch.models.sgformer import SGFormer
from randombatch.nn.convert import convert

_Model = TypeVar("_Model", bound=nn.Module)
_WIDTHS = ("in_channels", "hidden_channels", "out_channels")


class Peer(nn.Module):
    """A model called as `model(x, edge_index, batch)` behind the interface of our `SGFormer`.

    Args:
        model: the module of PyTorch Geometric.
        attention: names of the submodules that hold the attention branch (for the weight decay).
    """

    def __init__(self, model: nn.Module, attention: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, x: Tensor, edge_index: Tensor, ptr: Tensor | None = None, nodes: Tensor | None = None) -> Tensor:
        """Logits (or log-probabilities, which are logits too) of every node."""
        if nodes is not None:
            raise ValueError("PyTorch Geometric's models attend to all nodes that they see: use induced mini-batches")
        if ptr is None:
            batch = torch.zeros(len(x), dtype=torch.long, device=x.device)
        else:
            batch = torch.repeat_interleave(torch.arange(len(ptr) - 1, device=x.device), ptr.diff().to(x.device))
        return self.model(x, edge_index, batch)

    def branches(self) -> dict[str, list[nn.Parameter]]:
        """Parameters of the attention and all others."""
        trans = [p for name, p in self.model.named_parameters() if name.startswith(self.attention)]
        seen = {id(p) for p in trans}
        return {"trans": trans, "gnn": [p for p in self.parameters() if id(p) not in seen]}


class GPS(nn.Module):
    """Input layer, `GPSConv` layers around GCN convolutions, output layer."""

    def __init__(
        self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int = 2, heads: int = 1,
        dropout: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        from torch_geometric.nn import GCNConv, GPSConv

        self.lin_in = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            GPSConv(hidden_channels, GCNConv(hidden_channels, hidden_channels), heads=heads, dropout=dropout)
            for _ in range(num_layers)
        )
        self.lin_out = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.lin_in(x)
        for conv in self.convs:
            x = conv(x, edge_index, batch)
        return self.lin_out(x)


def build_model(
    name: str,
    in_channels: int,
    hidden_channels: int,
    out_channels: int,
    attention: str = "random-batch",
    batch_size: int = 256,
    options: dict[str, Any] | None = None,
) -> SGFormer | Peer:
    """A model by name.

    Args:
        name: "sgformer" (ours), "pyg-sgformer", "pyg-polynormer" or "pyg-gps".
        in_channels: width of the features.
        hidden_channels: width of the model.
        out_channels: number of classes.
        attention: one of `ATTENTIONS`; for models of PyTorch Geometric "origin" (as it is) or "random-batch".
        batch_size: p of random-batch.
        options: further arguments of the constructor; a name that it does not have is an error.
    """
    options = options or {}
    widths = in_channels, hidden_channels, out_channels
    if name == "sgformer":
        return _build(name, SGFormer, widths, options, attention=attention, batch_size=batch_size)
    if attention not in ("origin", "random-batch"):
        raise ValueError(f"{name} runs with attention 'origin' (as it is) or 'random-batch', not {attention!r}")
    model: nn.Module
    if name == "pyg-gps":
        gps = _build(name, GPS, widths, options)
        model, branch = gps, tuple(f"convs.{i}.attn" for i in range(len(gps.convs)))
    else:
        from torch_geometric.nn import models

        kinds = {"pyg-sgformer": (models.SGFormer, "trans_conv"), "pyg-polynormer": (models.Polynormer, "global_attn")}
        if name not in kinds:
            raise ValueError(f"`name` must be one of sgformer, pyg-gps, {', '.join(kinds)}, got {name!r}")
        kind, start = kinds[name]
        model, branch = _build(name, kind, widths, options), (start,)
        if name == "pyg-polynormer":
            vars(model)["_global"] = True  # its second phase, the one with attention
    if attention == "random-batch":
        model = convert(model, batch_size)
    return Peer(model, branch)


def known_options(name: str) -> set[str]:
    """Names that `options` may have for this model."""
    return set(_parameters(name)) - {*_WIDTHS, "attention", "batch_size"}


def times_default(name: str, options: dict[str, Any]) -> float:
    """How many times the layers and heads that a model has by default; 1 at least."""
    defaults = {key: p.default for key, p in _parameters(name).items()}
    layers = {key: value for key, value in defaults.items() if key.endswith("layers")}
    heads = {key: value for key, value in defaults.items() if key.endswith("heads")}
    found = 1.0
    for group in (layers, heads):
        if group:
            found *= max(1.0, sum(options.get(key, value) for key, value in group.items()) / sum(group.values()))
    return found


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    kind: Callable = GPS if name == "pyg-gps" else SGFormer
    if name in ("pyg-sgformer", "pyg-polynormer"):
        from torch_geometric.nn import models

        kind = models.SGFormer if name == "pyg-sgformer" else models.Polynormer
    return inspect.signature(kind).parameters


def _build(name: str, kind: Callable[..., _Model], widths: tuple[int, ...], options: dict[str, Any], **given) -> _Model:
    _check(name, kind, options, (*_WIDTHS, *given))
    try:
        return kind(*widths, **given, **options)
    except (TypeError, ArithmeticError, AssertionError, RuntimeError) as error:
        # Values come from files: whatever a constructor thinks of them is bad input.
        raise ValueError(f"{name} cannot be built with {options}: {error}") from error


def _check(name: str, kind: Callable, options: dict[str, Any], given: tuple[str, ...]) -> None:
    parameters = inspect.signature(kind).parameters
    known = [p for p in parameters if p not in given]
    for option, value in options.items():
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
            raise ValueError(f"{name} has no option {option!r}: {hint}")
        if isinstance(parameters[option].default, bool) and not isinstance(value, bool):
            raise ValueError(f"{name}: {option} must be true or false, got {value!r}")
