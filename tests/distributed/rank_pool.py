"""Four processes that stay alive and run functions of the tests as ranks 0, ..., R - 1 of a gloo group of R."""

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

SIZES = (1, 2, 3, 4)
TIMEOUT = 60


def serve(rank: int, store: str, pipe: Connection) -> None:
    """Run what comes through the pipe until None comes."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(SIZES), timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in SIZES}
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        function, size, arguments = job
        try:
            torch.manual_seed(0)
            pipe.send((True, function(groups[size], *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Pool:
    def __init__(self, folder: str) -> None:
        self.folder, self.started = folder, 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        self.stop()
        self.started += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(max(SIZES)):
            here, there = context.Pipe()
            store = f"{self.folder}/store{self.started}"
            process = context.Process(target=serve, args=(rank, store, there), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(here)
        for pipe in self.pipes:
            assert pipe.poll(120)
            assert pipe.recv() == "ready"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(group, *arguments)` on ranks 0 to size - 1; their results."""
        if not self.processes:
            self.start()
        for pipe in self.pipes[:size]:
            pipe.send((function, size, arguments))
        answers = [pipe.recv() if pipe.poll(2 * TIMEOUT) else (False, "no answer") for pipe in self.pipes[:size]]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            self.stop()
            pytest.fail("\n".join(failed))
        return [result for _, result in answers]
