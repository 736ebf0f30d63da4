"""The README's Python examples run as they stand, one after the other."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) >= 3
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert names["log_probabilities"].shape == (10_000, 40)
    assert names["out"].isfinite().all()
    assert 0 < names["error"][-1] < 1
