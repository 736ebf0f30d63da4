"""Processes that answer requests: only answers come out of them."""

import subprocess
import sys

import pytest

from randombatch.bench.processes import running
from randombatch.bench.worker import AT_LEAST, Layer

NOISY = """
import os, sys
from randombatch.bench.processes import serve

class Noisy:
    def time(self):
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n")
        print("and Python prints")
        return {"train_s": 1.0}

sys.argv[1:] = ["{}"]
serve(lambda settings: Noisy())
"""


def test_what_libraries_print_is_no_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOISY], input='{"do": "time"}\n', capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ['{"ready": true}', '{"train_s": 1.0}']
    assert done.stderr.splitlines() == ["[Gloo] Rank 0 is connected to 1 peer ranks.", "and Python prints"]


def test_a_process_that_ends_says_why() -> None:
    settings = {"contender": "ours", "nodes": 10, "dim": 3, "heads": 2, "batch_size": 4, "threads": 1}
    wrong = "process of 'ours' ended: ValueError: `embed_dim` must be a multiple"
    with pytest.raises(RuntimeError, match=wrong), running(settings):
        pass


@pytest.mark.parametrize(("seconds", "steps"), [(0.3 * AT_LEAST, 4), (2 * AT_LEAST, 1)])
def test_short_steps_are_repeated_and_averaged(monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int) -> None:
    layer = Layer({"contender": "ours", "nodes": 10, "dim": 4, "heads": 1, "batch_size": 4})
    taken: list[float] = []

    def step(*_) -> dict[str, float]:
        taken.append(len(taken))
        return {"forward_s": float(taken[-1]), "train_s": seconds}

    monkeypatch.setattr(layer, "_step", step)
    assert layer.time() == {"forward_s": (steps - 1) / 2, "train_s": pytest.approx(seconds)}
    assert len(taken) == steps
