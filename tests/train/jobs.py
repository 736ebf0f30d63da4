"""What tests of jobs share: a display that keeps what it is told, and the newest checkpoint."""

from pathlib import Path

from randombatch.train.progress import Display


class Told(Display):
    """Keeps what a person would have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def newest(folder: Path) -> int:
    return max((int(p.stem) for p in (folder / "checkpoints").glob("*.json")), default=0)
