"""What a run is made of: three tables (`data`, `model`, `train`), in TOML on disk, frozen dataclasses in memory."""

import dataclasses
import difflib
import json
import math
import sys
from pathlib import Path
from typing import Any

from randombatch.data.store.budget import parse_size
from randombatch.distributed.partition import PARTITIONS
from randombatch.distributed.shard import EXCHANGES
from randombatch.models.sgformer import ATTENTIONS

_BESIDE = Path(__file__).resolve().parents[2] / "recipes"
# Beside the package in a clone, under the prefix where it was installed.
RECIPES = _BESIDE if _BESIDE.is_dir() else Path(sys.prefix) / "share" / "randombatch" / "recipes"
MODELS = ("sgformer", "pyg-sgformer", "pyg-polynormer", "pyg-gps")
MINIBATCHES = ("full", "induced", "all-edges", "sampled")
EVALUATIONS = ("auto", "whole", "sampled", "final")
OPTIMIZERS = ("adam", "adamw")
EDGES = ("symmetric", "directed")
METRICS = ("accuracy", "roc_auc", "f1")
ALIASES = {"papers100m": "ogbn-papers100M"}
# What no number of a run depends on: a job may be continued with others.
FREE = ("max_memory", "prefetch", "workers", "together")


class ConfigError(ValueError):
    """A setting that does not exist or makes no sense: one line that says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which graph. `options` go to the source (`k` of digits, `num_nodes` of synthetic, ...)."""

    dataset: str = "digits"
    root: str = ""  # folder of raw files; empty: the default one
    edges: str = "symmetric"
    split: str = "stored"
    split_seed: int = 123
    num_splits: int = 0  # 0: the source's own number
    metric: str = ""  # empty: the dataset's
    feature_norm: str = "none"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _choice("data.edges", self.edges, EDGES)
        if self.metric:
            _choice("data.metric", self.metric, METRICS)
        _at_least("data.num_splits", self.num_splits, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model and attention; `options` are further arguments of the model's constructor, by name."""

    name: str = "sgformer"
    attention: str = "random-batch"
    batch_size: int = 256
    hidden_channels: int = 64
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _choice("model.name", self.name, MODELS)
        _choice("model.attention", self.attention, ATTENTIONS)
        if self.name != "sgformer" and self.attention not in ("origin", "random-batch"):
            raise ConfigError(
                f"{self.name} runs with attention 'origin' (as it is) or 'random-batch' (converted), not "
                f"{self.attention!r}: use the model sgformer for controls"
            )
        _at_least("model.batch_size", self.batch_size, 2)
        _at_least("model.hidden_channels", self.hidden_channels, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How it is trained.

    `minibatch`: "full" takes the whole graph in every step; "induced" divides the nodes at random into mini-batches of
    about `seeds` in every epoch, each with the edges inside it (SGFormer's large graphs); "all-edges" divides them
    alike, but the graph branch keeps all edges; "sampled" takes `seeds` training nodes with their neighbourhoods, drawn
    by `fanouts`, and `companions` random nodes of the whole graph for the attention, out of memory or out of a store,
    `prefetch` mini-batches ahead by `workers` threads, `together` at a time (0: 8 of a store larger than the machine's
    memory, or as many as `max_memory` allows, else one). `evaluation` and `eval_nodes`: see `train.sampled`.
    `max_memory` ("4GiB") bounds the anonymous memory of a sampled run, empty does not. `patience` is in epochs, 0 never
    stops early. `runs` = 0 is one run for each stored split, or five where there is one split. Run r has seed
    `seed + r` and split r (modulo their number).
    On several ranks: `partition` "contiguous" or "metis" says who owns which nodes, `exchange` "global" or "local"
    whether batches reach over ranks, and `timeout` how many seconds a rank waits for another one.
    """

    epochs: int = 200
    lr: float = 0.01
    optimizer: str = "adam"
    trans_weight_decay: float = 5e-4
    gnn_weight_decay: float = 5e-4
    minibatch: str = "full"
    seeds: int = 100_000
    fanouts: list[int] = dataclasses.field(default_factory=lambda: [15, 10, 5])
    companions: int = 0
    prefetch: int = 2
    together: int = 0
    workers: int = 1
    max_memory: str = ""
    evaluation: str = "auto"
    eval_nodes: int = 20_000
    eval_every: int = 1
    patience: int = 0
    runs: int = 0
    seed: int = 0
    checkpoint_every: int = 50
    device: str = "cpu"
    threads: int = 0  # 0: torch's choice
    partition: str = "contiguous"
    exchange: str = "global"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _choice("train.optimizer", self.optimizer, OPTIMIZERS)
        _choice("train.minibatch", self.minibatch, MINIBATCHES)
        _choice("train.evaluation", self.evaluation, EVALUATIONS)
        _choice("train.partition", self.partition, PARTITIONS)
        _choice("train.exchange", self.exchange, EXCHANGES)
        for name, least in {"epochs": 1, "eval_every": 1, "seeds": 2, "checkpoint_every": 1, "workers": 1}.items():
            _at_least(f"train.{name}", getattr(self, name), least)
        for name in (
            "patience", "runs", "threads", "seed", "trans_weight_decay", "gnn_weight_decay", "companions", "prefetch",
            "together", "eval_nodes",
        ):  # fmt: skip
            _at_least(f"train.{name}", getattr(self, name), 0)
        for name in ("lr", "trans_weight_decay", "gnn_weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"train.{name} must be finite, got {getattr(self, name)}")
        object.__setattr__(self, "fanouts", _fanouts(self.fanouts))
        if self.max_memory:
            parse_size(self.max_memory, "train.max_memory")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"train.timeout must be a positive number of seconds, got {self.timeout}")
        if not self.lr > 0:
            raise ConfigError(f"train.lr must be positive, got {self.lr}")
        if self.seed >= 1 << 62:
            raise ConfigError(f"train.seed must be below 2^62, got {self.seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def replace(self, **changes: Any) -> "Config":
        """A copy with `section.name` settings changed; names that no section has become the section's options."""
        tables = {section: dict(table) for section, table in dataclasses.asdict(self).items()}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if section not in tables or not name:
                raise ConfigError(f"unknown setting {key!r}: {_nearest(key, self.names())}")
            if name in tables[section]:
                tables[section][name] = value
            elif "options" in tables[section]:
                tables[section]["options"][name] = value
            else:
                raise ConfigError(f"unknown setting {key!r}: {_nearest(key, self.names())}")
        return from_tables(tables)

    def essential(self) -> "Config":
        """The same without the settings that no number depends on."""
        default = TrainConfig()
        changes = {name: getattr(default, name) for name in FREE}
        return dataclasses.replace(self, train=dataclasses.replace(self.train, **changes))

    def names(self) -> list[str]:
        return [f"{s}.{n}" for s, table in dataclasses.asdict(self).items() for n in table if n != "options"]

    def to_toml(self) -> str:
        """The same run as a file; options stand beside the section's own settings."""
        lines = []
        for section, table in dataclasses.asdict(self).items():
            lines.append(f"[{section}]")
            options = table.pop("options", {})
            lines += [f"{name} = {_toml(value)}" for name, value in {**table, **options}.items()]
            lines.append("")
        return "\n".join(lines)


def from_tables(tables: dict[str, Any], where: str = "") -> Config:
    """Check names and types, and build the configuration."""
    kinds: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
    sections = {}
    for section, table in tables.items():
        if section not in kinds:
            raise ConfigError(f"{where}unknown section [{section}]: {_nearest(section, list(kinds))}")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}{section} must be a section of settings, got {table!r}")
        fields = {f.name: f for f in dataclasses.fields(kinds[section])}
        own, options = {}, table.get("options", {})
        if not isinstance(options, dict):
            raise ConfigError(f"{where}{section}.options must be a table of settings, got {options!r}")
        options = dict(options)
        for name, value in table.items():
            if name == "options" and name in fields:
                continue
            if name in fields:
                own[name] = _typed(f"{section}.{name}", value, fields[name].type)
            elif "options" in fields:
                options[name] = value
            else:
                raise ConfigError(f"{where}unknown setting {section}.{name}: {_nearest(name, list(fields))}")
        sections[section] = kinds[section](**own, **({"options": options} if "options" in fields else {}))
    return Config(**sections)


def load_config(recipe: str | Path) -> Config:
    """A recipe by name (`cora`) or by path (`my.toml`)."""
    path = Path(recipe)
    if path.suffix != ".toml" and not path.is_file():
        path = RECIPES / f"{ALIASES.get(str(recipe).lower(), recipe)}.toml"
        if not path.exists():
            raise ConfigError(f"unknown recipe {str(recipe)!r}: {_nearest(str(recipe), recipe_names())}")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: give a recipe's name or the path of a .toml file")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = f": data is given by --dataset {path}" if path.suffix != ".toml" else ""
        raise ConfigError(f"{path} is not valid TOML: {error}{hint}") from None
    return from_tables(tables, where=f"{path}: ")


def recipe_names() -> list[str]:
    return sorted(p.stem for p in RECIPES.glob("*.toml"))


def parse_assignment(text: str) -> tuple[str, Any]:
    """`train.lr=0.01` -> ("train.lr", 0.01); values as in TOML (or Python's True and False), bare words are strings."""
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise ConfigError(f"--set wants section.name=value, such as train.lr=0.01, got {text!r}")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        value = value.strip()
        # As text both would count as true.
        return name.strip(), value == "True" if value in ("True", "False") else value


def _toml(value: Any) -> str:
    """TOML reads what JSON writes, but for surrogate pairs and the bare control character 127."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Integers pass for floats; nothing else is converted."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is not kind:
        raise ConfigError(f"{name} must be {kind.__name__}, got {value!r}")
    return value


def _fanouts(values: Any) -> list[int]:
    good = isinstance(values, (list, tuple)) and len(values) > 0
    if not good or not all(type(value) is int and (value > 0 or value == -1) for value in values):
        raise ConfigError(f"train.fanouts must be a list such as [15, 10, 5], -1 = all neighbours, got {values!r}")
    return list(values)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} does not exist: {_nearest(value, list(choices))}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _nearest(word: str, known: list[str]) -> str:
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    return f"did you mean {lower[close[0]]!r}?" if close else f"choose from {', '.join(known)}"
