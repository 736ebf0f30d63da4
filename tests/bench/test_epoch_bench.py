"""`bench epoch`: real processes at a tiny size, the JSON contract, and contenders that fail."""

import pytest

from randombatch.bench import epoch
from randombatch.bench.epoch import Case, Settings


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(epoch.CASES, "tiny", Case(nodes=300, edges=900, features=5, classes=3, hidden=8))


def test_measures_every_contender(tiny) -> None:
    ticks: list[str] = []
    settings = Settings(cases=("tiny",), contenders=("random-batch", "pyg"), turns=1, threads=1, batch_size=16)
    result = epoch.run(settings, lambda title, total: lambda: ticks.append(title))
    assert len(ticks) == 4
    assert set(result) == {"settings", "machine", "rows", "ratios"}
    assert set(result["ratios"]["tiny"]) == {"time_vs_pyg", "memory_vs_pyg"}
    assert all(value > 0 for value in result["ratios"]["tiny"].values())
    assert {(r["name"], r["allocator"]) for r in result["rows"]} == {
        (name, allocator) for name in ("random-batch", "pyg") for allocator in ("default", "keeping")
    }
    assert all(r["train_s"] > 0 and r["peak_bytes"] > 1e7 for r in result["rows"])
    assert result["settings"]["sizes"]["tiny"]["nodes"] == 300


def test_a_contender_that_fails_is_recorded(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(epoch.CONTENDERS, "pyg", ("pyg-sgformer", "full"))  # a combination that does not exist
    settings = Settings(cases=("tiny",), contenders=("random-batch", "pyg"), turns=1, threads=1)
    result = epoch.run(settings, lambda title, total: lambda: None)
    failed = [r for r in result["rows"] if "failed" in r]
    assert [r["name"] for r in failed] == ["pyg", "pyg"]
    assert "not 'full'" in failed[0]["failed"]
    assert result["ratios"]["tiny"] == {"time_vs_pyg": None, "memory_vs_pyg": None}


def test_ratios_take_the_better_time_and_the_default_memory() -> None:
    def row(name: str, allocator: str, seconds: float, peak: float) -> dict:
        return {"name": name, "allocator": allocator, "train_s": seconds, "peak_bytes": peak}

    rows = [
        row("random-batch", "default", 2.0, 100),
        row("random-batch", "keeping", 1.0, 150),
        row("pyg", "default", 9.0, 400),
        row("pyg", "keeping", 4.0, 900),
    ]
    assert epoch._ratios(rows) == {"time_vs_pyg": 4.0, "memory_vs_pyg": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"cases": ("arxiv",)}, "--cases must be among"), ({"contenders": ()}, "--contenders"), ({"turns": 0}, "--turns")],
)
def test_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)
