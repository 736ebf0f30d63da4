"""The package as a whole: what importing it does, and what it offers."""

import subprocess
import sys

import randombatch as rb


def test_importing_it_imports_torch_and_nothing_heavier() -> None:
    code = """
import sys, random, torch, numpy
before = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), numpy.random.get_state()[1].tolist()
import randombatch
after = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), numpy.random.get_state()[1].tolist()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "a side effect"
heavy = {"torch_geometric", "transformers", "scipy", "sklearn", "numba", "typer", "rich", "matplotlib"}
print(*sorted(heavy & {name.split(".")[0] for name in sys.modules}))
print(*sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_public_names() -> None:
    assert set(rb.__all__) == {
        "Division",
        "ErrorEstimate",
        "RandomBatch",
        "RandomBatchAttention",
        "__version__",
        "convert",
        "converted",
        "estimate_error",
        "fold_in",
        "random_batch_attention",
    }
    assert all(hasattr(rb, name) for name in rb.__all__)
