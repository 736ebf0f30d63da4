"""The core in one minute: what random batches cost, what they change, and how to put them into a model you have.

python examples/core.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch_geometric.nn.models import SGFormer

import randombatch as rb
from randombatch.bench.processes import running


def growth() -> None:
    """Time and extra memory of one training step as the graph grows, each in a fresh process: memory hardly grows."""
    print("1. One attention layer (64 features, batches of 64), forward and backward\n")
    print(f"{'nodes':>10} {'ms':>8} {'ns per node':>12} {'extra MB':>9}")
    for n in (20_000, 100_000, 500_000):
        sizes = {"nodes": n, "dim": 64, "heads": 1, "batch_size": 64, "threads": torch.get_num_threads()}
        with running({"contender": "ours", **sizes}) as worker:
            extra = worker.ask("memory")["extra_bytes"]
            seconds = min(worker.ask("time")["train_s"] for _ in range(5))
        print(f"{n:>10,} {seconds * 1e3:>8.0f} {seconds / n * 1e9:>12.0f} {extra / 1e6:>9.0f}")
    print("\n   Full attention over 500,000 nodes would need 1,000,000 MB for its weights alone.\n")


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scikit-learn's 1,797 embedded digits, joined to their five nearest neighbours."""
    pixels, labels = load_digits(return_X_y=True)
    edges = kneighbors_graph(pixels, 5).tocoo()
    edge_index = torch.tensor([[*edges.row, *edges.col], [*edges.col, *edges.row]])
    return torch.tensor(pixels / 16, dtype=torch.float32), edge_index, torch.tensor(labels)


def choosing_p() -> None:
    """What a batch size costs in accuracy of the attention, without ever computing it in full."""
    x, _, _ = digits()
    print("2. How far from full attention? Digits as queries, keys and values\n")
    print(f"{'p':>6} {'relative error':>15} {'with self_correction':>21}")
    x = x - x.mean(0)
    sizes = (16, 64, 256, 1024)
    plain, corrected = (rb.estimate_error(3 * x, 3 * x, x, sizes, self_correction=c) for c in (False, True))
    for p in sizes:
        a, b = plain[p], corrected[p]
        print(f"{p:>6} {a.error:>9.3f} ±{a.stderr:.3f} {b.error:>15.3f} ±{b.stderr:.3f}")
    print()


def drop_in() -> None:
    """PyTorch Geometric's own SGFormer, its attention swapped in place."""
    x, edge_index, y = digits()
    train = torch.rand(len(x)) < 0.5
    model = rb.convert(SGFormer(64, 64, 10), batch_size=64)
    print("3. PyTorch Geometric's SGFormer on the digits, attention converted in place\n")
    for name, what in rb.converted(model).items():
        print(f"   {name}: {what}")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 31):
        model.train()
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(x, edge_index)[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            print(f"   epoch {epoch}: loss {loss.item():.3f}")
    print("\n   It runs and learns. Whether attention helps on these digits is another question,")
    print("   which needs a control without attention beside it.")


if __name__ == "__main__":
    torch.manual_seed(0)
    growth()
    choosing_p()
    drop_in()
