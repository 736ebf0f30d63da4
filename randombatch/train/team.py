"""This process among its peers: joined from torchrun's environment, agreeing on what they do, ending together."""

import contextlib
import datetime
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from randombatch.distributed.wires import PeerLost
from randombatch.train.config import ConfigError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Disagreement(ConfigError):
    """Ranks differ in something; all of them raise it."""


class Team:
    """Ranks that train one model. `Team()` is a single process and sends nothing.

    Args:
        group: the process group, None for one rank.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    @property
    def leader(self) -> bool:
        """Whether this rank writes and shows progress."""
        return self.rank == 0

    def agree(self, **what: str) -> None:
        """Refuse to start if ranks differ in any of the named texts."""
        if self.size == 1:
            return
        for name, text in what.items():
            digests: list[Any] = [None] * self.size
            dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest(), group=self.group)
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if others:
                raise Disagreement(
                    f"ranks differ in their {name}: rank {', '.join(map(str, others))} has another one than rank 0; "
                    "start all of them with the same command, files and version"
                )

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor([float(flag)])).item())

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag whether it is up on any rank; one message for all."""
        if self.size == 1:
            return list(flags)
        return [bool(count) for count in self.sum(torch.tensor([float(flag) for flag in flags])).tolist()]

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """A small value from every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, found: tuple[dict[str, Tensor], dict[str, Any]] | None) -> Any:
        """The leader's tensors and plain values on every rank; None if it has none."""
        if self.size == 1:
            return found
        from safetensors.torch import load, save

        content = b""
        if found is not None:
            text = json.dumps(found[1]).encode()
            content = len(text).to_bytes(8, "big") + text + save({k: t.contiguous() for k, t in found[0].items()})
        size = torch.tensor([len(content)])
        dist.broadcast(size, 0, group=self.group)
        if not int(size):
            return None
        data = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if content
            else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(data, 0, group=self.group)
        content = data.numpy().tobytes()
        split = 8 + int.from_bytes(content[:8], "big")
        return load(content[split:]), json.loads(content[8:split])

    def average_buffers(self, model: torch.nn.Module) -> None:
        """Running statistics that each rank took over its own mini-batches become their mean."""
        if self.size == 1:
            return
        for buffer in model.buffers():
            if buffer.is_floating_point():
                self.sum(buffer).div_(self.size)
            else:
                dist.broadcast(buffer, 0, group=self.group)

    def leave(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)


def started_by_torchrun() -> bool:
    """Or by something else that numbers its processes."""
    return "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


def launch() -> str:
    """Names the torchrun that started this process, the same when it starts it again; empty without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    with contextlib.suppress(OSError, IndexError):
        # Numbers of processes come again; the moment at which one began does not.
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()} {began}"
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}"


def restarted() -> bool:
    """Whether torchrun started these processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def device_of(device: str) -> str:
    """The device of this process: with several on a machine, each has its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and started_by_torchrun() else device


def join(device: str, timeout: float) -> Team:
    """Meet the other ranks, or be alone where torchrun did not start this process.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, and gloo for what is on the CPU).
        timeout: seconds after which a rank that waits for another one gives up.
    """
    if not started_by_torchrun():
        return Team()
    _check_environment()
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    limit = datetime.timedelta(seconds=timeout)
    try:
        with _silent():
            store, rank, size = next(dist.rendezvous("env://", timeout=limit))
            store.set_timeout(limit)
            # Processes that torchrun starts again must not find the addresses of those before them.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError, ValueError) as error:
        text = str(error).splitlines()[0]
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        hint = (
            "another program uses this port: choose another with --master-port"
            if "EADDRINUSE" in str(error)
            else f"waited up to {timeout:.0f} s (train.timeout)"
        )
        raise ConfigError(f"cannot meet the other ranks at {where}: {hint} ({text})") from None
    return Team(dist.group.WORLD)


def _check_environment() -> None:
    """Refuse what torchrun would have set otherwise, before anybody waits for anybody."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        there = ", ".join(name for name in NEEDED if name not in missing)
        raise ConfigError(f"{there} is set but {', '.join(missing)} is not: start with torchrun, or unset it")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise ConfigError(f"{name} must be a whole number, got {os.environ[name]!r}: start with torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"RANK must be 0 to WORLD_SIZE - 1 = {size - 1}, got {rank}: start with torchrun")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the traces that torch writes from C++ before it raises the same as an exception."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def lost_peer(error: Exception) -> bool:
    """Whether an error means that another rank is gone or stuck, not that this one is at fault."""
    if isinstance(error, ValueError):
        return False
    if isinstance(error, PeerLost):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "timed out", "connection refused", "broken pipe", "nccl")
    return isinstance(error, dist.DistBackendError) or ("gloo" in text and any(sign in text for sign in signs))
