"""SGFormer: one global attention branch beside a graph convolution branch, mixed by `graph_weight`.

    H = relu(norm(x W'))                          G_0 = relu(norm(x U'))
    H <- norm(alpha attention(H) + (1-alpha) H)   G_l = relu(norm(A^ G_{l-1} U_l')) + G_0
    logits = (graph_weight G_L + (1 - graph_weight) H) W_out'

Option names are the published ones (`trans_use_bn` is a layer norm there too). The attention is a choice:

    none          every node attends to itself only: the control, with the same value weights and residuals
    origin        SGFormer's linear attention over the whole graph, q and k divided by their row norms
    full          softmax over the whole graph, up to `FULL_LIMIT` nodes
    random-batch  softmax inside random batches of `batch_size`, drawn anew at every layer and step

The authors divide q and k by the norm of the *whole* tensor, which leaves o_i = v_i + O(1/N): in numbers, `none`.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from randombatch.checks import check_batch_size
from randombatch.distributed.convolution import ShardedAdjacency
from randombatch.distributed.exchange import finish, interleave
from randombatch.distributed.shard import Shard
from randombatch.division import draw_seed
from randombatch.models.dense import Dense, add_bias, linear
from randombatch.models.features import SparseFeatures
from randombatch.models.global_attention import GlobalAttention, Stages
from randombatch.models.propagation import Adjacency

ATTENTIONS = ("none", "origin", "full", "random-batch")


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")


class TransformerBranch(nn.Module):
    """Input layer, then attention layers with residual, norm, activation and dropout."""

    def __init__(
        self, in_channels: int, channels: int, layers: int, heads: int, dropout: float, *, attention: str,
        batch_size: int, use_bn: bool, use_residual: bool, use_weight: bool, use_act: bool, alpha: float,
    ) -> None:  # fmt: skip
        super().__init__()
        norm = "layer" if use_bn else None
        self.use_residual, self.alpha = use_residual, alpha
        self.stem = Dense(in_channels, channels, norm=norm, dropout=dropout)
        self.attentions = nn.ModuleList(
            GlobalAttention(channels, heads, attention, batch_size, use_weight, number) for number in range(layers)
        )
        self.ends = nn.ModuleList(
            Dense(channels, channels, linear=False, norm=norm, relu=use_act, dropout=dropout) for _ in range(layers)
        )

    def stages(self, x: Tensor | SparseFeatures, ptr: Tensor | None, shard: Shard | None) -> Stages:
        """All random numbers are drawn here and now, so that branches can take turns in any order."""
        layers: Any = zip(self.attentions, self.ends, strict=True)
        return self._run(x, ptr, shard, self.stem.draw(), [(a.draw(), end.draw()) for a, end in layers])

    def forward(self, x: Tensor | SparseFeatures, ptr: Tensor | None) -> Tensor:
        return finish(self.stages(x, ptr, None))

    def _run(self, x, ptr, shard, stem_seed: int, seeds: list[tuple[list[Tensor], int]]) -> Stages:
        h = self.stem(x, seed=stem_seed, shard=shard)
        for attention, end, (divisions, seed) in zip(self.attentions, self.ends, seeds, strict=True):
            assert isinstance(attention, GlobalAttention)
            attended = yield from attention.stages(h, ptr, divisions, shard)
            h = torch.lerp(h, attended, self.alpha) if self.use_residual else attended
            h = end(h, seed=seed, shard=shard)
        return h


class GraphBranch(nn.Module):
    """Graph convolutions behind an input layer, each with a residual to the latter (SGFormer's large graphs)."""

    def __init__(
        self, in_channels: int, channels: int, layers: int, dropout: float, *, use_bn: bool, use_residual: bool,
        use_weight: bool, use_init: bool, use_act: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        norm = "batch" if use_bn else None
        self.use_residual, self.use_init = use_residual, use_init
        self.stem = Dense(in_channels, channels, norm=norm, dropout=dropout)
        width, linear = (2 * channels, True) if use_init else (channels, use_weight)
        self.layers = nn.ModuleList(
            Dense(width, channels, linear=linear, norm=norm, relu=use_act, dropout=dropout) for _ in range(layers)
        )

    def stages(
        self, x: Tensor | SparseFeatures, adjacency: Adjacency | ShardedAdjacency, shard: Shard | None
    ) -> Stages:
        layers: Any = self.layers
        return self._run(x, adjacency, shard, self.stem.draw(), [layer.draw() for layer in layers])

    def forward(self, x: Tensor | SparseFeatures, adjacency: Adjacency) -> Tensor:
        return finish(self.stages(x, adjacency, None))

    def _run(self, x, adjacency, shard, stem_seed: int, seeds: list[int]) -> Stages:
        g = first = self.stem(x, seed=stem_seed, shard=shard)
        for layer, seed in zip(self.layers, seeds, strict=True):
            g = adjacency @ g
            if self.use_init:
                g = torch.cat([g, first], 1)
            g = layer(g, first if self.use_residual else None, seed, shard)
            yield
        return g


class PlainGraphBranch(nn.Module):
    """A plain GCN, from the input features on, nothing behind its last convolution (SGFormer's medium graphs)."""

    def __init__(self, in_channels: int, channels: int, layers: int, dropout: float, *, use_bn: bool) -> None:
        super().__init__()
        widths = [in_channels] + [channels] * layers
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.ends = nn.ModuleList(
            Dense(channels, channels, linear=False, norm="batch" if use_bn else None, dropout=dropout)
            for _ in range(layers - 1)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm1d):
                module.reset_parameters()

    def stages(
        self, x: Tensor | SparseFeatures, adjacency: Adjacency | ShardedAdjacency, shard: Shard | None
    ) -> Stages:
        ends: Any = self.ends
        return self._run(x, adjacency, shard, [end.draw() for end in ends])

    def forward(self, x: Tensor | SparseFeatures, adjacency: Adjacency) -> Tensor:
        return finish(self.stages(x, adjacency, None))

    def _run(self, x, adjacency, shard, seeds: list[int]) -> Stages:
        g = x
        for number, layer in enumerate(self.linears):
            assert isinstance(layer, nn.Linear)
            # Project first: the graph product is then as narrow as can be.
            sparse = isinstance(g, SparseFeatures)
            g = g.linear(layer.weight, shard) if sparse else linear(g, layer.weight, None, shard)
            g = add_bias(adjacency @ g, layer.bias, shard)
            if number < len(self.ends):
                g = self.ends[number](g, seed=seeds[number], shard=shard)
            yield
        assert isinstance(g, Tensor)
        return g


class SGFormer(nn.Module):
    """SGFormer with a choice of attention; logits of every node.

    Args:
        in_channels: width of the features.
        hidden_channels: width of both branches.
        out_channels: number of classes.
        attention: "none", "origin", "full" or "random-batch".
        batch_size: p of random-batch.
        trans_num_layers: attention layers; 0 leaves a multilayer perceptron.
        trans_num_heads: heads, each `hidden_channels` wide, averaged.
        trans_dropout: behind every layer of the transformer branch.
        trans_use_bn: layer norms in the transformer branch.
        trans_use_residual: alpha attention(H) + (1 - alpha) H instead of attention(H).
        trans_use_weight: whether values are projected.
        trans_use_act: ReLU behind every attention layer.
        alpha: weight of the attention beside its residual.
        gnn_num_layers: graph convolutions.
        gnn_dropout: behind every layer of the graph branch.
        gnn_use_bn: batch norms in the graph branch.
        gnn_use_residual: adds the input layer's output behind every convolution.
        gnn_use_weight: whether convolutions have weights.
        gnn_use_init: convolutions see the input layer's output beside their own input.
        gnn_use_act: ReLU behind every convolution.
        gnn_plain: a plain GCN from the features on instead (of the options above only dropout, layers, batch norm).
        input_dropout: of the features, in front of both branches.
        use_graph: False leaves the graph branch out.
        graph_weight: share of the graph branch ("add").
        aggregate: "add", or "cat" to put both branches side by side.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        attention: str = "random-batch",
        batch_size: int = 256,
        trans_num_layers: int = 1,
        trans_num_heads: int = 1,
        trans_dropout: float = 0.5,
        trans_use_bn: bool = True,
        trans_use_residual: bool = True,
        trans_use_weight: bool = True,
        trans_use_act: bool = False,
        alpha: float = 0.5,
        gnn_num_layers: int = 3,
        gnn_dropout: float = 0.5,
        gnn_use_bn: bool = True,
        gnn_use_residual: bool = True,
        gnn_use_weight: bool = True,
        gnn_use_init: bool = False,
        gnn_use_act: bool = True,
        gnn_plain: bool = False,
        input_dropout: float = 0.0,
        use_graph: bool = True,
        graph_weight: float = 0.5,
        aggregate: str = "add",
    ) -> None:
        super().__init__()
        if attention not in ATTENTIONS:
            raise ValueError(f"`attention` must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
        if aggregate not in ("add", "cat"):
            raise ValueError(f"`aggregate` must be 'add' or 'cat', got {aggregate!r}")
        check_batch_size(batch_size)
        _at_least("trans_num_layers", trans_num_layers, 0)
        _at_least("trans_num_heads", trans_num_heads, 1)
        for name, share in (("alpha", alpha), ("graph_weight", graph_weight)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"`{name}` must lie in [0, 1], got {share}")
        # A plain GCN without layers would hand on the features, which have another width.
        _at_least("gnn_num_layers", gnn_num_layers, 1 if gnn_plain else 0)
        self.input = Dense(in_channels, in_channels, linear=False, relu=False, dropout=input_dropout)
        self.trans = TransformerBranch(
            in_channels, hidden_channels, trans_num_layers, trans_num_heads, trans_dropout, attention=attention,
            batch_size=batch_size, use_bn=trans_use_bn, use_residual=trans_use_residual,
            use_weight=trans_use_weight, use_act=trans_use_act, alpha=alpha,
        )  # fmt: skip
        self.graph: GraphBranch | PlainGraphBranch | None = None
        if use_graph and gnn_plain:
            self.graph = PlainGraphBranch(in_channels, hidden_channels, gnn_num_layers, gnn_dropout, use_bn=gnn_use_bn)
        elif use_graph:
            self.graph = GraphBranch(
                in_channels, hidden_channels, gnn_num_layers, gnn_dropout, use_bn=gnn_use_bn,
                use_residual=gnn_use_residual, use_weight=gnn_use_weight, use_init=gnn_use_init, use_act=gnn_use_act,
            )  # fmt: skip
        self.graph_weight, self.aggregate = graph_weight, aggregate
        both = 2 if use_graph and aggregate == "cat" else 1
        self.out = nn.Linear(both * hidden_channels, out_channels)
        self._cached: tuple[weakref.ref, int, Adjacency] | None = None

    def reset_parameters(self) -> None:
        """As it was built: the same seed gives the same weights."""
        for branch in filter(None, (self.trans, self.graph, self.out)):
            for module in branch.modules():
                if isinstance(module, (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)):
                    module.reset_parameters()
            if isinstance(branch, PlainGraphBranch):
                branch.reset_parameters()  # once more: it starts its linear layers in its own way

    def branches(self) -> dict[str, list[nn.Parameter]]:
        """Parameters of the transformer branch, and those of the graph branch with the output layer."""
        trans = list(self.trans.parameters())
        seen = {id(p) for p in trans}
        return {"trans": trans, "gnn": [p for p in self.parameters() if id(p) not in seen]}

    def forward(
        self,
        x: Tensor | SparseFeatures,
        edge_index: Tensor | Adjacency | ShardedAdjacency,
        ptr: Tensor | None = None,
        nodes: Tensor | None = None,
        shard: Shard | None = None,
        companions: int = 0,
        seeds: int | None = None,
    ) -> Tensor:
        """Logits `(N, out_channels)`.

        Args:
            x: `(N, in_channels)`; as `SparseFeatures` where most entries are zero.
            edge_index: `(2, E)` arcs (their normalised matrix is kept until another tensor comes), or an `Adjacency`.
            ptr: boundaries of graphs, from 0 to N; None is one graph.
            nodes: ids of the nodes that are asked for (default: all): only these attend to each other and come out,
                while the graph branch sees every node and edge.
            shard: which rows this rank passes and gets; then `edge_index` is a `ShardedAdjacency`, and `ptr` describes
                all rows. The branches take turns, so that the rows of one travel while the other computes.
            companions: the last so many rows of `x` are there to be attended to: the graph branch (and `edge_index`)
                does not know them, and they do not come out.
            seeds: only the first so many rows come out.
        """
        if companions and not (isinstance(x, Tensor) and shard is nodes is ptr is None):
            raise ValueError("`companions` cannot be combined with sparse features, `shard`, `nodes` or `ptr`")
        if shard is not None and (nodes is not None or isinstance(edge_index, Tensor)):
            raise ValueError("with `shard`, `edge_index` must be a ShardedAdjacency, and `nodes` cannot be chosen")
        if shard is not None and x.shape[0] != len(shard):
            raise ValueError(f"`x` must be the {len(shard)} rows that rank {shard.rank} owns, got {x.shape[0]}")
        if nodes is not None and ptr is not None:
            raise ValueError("`nodes` and `ptr` cannot be combined: the boundaries of chosen nodes are not known")
        if self.training and self.input.dropout:
            if isinstance(x, SparseFeatures):
                x = x.dropout(self.input.dropout, int(draw_seed()))
            else:
                x = self.input(x, shard=shard)
        branches = [self.trans.stages(x if nodes is None else x[nodes], ptr, shard)]
        if self.graph is not None:
            own = x[: len(x) - companions] if companions and isinstance(x, Tensor) else x
            branches.append(self.graph.stages(own, self._adjacency(edge_index, own), shard))
        h, *rest = interleave(*branches)
        if companions or seeds is not None:
            come_out = len(x) - companions if seeds is None else seeds
            h, rest = h[:come_out], [g[:come_out] for g in rest]
        for g in rest:
            g = g if nodes is None else g[nodes]
            h = torch.cat([h, g], 1) if self.aggregate == "cat" else torch.lerp(h, g, self.graph_weight)
        if shard is None or type(self.out) is not nn.Linear:
            return self.out(h)
        return linear(h, self.out.weight, self.out.bias, shard)

    def _adjacency(
        self, edge_index: Tensor | Adjacency | ShardedAdjacency, x: Tensor | SparseFeatures
    ) -> Adjacency | ShardedAdjacency:
        if isinstance(edge_index, (Adjacency, ShardedAdjacency)):
            if edge_index.num_nodes != len(x):
                raise ValueError(f"the adjacency matrix has {edge_index.num_nodes} nodes, `x` has {len(x)} rows")
            return edge_index
        if self._cached is not None:
            seen, version, adjacency = self._cached
            same = seen() is edge_index and version == edge_index._version
            if same and adjacency.num_nodes == len(x) and adjacency.dtype == x.dtype:
                return adjacency
        adjacency = Adjacency(edge_index, len(x), x.dtype)
        self._cached = weakref.ref(edge_index), edge_index._version, adjacency
        return adjacency

    def __getstate__(self) -> dict:
        # A copy of the model builds its own matrix: weak references cannot be copied.
        return {**super().__getstate__(), "_cached": None}
