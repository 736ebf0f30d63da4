"""The proof that replaced attention is really called."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Calls:
    """How often one attention module was called in this forward, and whether in any that ended well.

    Each module has its own: compiled code of one layer serves the next, and would name the first one's module.

    Attributes:
        resting: not to be told until `eval()`.
    """

    def __init__(self) -> None:
        self.now, self.ever, self.resting = 0, False, False

    def add(self) -> None:
        self.now += 1


class Watched(NamedTuple):
    """A module, under which name it reports its calls, and whether it is still to be watched."""

    module: nn.Module
    attribute: str
    calls: Calls
    still: Callable[[nn.Module], bool]


def always(module: nn.Module) -> bool:
    return True


class Proof:
    """Watches forwards of the model until each replaced attention was called in `eval()`, and raises if one is not.

    In training until each was called at some time: a model may drop layers at random.
    """

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.trained = self.done = False
        # Whether a model leaves its attention out by its own choice.
        self.excused: Callable[[nn.Module], bool] | None = None

    def watch(self, module: nn.Module, attribute: str, still: Callable[[nn.Module], bool] = always) -> None:
        """Have the module report its calls under this name."""
        self.watched.append(Watched(module, attribute, Calls(), still))

    def arm(self, model: nn.Module) -> None:
        """Watch the model, also for what it still has to prove from before."""
        for hook in list(model._forward_hooks.values()):
            if isinstance(hook, Proof):
                again = {id(watched.module) for watched in self.watched}
                self.watched += [watched for watched in hook._present(model) if id(watched.module) not in again]
                hook._disarm()
        for watched in self.watched:
            watched.calls.resting = False
            setattr(watched.module, watched.attribute, watched.calls)
        if self.watched:
            self.handles = model.register_forward_pre_hook(self._begin), model.register_forward_hook(self)

    def _disarm(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _present(self, model: nn.Module) -> list[Watched]:
        """What is watched and still there: a part may have been replaced, or converted again, by itself."""
        parts = {id(part) for part in model.modules()}
        there = (w for w in self.watched if id(w.module) in parts and w.still(w.module))
        return [w for w in there if getattr(w.module, w.attribute) is (None if w.calls.resting else w.calls)]

    def _begin(self, model: nn.Module, args: tuple) -> None:
        if self.done or (self.trained and model.training):
            return
        for watched in self._present(model):
            watched.calls.now, watched.calls.resting = 0, False
            setattr(watched.module, watched.attribute, watched.calls)

    def __call__(self, model: nn.Module, args: tuple, output: Any) -> None:
        # `nn.DataParallel` runs copies, whose modules are others.
        if getattr(model, "_is_replica", False) or (self.excused is not None and self.excused(model)):
            return
        if self.done and not torch.compiler.is_compiling():
            self._disarm()
        if self.done or (self.trained and model.training):
            return
        present = self._present(model)
        for watched in present:
            watched.calls.ever |= watched.calls.now > 0
        names = {id(m): name for name, m in model.named_modules()}
        never = [w for w in present if not w.calls.ever]
        skipped = [w for w in present if not w.calls.now]
        if model.training and never and len(never) < len(present):
            # Some models drop layers at random in training: only evaluation, or a later step, can tell.
            return
        if never or (skipped and len(skipped) == len(present) and not model.training):
            raise RuntimeError(
                f"converted attention was never called in this forward: {_list(names, never or skipped)}. The model "
                "computes its attention elsewhere; its results are not random-batch results"
            )
        if skipped and not model.training:
            warnings.warn(
                f"{_list(names, skipped)} was called in training but not in this forward in eval(): unless the model "
                "leaves it out on purpose, it computes its attention elsewhere",
                stacklevel=2,
            )
        repeated = [w for w in present if w.calls.now > 1]
        if repeated and not self.trained:
            warnings.warn(
                f"{_list(names, repeated)} was called more than once in a forward. In eval() it divides alike every "
                "time: if the calls follow each other (shared layers), items of different batches never meet there "
                "unless `eval_rounds` averages over several divisions",
                stacklevel=2,
            )
        for watched in present:
            watched.calls.resting = True
            setattr(watched.module, watched.attribute, None)
        self.trained, self.done = True, not model.training
        # Compiled code cannot: it stays until a forward that is not compiled, and does nothing.
        if self.done and not torch.compiler.is_compiling():
            self._disarm()


def _list(names: dict[int, str], those: list[Watched]) -> str:
    return ", ".join(names[id(w.module)] for w in those)
