"""The proof that replaced attention is really called."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn


class Calls:
    """How often one attention module was called in this forward, and whether ever.

    Each module has its own: compiled code of one layer serves the next, and would name the first one's module.
    """

    def __init__(self) -> None:
        self.now, self.ever = 0, False

    def add(self) -> None:
        self.now, self.ever = self.now + 1, True


class Proof:
    """Watches forwards of the model until each replaced attention was called, and raises if one is not."""

    def __init__(self) -> None:
        self.watched: list[tuple[nn.Module, str, Calls]] = []
        # Whether a model leaves its attention out by its own choice.
        self.excused: Callable[[nn.Module], bool] | None = None

    def watch(self, module: nn.Module, attribute: str) -> None:
        """Have the module report its calls under this name."""
        calls = Calls()
        setattr(module, attribute, calls)
        self.watched.append((module, attribute, calls))

    def arm(self, model: nn.Module) -> None:
        """Watch the model, also for what it still has to prove from before."""
        for hook in list(model._forward_hooks.values()):
            if isinstance(hook, Proof):
                self.watched += hook._present(model)
                hook._disarm()
        if self.watched:
            self.handles = model.register_forward_pre_hook(self._begin), model.register_forward_hook(self)

    def _disarm(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _present(self, model: nn.Module) -> list[tuple[nn.Module, str, Calls]]:
        """What is watched and still there: a part may have been replaced, or converted again, by itself."""
        parts = {id(part) for part in model.modules()}
        return [(m, name, calls) for m, name, calls in self.watched if id(m) in parts and getattr(m, name) is calls]

    def _begin(self, model: nn.Module, args: tuple) -> None:
        for _, _, calls in self.watched:
            calls.now = 0

    def __call__(self, model: nn.Module, args: tuple, output: Any) -> None:
        # `nn.DataParallel` runs copies, whose modules are others.
        if getattr(model, "_is_replica", False) or (self.excused is not None and self.excused(model)):
            return
        watched = self._present(model)
        names = {id(m): name for name, m in model.named_modules()}
        skipped = [names[id(m)] for m, _, calls in watched if not calls.ever]
        if skipped and model.training and any(calls.ever for _, _, calls in watched):
            # Some models drop layers at random in training: only evaluation, or a later step, can tell.
            return
        if skipped:
            raise RuntimeError(
                f"converted attention was never called in this forward: {', '.join(skipped)}. The model computes its "
                "attention elsewhere; its results are not random-batch results"
            )
        for module, attribute, _ in watched:
            setattr(module, attribute, None)
        self._disarm()
        repeated = [names[id(m)] for m, _, calls in watched if calls.now > 1]
        if repeated:
            warnings.warn(
                f"{', '.join(repeated)} was called more than once in a forward. In eval() it divides alike every time: "
                "if the calls follow each other (shared layers), items of different batches never meet there unless "
                "`eval_rounds` averages over several divisions",
                stacklevel=2,
            )
