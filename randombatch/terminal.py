"""What all commands share: one clear line for every error, exit codes, progress bars, lists of numbers."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from randombatch.train.checkpoint import CheckpointError
from randombatch.train.config import ConfigError

SECONDS_OF_SILENCE = 1.0


def say(message: str) -> None:
    """One line on standard error, with the rank where there are several."""
    rank = f" (rank {os.environ['RANK']})" if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ else ""
    print(f"randombatch{rank}: {message}", file=sys.stderr, flush=True)


def refuse(message: str) -> None:
    """Bad input: one line on standard error, exit code 2."""
    say(message)
    raise typer.Exit(2)


def _say_once(error: Exception) -> None:
    """What all ranks raise together is said by the first one."""
    if os.environ.get("RANK", "0") == "0":
        say(str(error))


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """A rank that fails ends with its own error; the others, whose connections then break, say so a little later."""
    try:
        yield
    except Exception as error:
        from randombatch.train.team import lost_peer

        if not lost_peer(error):
            raise
        time.sleep(SECONDS_OF_SILENCE)
        say(f"lost another rank, which ended or did not answer in time ({str(error).splitlines()[0][:120]})")
        # Threads that still wait for the lost rank would keep the interpreter from ending.
        sys.stderr.flush()
        os._exit(1)


def bars() -> Progress:
    """Progress bars on a terminal; nothing where the output goes elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Bad input ends in one line and code 2, a failure in one line and code 1, an interruption in code 130."""
    from randombatch.train.compare import ChildFailed
    from randombatch.train.job import Interrupted, TrainingError
    from randombatch.train.team import Disagreement

    try:
        with _peers():
            yield
    except Interrupted as stop:
        _say_once(stop)
        raise typer.Exit(130) from None
    except Disagreement as error:
        _say_once(error)
        raise typer.Exit(2) from None
    except ChildFailed as error:
        raise typer.Exit(error.code if error.code > 0 else 1) from None
    except (TrainingError, CheckpointError) as error:
        say(str(error))
        raise typer.Exit(1) from None
    except ValueError as error:
        refuse(" ".join(str(error).split()))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = ": make room; an interrupted `train` then goes on with --resume"
        refuse(f"cannot read or write{where}: {error.strerror or error}{hint}")
    except MemoryError:
        refuse("out of memory: take a smaller graph or model, or --minibatch induced")
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        refuse("out of memory: take a smaller graph or model, or --minibatch induced")


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Numbers like 0.01 or 1/64, separated by commas, that were given for this option."""
    try:
        return tuple(float(Fraction(part.strip())) for part in text.split(",") if part.strip())
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f"{option}: expected numbers such as 1/16,1/32, got {text!r}") from None


def integers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
        if any(number != int(number) for number in numbers):
            raise ValueError
        return tuple(int(number) for number in numbers)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: expected integers such as 2,4,8, got {text!r}") from None


@contextlib.contextmanager
def pieces() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """`piece(title, total)` starts a bar and gives the function that moves it on."""
    with bars() as progress:

        def piece(title: str, total: int) -> Callable[[], None]:
            task = progress.add_task(title, total=total)
            return lambda: progress.advance(task)

        yield piece
