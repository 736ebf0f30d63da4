"""Peak memory of some training steps from a store; run as a process of its own, with settings in JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from randombatch.bench.processes import prints_apart
from randombatch.data.store.budget import Watch
from randombatch.train.config import Config
from randombatch.train.job import load_rows, make_problem
from randombatch.train.team import Team

STEPS = 20


def peak(settings: dict[str, Any]) -> dict[str, int]:
    """Highest anonymous memory in bytes while so many steps are taken, and nodes of a mini-batch."""
    torch.set_num_threads(1)
    config = Config().replace(**settings)
    with Watch() as watch:
        run = make_problem(load_rows(config, Team()), config, Team(), Path()).run(0)
        for number, _ in enumerate(run.steps_of_epoch(), 1):
            if number == STEPS:
                break
        ((nodes, _),) = run.loader.sizes([0])  # type: ignore[attr-defined]
    return {"peak_bytes": watch.peak, "nodes": nodes}


if __name__ == "__main__":
    with prints_apart() as answers:
        print(json.dumps(peak(json.loads(sys.argv[1]))), file=answers)
