"""Jobs that are killed or told to stop at any moment go on to the same bits."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Told, newest

from randombatch.train import job, job_folder
from randombatch.train.config import Config, ConfigError
from randombatch.train.job import train

Small = Callable[..., Config]
Outcome = Callable[[Path], dict[str, Any]]


class Killed(BaseException):
    pass


class Killer:
    """Ends the program at its `moment`-th file operation: nothing behind it is run, not even the tidying up."""

    def __init__(self, patch: pytest.MonkeyPatch, moment: int) -> None:
        self.patch, self.left = patch, moment
        # The next one is another process.
        patch.setattr(os, "getpid", lambda: 10**7 + moment)
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "mkdir")):
            self._watch(owner, name)

    def _watch(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.patch.setattr(Path, "unlink", lambda *_, **__: None)
                raise Killed
            return function(*arguments, **named)

        self.patch.setattr(owner, name, wrapped)


def test_killed_at_each_file_operation(
    small: Small, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(train__epochs=2, train__runs=1, train__checkpoint_every=1)
    train(config, tmp_path / "whole")
    moment, killed = 0, True
    while killed:
        moment += 1
        folder, killed = tmp_path / f"parts-{moment}", False
        with monkeypatch.context() as patch:
            Killer(patch, moment)
            try:
                train(config, folder)
            except Killed:
                killed = True
        train(config, folder, resume=True)
        assert outcome(folder) == outcome(tmp_path / "whole"), f"killed at file operation {moment}"
        left = {p.name for p in (*folder.iterdir(), *(folder / "checkpoints").iterdir())}
        assert not [name for name in left if name.endswith(".tmp")], "leftovers"
        assert len([name for name in left if name[:9].isdigit()]) <= 4, "more than two checkpoints"
    assert moment > 20


@pytest.fixture(scope="module")
def longer(small: Small) -> Config:
    """Some 120 steps: long enough to be met by a signal."""
    return small(train__minibatch="induced", train__checkpoint_every=1, train__epochs=10, train__runs=3)


@pytest.fixture(scope="module")
def longer_whole(longer: Config, outcome: Outcome, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("longer") / "job"
    torch.set_num_threads(1)
    train(longer, folder)
    return outcome(folder)


def test_killed_by_the_system_at_any_moment(
    longer: Config, longer_whole: dict[str, Any], outcome: Outcome, tmp_path: Path
) -> None:
    """kill -9 of real processes: at first while they start, then while they train."""
    # Processes are forked from one that has everything imported: they start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["randombatch.train.job", "randombatch.models.peers", "randombatch.report.plots"])
    moments, kills = random.Random(5), 0
    while not (tmp_path / "result.json").exists():
        before = newest(tmp_path)
        process = context.Process(target=train, args=(longer, tmp_path), kwargs={"resume": True})
        process.start()
        while kills > 1 and process.is_alive() and newest(tmp_path) == before:
            time.sleep(0.002)
        process.join(moments.uniform(0, 0.2))
        if process.is_alive():
            process.kill()
            kills += 1
            assert kills < 40, "it does not come forward"
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
    assert outcome(tmp_path) == longer_whole
    assert not list(tmp_path.rglob("*.tmp")), "leftovers"
    assert kills > 3, "killed too seldom to show anything"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_the_step_save_and_exit_with_130(
    longer: Config,
    longer_whole: dict[str, Any],
    outcome: Outcome,
    tmp_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_folder, "LOCK_SECONDS", 0.0)
    config = longer
    (tmp_path / "job.toml").write_text(config.to_toml())
    folder = tmp_path / "job"
    command = [sys.executable, "-m", "randombatch", "train", str(tmp_path / "job.toml"), "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.005)
    with pytest.raises(ConfigError, match="another process is training in"):
        train(config, folder, resume=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "interrupted" in line]
    assert "interrupted in run 1 after epoch" in line
    assert "the checkpoint is kept, continue with --resume" in line
    assert newest(folder) > 0
    assert not (folder / "result.json").exists()
    done = len(metrics.read_text().splitlines())
    display = Told()
    train(config, folder, resume=True, display=display)
    assert f"continuing run 1 after epoch {done}" in display.lines
    assert outcome(folder) == longer_whole


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_a_second_signal_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with job._Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
