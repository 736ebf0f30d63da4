"""The commands' entry point: what was typed wrongly in one line, help with examples that can be called."""

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from randombatch.cli import app, main
from randombatch.train.config import recipe_names


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The code that a program called like this ends with."""
    monkeypatch.setattr("sys.argv", ["randombatch", *arguments])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--atention", "none"], "--attention"), (["--epochs", "many"], "--epochs"), (["digits", "cora"], "cora")],
)
def test_wrong_flags_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(monkeypatch, "train", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("randombatch: ")
    assert message in line


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_command_it_helps_and_says_why(
    arguments: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert "Usage" in printed.out
    assert printed.err == "randombatch: name a command (see --help)\n"


@pytest.mark.parametrize(
    ("command", "examples"),
    [
        (
            "train",
            ["randombatch train cora --attention none --runs 5", "randombatch train pokec --out runs/pokec --resume"],
        ),
        ("compare", ["randombatch compare cora --runs 10"]),
        ("predict", ["randombatch predict runs/digits-random-batch --out digits.npz --rounds 16"]),
    ],
)
def test_help_shows_examples_each_on_its_line(command: str, examples: list[str]) -> None:
    lines = [line.strip() for line in shown_help(command).splitlines()]
    assert "Examples:" in lines
    for example in examples:
        assert example in lines
    # What is shown can be called: every flag in an example is a flag of the command.
    known = {opt for p in click_command(command).params for opt in (*p.opts, *p.secondary_opts)}
    for line in lines:
        if line.startswith(f"randombatch {command}"):
            assert known.issuperset(re.findall(r"--[a-z-]+", line)), line


def test_help_of_train_names_the_recipes() -> None:
    text = " ".join(shown_help("train").split())
    assert all(name in text for name in recipe_names())


def shown_help(command: str) -> str:
    found = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert found.exit_code == 0
    return found.stdout


def click_command(name: str) -> Any:
    command: Any = typer.main.get_command(app)
    return command.get_command(None, name)
