"""The machine code of the synthetic source against its tensors: bit for bit."""

import numpy as np
import pytest
import torch

from randombatch.data.synthetic import Synthetic

pytest.importorskip("numba")
from randombatch.data.store.sources.hashed import Hashed


@pytest.mark.parametrize(
    "recipe",
    [
        Synthetic(),
        Synthetic(num_nodes=4095, seed=-3),
        Synthetic(num_nodes=4097, classes=7, homophily=0.0, num_features=5, seed=2),
        Synthetic(num_nodes=1_000_003, classes=40, homophily=1.0, num_features=128, seed=9),
        Synthetic(num_nodes=5000, noise=0.3),
        Synthetic(num_nodes=1 << 31, classes=172, homophily=0.5, num_features=3),
    ],
)
@pytest.mark.parametrize("start", [0, 3001])
def test_the_same_bits(recipe: Synthetic, start: int) -> None:
    stop = min(start + 5000, recipe.num_nodes)
    fast = Hashed(recipe)
    np.testing.assert_array_equal(fast.pairs(start, stop), recipe.pairs(start, stop).numpy())
    assert torch.equal(fast.features(start, stop), recipe.nodes(start, stop)[0])
