"""Whole processes under torchrun: one that is killed, one that fails, ports in use, peers that never come."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from randombatch.train.config import ConfigError
from randombatch.train.team import join

ARGUMENTS = ["--batch-size", "8", "--hidden", "8", "--runs", "1", "--threads", "1", "--no-summary"]
FAST = ["--set", "train.checkpoint_every=1", "--set", "train.timeout=20"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    generator = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("graph") / "small.npz"
    part = generator.permutation(90) % 3
    masks = {name: part == number for number, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    x = generator.normal(size=(90, 6)).astype(np.float32)
    np.savez(path, x=x, edge_index=generator.integers(0, 90, (2, 200)), y=np.arange(90) % 3, **masks)
    return str(path)


def environment(**more: str) -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**known, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo", **more}


def torchrun(*arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    return subprocess.Popen(
        [*command, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for(path: Path, lines: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        time.sleep(0.02)
    raise AssertionError("it never came so far")


def workers(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks by /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_started_again_and_the_result_is_that_of_an_uninterrupted_run(
    graph: str, tmp_path: Path, victim: int
) -> None:
    train = ["-m", "randombatch", "train", "--dataset", graph, "--epochs", "60", *ARGUMENTS, *FAST]
    process = torchrun(*train, "--out", str(tmp_path / "job"), options=("--max-restarts", "1"))
    try:
        wait_for(tmp_path / "job" / "metrics.jsonl", 15, process)
        os.kill(workers(process)[victim], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "continuing run 1 after epoch" in errors
    subprocess.run([sys.executable, *train, "--out", str(tmp_path / "alone")], env=environment(), check=True)
    # Two ranks add in another order than one: rounding, which grows.
    assert losses(tmp_path / "job") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)
    assert len(losses(tmp_path / "job")) == 60
    assert json.loads((tmp_path / "job" / "result.json").read_text())["ranks"] == 2


FAILING = """
import os, sys
from randombatch.train import loop
train = loop.Run._train
def fail(self, step):
    if os.environ["RANK"] == "1" and self.epoch == 3:
        raise {error}
    train(self, step)
loop.Run._train = fail
from randombatch.cli import main
main()
"""


def test_a_rank_that_fails_ends_all_with_its_own_error_first(graph: str, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(error="ValueError('the disk of rank 1 is gone')"))
    start = time.monotonic()
    process = torchrun(str(script), "train", "--dataset", graph, *ARGUMENTS, *FAST, "--out", str(tmp_path / "job"))
    _, errors = process.communicate(timeout=90)
    assert process.returncode != 0
    assert time.monotonic() - start < 60
    assert "randombatch (rank 1): the disk of rank 1 is gone" in errors
    if "(rank 0)" in errors:
        assert errors.index("(rank 1): the disk") < errors.index("(rank 0)")
    # What was saved before is whole.
    result = subprocess.run(
        [sys.executable, "-m", "randombatch", "train", "--dataset", graph, *ARGUMENTS, *FAST, "--out",
         str(tmp_path / "job"), "--resume", "--epochs", "200"],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "continuing run 1 after epoch 3" in result.stderr


def refused(graph: str, folder: Path, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "randombatch", "train", "--dataset", graph, *ARGUMENTS, "--out", str(folder)]
    command += ["--set", "train.timeout=4"]
    result = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in result.stderr, result.stderr
    assert not folder.exists()
    return result.returncode, result.stderr


def test_a_missing_environment(graph: str, tmp_path: Path) -> None:
    code, errors = refused(graph, tmp_path / "job", RANK="0", WORLD_SIZE="2")
    assert code == 2
    assert "MASTER_ADDR, MASTER_PORT is not: start with torchrun" in errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": ""}, "MASTER_PORT is set but RANK is not"),
        ({"WORLD_SIZE": ""}, "MASTER_PORT is set but WORLD_SIZE is not"),
        ({"RANK": "x"}, "RANK must be a whole number, got 'x'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, got 'http'"),
        ({"RANK": "2"}, "RANK must be 0 to WORLD_SIZE - 1 = 1, got 2"),
    ],
)
def test_an_environment_that_torchrun_would_not_make(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **changes}
    for name, value in where.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        join("cpu", 4)


def test_a_signal_is_said_once_and_a_job_of_before_is_not_continued_unasked(graph: str, tmp_path: Path) -> None:
    train = ["-m", "randombatch", "train", "--dataset", graph, *ARGUMENTS, *FAST, "--out", str(tmp_path / "job")]
    process = torchrun(*train, "--epochs", "100000")
    try:
        wait_for(tmp_path / "job" / "metrics.jsonl", 3, process)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert errors.count("the checkpoint is kept, continue with --resume") == 1
    assert process.returncode != 0
    before = (tmp_path / "job" / "metrics.jsonl").read_bytes()
    process = torchrun(*train, "--epochs", "100000", options=("--max-restarts", "1"))
    _, errors = process.communicate(timeout=90)
    assert process.returncode != 0
    assert errors.count("holds a job already: continue it with --resume") == 2, "it was tried twice"
    assert (tmp_path / "job" / "metrics.jsonl").read_bytes() == before


def test_a_port_in_use_and_a_peer_that_never_comes(graph: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, errors = refused(graph, tmp_path / "job", **where)
        assert code == 2
        assert "another program uses this port" in errors
    start = time.monotonic()
    code, errors = refused(graph, tmp_path / "job", **where)
    assert code == 2
    assert "waited up to 4 s" in errors
    assert errors.count("\n") == 1
    assert time.monotonic() - start < 40
