"""Contenders as processes that take turns, so that a slow minute of the machine hits all of them alike."""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

# Keeps glibc from returning large blocks to the kernel and fetching them anew at every step: peers run up to twice as
# fast with it, at the price of memory. Other systems ignore it.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
ALLOCATORS: dict[str, dict[str, str]] = {"default": {}, "keeping": KEEP_MEMORY}


class Worker:
    """A process that runs a module of this package and answers requests; the first answer comes when it is ready.

    Args:
        name: what errors call it.
        module: its name in this package; its main is `serve`.
        settings: that `serve` passes on.
        environment: the process's.
    """

    def __init__(self, name: str, module: str, settings: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"randombatch.bench.{module}", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def request(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            reason = self._process.stderr.read().strip().splitlines() or ["killed, most likely for lack of memory"]
            raise RuntimeError(f"{self.name} ended: {reason[-1]}")
        return json.loads(line)

    def ask(self, what: str) -> dict[str, Any]:
        self.request(what)
        return self.answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """The other end: `make(settings)`, then its methods as they are requested, until standard input ends."""
    with prints_apart() as answers:
        served = make(json.loads(sys.argv[1]))
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(served, json.loads(line)["do"])()), file=answers, flush=True)


@contextlib.contextmanager
def prints_apart() -> Iterator[IO[str]]:
    """Standard output, from where on everything else that is printed goes to standard error: gloo prints, too."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


@contextlib.contextmanager
def running(settings: dict[str, Any], allocator: str = "default") -> Iterator[Worker]:
    """A contender."""
    environment = {k: v for k, v in os.environ.items() if k not in KEEP_MEMORY} | ALLOCATORS[allocator]
    worker = Worker(f"the process of {settings['contender']!r}", "worker", settings, environment)
    try:
        worker.answer()
        yield worker
    finally:
        worker.stop()


@dataclasses.dataclass
class Times:
    """Seconds of every turn: the least disturbed one tells how fast a contender is."""

    forward: list[float] = dataclasses.field(default_factory=list)
    train: list[float] = dataclasses.field(default_factory=list)

    def row(self) -> dict[str, float]:
        return {
            **({"forward_s": min(self.forward)} if self.forward else {}),
            "train_s": min(self.train),
            "train_median_s": statistics.median(self.train),
            "turns": len(self.train),
        }


def take_turns(workers: dict[Any, Worker], turns: int, tick: Callable[[], None]) -> dict[Any, Times]:
    """Every worker steps once, then every worker again, `turns` times (after one step to warm up)."""
    times: dict[Any, Times] = {key: Times() for key in workers}
    for turn in range(turns + 1):
        for key, worker in workers.items():
            answer = worker.ask("time")
            if turn:
                if "forward_s" in answer:
                    times[key].forward.append(answer["forward_s"])
                times[key].train.append(answer["train_s"])
            tick()
    return times
