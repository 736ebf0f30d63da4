"""The graph that a configuration names: whole, one rank's part of it, or mapped from the disk."""

import torch
import torch.distributed as dist
from torch import Tensor

from randombatch import data
from randombatch.data.graph import Graph
from randombatch.data.in_rows import GraphInRows, of_store
from randombatch.data.part import Part, cut, part_of_rows, synthetic_part
from randombatch.data.store import Store, is_store
from randombatch.data.synthetic import Synthetic, edge_chunks
from randombatch.distributed import Shard, metis
from randombatch.train.config import Config, ConfigError
from randombatch.train.team import Team


def load_graph(config: Config) -> Graph:
    """The whole graph."""
    source = config.data
    return data.load(
        source.dataset,
        root=source.root or None,
        edges=source.edges,
        split=source.split,
        split_seed=source.split_seed,
        num_splits=source.num_splits or None,
        metric=source.metric or None,
        feature_norm=source.feature_norm,
        **source.options,
    )


def map_store(config: Config) -> GraphInRows:
    """A store as it lies on disk; what would need another one is refused."""
    source, store = config.data, Store.open(config.data.dataset)
    if source.split not in ("stored", "fixed") or source.options:
        raise ConfigError(f"{store.path} is trained on as it is: prepare it with other splits or options, not data.*")
    if source.feature_norm != "none":
        raise ConfigError(f"{store.path} is trained on as it is: normalise features before it is prepared")
    if source.edges == "symmetric" and not store.undirected:
        raise ConfigError(f"{store.path} was prepared with --directed: train with --edges directed, or prepare it anew")
    return of_store(store, metric=source.metric or None, num_splits=source.num_splits or None)


def load_part(config: Config, team: Team) -> Part:
    """This rank's part of the graph.

    Synthetic graphs are made part by part, and of a store only the own rows are read. Everything else is read whole by
    each rank, cut, and forgotten: for a graph that is large beside one rank's memory, make a store of it first.
    """
    source = config.data
    if is_store(source.dataset) and data.as_it_is(source.dataset, source.edges, source.split, source.feature_norm):
        rows = map_store(config)
        shard = _shard(config, team, rows.num_nodes, lambda: load_graph(config).edge_index)
        return part_of_rows(rows, shard)
    own_split = source.split in ("stored", "fixed") and source.num_splits in (0, 1) and not source.metric
    if source.dataset.lower() == "synthetic" and own_split and source.edges == "symmetric":
        recipe = Synthetic(**source.options)
        shard = _shard(config, team, recipe.num_nodes, lambda: _arcs(recipe))
        return synthetic_part(recipe, shard, source.feature_norm)
    graph = load_graph(config)
    return cut(graph, _shard(config, team, graph.num_nodes, lambda: graph.edge_index))


def _shard(config: Config, team: Team, num_nodes: int, arcs) -> Shard:
    """Who owns what; METIS runs on the first rank."""
    if team.size > num_nodes:
        raise ConfigError(f"{team.size} ranks for {num_nodes} nodes: every rank needs one, start fewer ranks")
    owner = None
    if config.train.partition == "metis" and team.size > 1:
        dtype = torch.uint8 if team.size <= 256 else torch.int32
        owner = metis(arcs(), num_nodes, team.size) if team.leader else torch.empty(num_nodes, dtype=dtype)
        dist.broadcast(owner, 0, group=team.group)
    return Shard(num_nodes, team.group, owner=owner, exchange=config.train.exchange)


def _arcs(recipe: Synthetic) -> Tensor:
    pairs = torch.cat([pairs for _, pairs in edge_chunks(recipe, 1 << 20)], 1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    return torch.cat([pairs, pairs.flip(0)], 1)
