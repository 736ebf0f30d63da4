"""One attention layer over all nodes of a graph: none, linear over the whole graph, full, or in random batches."""

from collections.abc import Generator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from randombatch.attention.projected import projected_attention
from randombatch.distributed.exchange import finish, in_batches
from randombatch.distributed.shard import Shard
from randombatch.division import Division
from randombatch.given_batches import GivenBatches
from randombatch.models.dense import linear
from randombatch.nn.draws import Draws, mean_over

# A branch yields where its rows are under way and the other branch could compute.
Stages = Generator[None, None, Tensor]
FULL_LIMIT = 16_384


def check_full(num_nodes: int) -> None:
    """Full attention forms N x N weights: beyond `FULL_LIMIT` nodes in a graph it is refused."""
    if num_nodes > FULL_LIMIT:
        raise ValueError(
            f"full attention is limited to graphs of {FULL_LIMIT:,} nodes, this one has {num_nodes:,} "
            f"({num_nodes**2 * 4 / 1e9:,.0f} GB of weights): use attention 'random-batch'"
        )


class GlobalAttention(Draws, nn.Module):
    """One attention layer over all nodes of a graph, heads averaged.

    Args:
        channels: F, width of the input, of every head and of the output.
        heads: H.
        attention: one of `ATTENTIONS`.
        batch_size: p, for random-batch.
        use_weight: False attends to the input itself instead of a projection of it.
        number: of the layer, so that layers divide differently in evaluation too.
    """

    def __init__(
        self, channels: int, heads: int, attention: str, batch_size: int, use_weight: bool = True, number: int = 0
    ) -> None:
        super().__init__()
        self.eval_seed = number
        self.channels, self.heads, self.attention, self.batch_size = channels, heads, attention, batch_size
        self.query = nn.Linear(channels, heads * channels)
        self.key = nn.Linear(channels, heads * channels)
        self.value = nn.Linear(channels, heads * channels) if use_weight else None

    def reset_parameters(self) -> None:
        for projection in (self.query, self.key, self.value):
            if projection is not None:
                projection.reset_parameters()

    def draw(self) -> list[Tensor]:
        """The seeds of one forward's divisions."""
        return [] if self.attention == "none" else self.seeds()

    def forward(self, x: Tensor, ptr: Tensor | None = None) -> Tensor:
        """`x` (N, F); `ptr` the boundaries of graphs, which never attend to each other."""
        return finish(self.stages(x, ptr, self.draw()))

    def items_per_batch(self, num_nodes: int) -> int:
        """How many nodes attend to each other."""
        return self.batch_size if self.attention == "random-batch" else max(2, num_nodes)

    def stages(
        self,
        x: Tensor,
        ptr: Tensor | None,
        seeds: list[Tensor],
        shard: Shard | None = None,
        batches: GivenBatches | None = None,
    ) -> Stages:
        """`forward` on given divisions (or batches), yielding while rows are under way between ranks."""
        num_rows = len(x) if shard is None else shard.num_rows
        largest = num_rows if ptr is None else int(ptr.diff().max())
        if self.attention == "full":
            check_full(largest)
        value_weight, value_bias, average = self._value(x)
        if self.attention == "none":
            return nnf.linear(linear(x, value_weight, value_bias, shard), average) if self.value is not None else x
        weight = torch.cat([self.query.weight, self.key.weight, value_weight])
        bias = torch.cat([self.query.bias, self.key.bias, value_bias])
        batch_size = self.items_per_batch(largest)
        pieces = 1 if shard is None else shard.num_pieces
        kernel = "sgformer" if self.attention == "origin" else "softmax"

        def attend(rows: Tensor, division: Division | GivenBatches | None = None, seed: Tensor | None = None) -> Tensor:
            return projected_attention(
                rows, weight, bias, average, None, seed, batch_size, heads=self.heads, kernel=kernel,
                ptr=ptr if division is None else None, division=division, pieces=pieces,
            )  # fmt: skip

        if batches is not None:
            return attend(x, batches)

        if shard is None:
            return mean_over(seeds, lambda seed: attend(x, seed=seed))
        results = []
        for seed in seeds:
            results.append((yield from in_batches(x, attend, shard, seed, batch_size, ptr)))
        return mean_over(results, lambda result: result)

    def _value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        eye = torch.eye(self.channels, dtype=x.dtype, device=x.device)
        average = (eye / self.heads).repeat(1, self.heads)
        if self.value is not None:
            return self.value.weight, self.value.bias, average
        return eye.repeat(self.heads, 1), x.new_zeros(self.heads * self.channels), average

    def extra_repr(self) -> str:
        size = f", batch_size={self.batch_size}" if self.attention == "random-batch" else ""
        return f"{self.channels}, heads={self.heads}, attention={self.attention!r}{size}"
