"""Sparse features stand in for dense ones: the same numbers, in value and gradient."""

import pytest
import torch
from torch import Tensor

from randombatch.models import SGFormer, SparseFeatures


@pytest.fixture
def words() -> Tensor:
    x = torch.rand(40, 30, dtype=torch.float64)
    x[x < 0.93] = 0
    x[3] = 0  # a document without words
    x[:, 5] = 0  # a word in no document
    return x


def test_linear_equals_dense(words: Tensor, poisoned) -> None:
    weight = torch.randn(7, 30, dtype=torch.float64, requires_grad=True)
    assert torch.equal(SparseFeatures(words).matrix().to_dense(), words)
    assert torch.equal(SparseFeatures(words).transpose().to_dense(), words.t())
    ours, truth = SparseFeatures(words).linear(weight), words @ weight.t()
    torch.testing.assert_close(ours, truth)
    grad = torch.randn_like(truth)
    torch.testing.assert_close(*(torch.autograd.grad(y, weight, grad)[0] for y in (ours, truth)))


@pytest.mark.parametrize("options", [{"gnn_plain": True}, {}, {"gnn_use_bn": False, "trans_use_bn": False}])
@pytest.mark.parametrize("training", [True, False])
def test_model_equals_dense(words: Tensor, options: dict, training: bool, poisoned) -> None:
    model = SGFormer(30, 8, 3, batch_size=40, trans_dropout=0.0, gnn_dropout=0.0, **options).double().train(training)
    edge_index = torch.randint(40, (2, 100))
    results = []
    for x in (words, SparseFeatures(words)):
        out = model(x, edge_index)
        model.zero_grad()
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_dropout_of_entries(words: Tensor) -> None:
    x = SparseFeatures((torch.rand(500, 500) < 0.05).float())
    dropped = x.dropout(0.4, seed=3)
    kept = dropped.values != 0
    assert abs(kept.double().mean().item() - 0.6) < 6 * (0.24 / len(kept)) ** 0.5
    torch.testing.assert_close(dropped.values[kept], torch.full_like(dropped.values[kept], 1 / 0.6), rtol=1e-4, atol=0)
    assert torch.equal(x.dropout(0.4, seed=3).values, dropped.values)
    assert not torch.equal(x.dropout(0.4, seed=4).values, dropped.values)
    torch.testing.assert_close(dropped.transpose().to_dense(), dropped.matrix().to_dense().t())
    assert (x.values == 1).all()


def test_pays_only_where_little_is_there(words: Tensor) -> None:
    assert SparseFeatures.pays(words)
    assert not SparseFeatures.pays(torch.rand(4, 4))
    assert not SparseFeatures.pays(torch.zeros(0, 4))


def test_rows_are_refused(words: Tensor) -> None:
    with pytest.raises(ValueError, match="pass the dense ones"):
        SGFormer(30, 8, 3)(SparseFeatures(words), torch.randint(40, (2, 9)), nodes=torch.arange(5))
