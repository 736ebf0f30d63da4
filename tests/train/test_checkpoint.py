"""Checkpoints: whole or absent, vouched for by their hash, never unpickled."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from randombatch.atomic import check_output
from randombatch.train import checkpoint
from randombatch.train.checkpoint import CheckpointError, Checkpoints, load_tensors, save_tensors, write_atomically

Found = tuple[dict[str, Tensor], dict[str, Any]]


def latest(checkpoints: Checkpoints) -> tuple[Found | None, list[str]]:
    warnings: list[str] = []
    return checkpoints.latest(warnings.append, lambda tensors, state: (tensors, state)), warnings


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    """Three saved, so two are kept: 2 and 3."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for epoch in (1, 2, 3):
        checkpoints.save({"weight": torch.full((4, 3), float(epoch))}, {"epoch": epoch})
    return checkpoints


def test_tensors_and_state_come_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(5, 3), "double": torch.tensor([0.1, -0.0, torch.nan, torch.inf], dtype=torch.float64),
        "scalar": torch.tensor(7.0), "count": torch.tensor(2**62), "half": torch.randn(4).bfloat16(),
        "generator": torch.get_rng_state(), "turned": torch.randn(3, 4).T, "empty": torch.zeros(0, 3),
    }  # fmt: skip
    state = {"epoch": 3, "loss_sum": 0.1 + 0.2, "best": {"val": None, "test": 1 / 3}, "rows": [1, "two", True]}
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert latest(checkpoints) == (None, [])
    checkpoints.save(tensors, state)
    found, warnings = latest(checkpoints)
    assert warnings == []
    assert found[1] == state
    assert found[0].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[0][name].dtype == tensor.dtype
        assert found[0][name].shape == tensor.shape
        assert (
            found[0][name].numpy(force=True).tobytes() == tensor.contiguous().numpy(force=True).tobytes()
            if (tensor.dtype != torch.bfloat16)
            else torch.equal(found[0][name], tensor)
        )


def test_only_the_last_two_are_kept(three: Checkpoints) -> None:
    names = [f"00000000{n}.{suffix}" for n in (2, 3) for suffix in ("json", "safetensors")]
    assert files(three.folder) == names
    assert latest(three)[0][1] == {"epoch": 3}


def test_the_one_before_stays_until_the_next_is_complete(three: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at each file operation of a save in turn: there are always two whole checkpoints to choose from."""
    calls = 0
    for stop_at in range(1, 20):
        calls = 0

        def maybe_stop(function: Callable, stop_at: int = stop_at) -> Callable:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == stop_at:
                    raise KeyboardInterrupt
                return function(*arguments, **named)

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", maybe_stop(os.fsync))
            patch.setattr(os, "replace", maybe_stop(os.replace))
            patch.setattr(Path, "replace", maybe_stop(Path.replace))
            try:
                three.save({"weight": torch.zeros(2)}, {"epoch": 4})
            except KeyboardInterrupt:
                pass
            else:
                assert stop_at > 6, "fewer file operations than it takes to be safe"
                break
        found, warnings = latest(three)
        assert warnings == []
        assert found[1]["epoch"] in (3, 4)
        assert not [name for name in files(three.folder) if name.startswith(".")], "leftovers"
    assert latest(three)[0][1] == {"epoch": 4}


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    class Full:
        """A file that takes half of what it is given."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            self.file.write(content[: len(content) // 2])
            fail()

    with monkeypatch.context() as patch:
        if where == "write":
            opened = Path.open
            patch.setattr(Path, "open", lambda self, *a: Full(opened(self, *a)))
        elif where == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"something new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == ["file"]
    write_atomically(path, b"something new")
    assert path.read_bytes() == b"something new"


def test_content_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched(name: str, function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            order.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", watched("fsync", fsync))
    monkeypatch.setattr(Path, "replace", watched("replace", replace))
    write_atomically(tmp_path / "file", b"content")
    assert order == ["fsync", "replace", "fsync"]  # the last one is the folder's


def spoil_tensors_cut(path: Path) -> None:
    content = path.with_suffix(".safetensors").read_bytes()
    path.with_suffix(".safetensors").write_bytes(content[:-5])


def spoil_tensors_empty(path: Path) -> None:
    path.with_suffix(".safetensors").write_bytes(b"")


def spoil_tensors_changed(path: Path) -> None:
    content = bytearray(path.with_suffix(".safetensors").read_bytes())
    content[-1] ^= 1
    path.with_suffix(".safetensors").write_bytes(content)


def spoil_tensors_foreign(path: Path) -> None:
    path.with_suffix(".safetensors").write_bytes(save({"other": torch.ones(3)}))


def spoil_tensors_missing(path: Path) -> None:
    path.with_suffix(".safetensors").unlink()


def spoil_json_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def spoil_json_empty(path: Path) -> None:
    path.write_bytes(b"")


def spoil_json_foreign(path: Path) -> None:
    path.write_text('{"format": "something else", "sha256": "", "state": {}}')


def spoil_json_list(path: Path) -> None:
    path.write_text("[1, 2, 3]")


def spoil_json_deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def spoil_json_without_state(path: Path) -> None:
    description = json.loads(path.read_text())
    del description["state"]
    path.write_text(json.dumps(description))


def spoil_json_with_another_hash(path: Path) -> None:
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, "sha256": "0" * 64}))


def spoil_json_with_another_state(path: Path) -> None:
    path.write_text(path.read_text().replace('"epoch": 3', '"epoch": 5000'))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_json_with_another_state, "not what was written (wrong hash): changed"),
        (spoil_tensors_cut, "truncated or changed"),
        (spoil_tensors_empty, "truncated or changed"),
        (spoil_tensors_changed, "truncated or changed"),
        (spoil_tensors_foreign, "truncated or changed"),
        (spoil_tensors_missing, "cannot be read"),
        (spoil_json_cut, "not readable as JSON"),
        (spoil_json_empty, "not readable as JSON"),
        (spoil_json_foreign, "not a checkpoint of this program"),
        (spoil_json_list, "not a checkpoint of this program"),
        (spoil_json_deep, "not readable as JSON"),
        (spoil_json_without_state, "lacks its hash or state"),
        (spoil_json_with_another_hash, "truncated or changed"),
    ],
)
def test_a_spoilt_one_is_refused_and_the_one_before_used(
    three: Checkpoints, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(three.folder / "000000003.json")
    found, warnings = latest(three)
    assert found[1] == {"epoch": 2}
    assert found[0]["weight"].unique().tolist() == [2.0]
    (warning,) = warnings
    assert reason in warning
    assert "\n" not in warning
    assert warning.startswith("checkpoint 3 refused")
    three.save({"weight": torch.ones(1)}, {"epoch": 30})
    assert latest(three)[0][1] == {"epoch": 30}


def test_none_is_left_when_all_are_spoilt(three: Checkpoints) -> None:
    for number in (2, 3):
        spoil_tensors_cut(three.folder / f"00000000{number}.json")
    found, warnings = latest(three)
    assert found is None
    assert [text.rpartition("; ")[2] for text in warnings] == [
        "going back to the one before", "no earlier one is left: starting over",
    ]  # fmt: skip


def test_whoever_uses_it_may_refuse_it_too(three: Checkpoints) -> None:
    def use(tensors: dict[str, Tensor], state: dict[str, Any]) -> int:
        if state["epoch"] == 3:
            raise CheckpointError("of another job")
        return state["epoch"]

    warnings: list[str] = []
    assert three.latest(warnings.append, use) == 2
    assert warnings == ["checkpoint 3 refused: of another job; going back to the one before"]


def test_foreign_files_beside_them_are_left_alone(three: Checkpoints) -> None:
    (three.folder / "notes.json").write_text("{}")
    (three.folder / "readme.txt").write_text("mine")
    assert latest(three)[0][1] == {"epoch": 3}
    three.save({"weight": torch.ones(1)}, {"epoch": 4})
    assert {"notes.json", "readme.txt"} < set(files(three.folder))


def test_leftovers_of_a_killed_process_are_tidied(three: Checkpoints) -> None:
    before = files(three.folder)
    (three.folder / ".000000004.safetensors.123.tmp").write_bytes(b"half")
    (three.folder / "000000004.safetensors").write_bytes(b"no description yet")
    (three.folder / "000000001.safetensors").write_bytes(b"its description went first")
    three.tidy()
    assert files(three.folder) == before
    Checkpoints(three.folder / "absent").tidy()


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["HARM"],)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "torch.save, old format"])
def test_a_pickle_under_another_name_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three: Checkpoints, how: str
) -> None:
    harm = tmp_path / "harm"
    monkeypatch.setenv("HARM", str(harm))
    path = three.folder / "000000003.safetensors"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Harmful()))
    else:
        torch.save(Harmful(), path, _use_new_zipfile_serialization=how == "torch.save")
    with pytest.raises(CheckpointError, match="not a safetensors file") as error:
        load_tensors(path)
    assert "\n" not in str(error.value)
    # With a hash that fits, too.
    description = json.loads(path.with_suffix(".json").read_text())
    description["sha256"] = checkpoint.hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(description))
    found, warnings = latest(three)
    assert found[1] == {"epoch": 2}
    assert "not a safetensors file" in warnings[0]
    assert not harm.exists()


def test_any_cut_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    sha256 = save_tensors(path, {"a": torch.randn(3), "b": torch.arange(4)})
    content = path.read_bytes()
    assert load_tensors(path, sha256)["b"].tolist() == [0, 1, 2, 3]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load_tensors(path)


def test_what_is_no_file_is_written_to_and_links_are_followed(tmp_path: Path) -> None:
    """A device, a pipe or a link is not replaced by a file."""
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_output(tmp_path / "pipe")
    write_atomically(tmp_path / "pipe", b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    assert files(tmp_path) == ["link", "pipe", "target"]
