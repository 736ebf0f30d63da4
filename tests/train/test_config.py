"""Configurations: recipes, names, types, ranges, and the same run as a file."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from randombatch import data
from randombatch.models.peers import build_model
from randombatch.train import config as configs
from randombatch.train.config import Config, ConfigError, from_tables, load_config, parse_assignment, recipe_names


def test_recipe_by_name_and_by_path(tmp_path: Path) -> None:
    by_name = load_config("digits")
    assert by_name.data.dataset == "digits"
    assert by_name == load_config(configs.RECIPES / "digits.toml")
    copy = tmp_path / "mine.toml"
    copy.write_text('[train]\nepochs = 7\n[model]\ntrans_dropout = 0.25\nattention = "none"\n')
    mine = load_config(str(copy))
    assert (mine.train.epochs, mine.model.attention, mine.model.options) == (7, "none", {"trans_dropout": 0.25})
    assert mine.train.lr == Config().train.lr


def test_a_folder_called_like_a_recipe_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_config("digits").data.dataset == "digits"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_its_options_exist(name: str) -> None:
    path = configs.RECIPES / f"{name}.toml"
    config = load_config(name)
    model = config.model
    built = build_model(model.name, 5, model.hidden_channels, 3, model.attention, model.batch_size, model.options)
    assert built.branches()["gnn"]
    comment = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    known = {*data.names(), "deezer", "film"}
    assert config.data.dataset.lower() in known or config.data.dataset in comment, "unknown data set, not explained"
    assert config.data.split in data.SPLITS
    of_source = {"digits": data.digits, "majority": data.majority, "synthetic": data.synthetic}
    allowed = {*data.SPLIT_OPTIONS.get(config.data.split, ())}
    allowed |= {*getattr(of_source.get(config.data.dataset), "OPTIONS", ())}
    assert allowed.issuperset(config.data.options)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "again.toml") == config


TEXT = st.text(st.characters(blacklist_categories=["Cs"]))
VALUES = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
OPTIONS = st.dictionaries(st.sampled_from(["k", "num_nodes", "alpha", "use_graph"]), VALUES | st.lists(VALUES))


@example(dataset="\x7f\U0001f600\n\\", root='"', options={"k": ["\x7f"]}, lr=1e-5, seed=0)
@settings(deadline=None)
@given(dataset=TEXT, root=TEXT, options=OPTIONS, lr=st.floats(1e-300, 1e300), seed=st.integers(0, 2**62 - 1))
def test_any_configuration_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, dataset: str, root: str, options: dict, lr: float, seed: int
) -> None:
    config = from_tables(
        {
            "data": {"dataset": dataset, "root": root, **options},
            "model": {"name": "sgformer", "options": options},
            "train": {"lr": lr, "seed": seed, "minibatch": "all-edges"},
        }
    )
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(config.to_toml(), encoding="utf-8", newline="")
    again = load_config(path)
    assert again == config
    assert list(map(type, again.model.options.values())) == list(map(type, options.values()))


@pytest.mark.parametrize(
    ("tables", "nearest"),
    [
        ({"trian": {}}, "did you mean 'train'"),
        ({"train": {"epoch": 3}}, "unknown setting train.epoch: did you mean 'epochs'"),
        ({"train": {"options": {"lr": 3}}}, "unknown setting train.options"),
        ({"model": {"attention": "random_batch"}}, "did you mean 'random-batch'"),
        ({"model": {"name": "sgfromer"}}, "did you mean 'sgformer'"),
        ({"train": {"optimizer": "adamW"}}, "did you mean 'adamw'"),
        ({"train": {"minibatch": "alledges"}}, "did you mean 'all-edges'"),
        ({"data": {"edges": "symetric"}}, "did you mean 'symmetric'"),
        ({"data": {"metric": "rocauc"}}, "did you mean 'roc_auc'"),
        ({"model": {"name": "pyg-gps", "attention": "none"}}, "use the model sgformer for controls"),
    ],
)
def test_unknown_words_suggest_the_nearest(tables: dict, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest) as error:
        from_tables(tables)
    assert "\n" not in str(error.value)


def test_unknown_recipes_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown recipe 'digit': did you mean 'digits'"):
        load_config("digit")
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.toml"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[train\nepochs = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "broken.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "broken.toml").write_text("[train]\nepocs = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml: unknown setting train\.epocs: did you mean 'epochs'"):
        load_config(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"epochs": "many"}}, "train.epochs must be int, got 'many'"),
        ({"train": {"epochs": 3.5}}, "train.epochs must be int, got 3.5"),
        ({"train": {"epochs": True}}, "train.epochs must be int, got True"),
        ({"train": {"lr": "fast"}}, "train.lr must be float"),
        ({"train": {"lr": False}}, "train.lr must be float"),
        ({"data": {"dataset": 3}}, "data.dataset must be str"),
        ({"data": {"options": 5}}, "data.options must be a table"),
        ({"train": 5}, "train must be a section"),
    ],
)
def test_wrong_types_are_refused(tables: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tables(tables)


def test_whole_numbers_pass_for_floats() -> None:
    lr = from_tables({"train": {"lr": 1}}).train.lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.epochs", 0), ("train.eval_every", 0), ("train.seeds", 1), ("train.checkpoint_every", 0),
        ("train.patience", -1), ("train.runs", -1), ("train.threads", -1), ("train.seed", -1), ("train.seed", 2**64),
        ("train.lr", 0.0), ("train.lr", -0.1), ("train.lr", math.nan), ("train.lr", math.inf),
        ("train.gnn_weight_decay", -1e-9), ("train.trans_weight_decay", math.nan),
        ("train.trans_weight_decay", math.inf), ("model.batch_size", 1), ("model.hidden_channels", 0),
        ("data.num_splits", -1),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        Config().replace(**{setting: value})


def test_the_limits_themselves_are_allowed() -> None:
    limits = {"epochs": 1, "eval_every": 1, "seeds": 2, "checkpoint_every": 1, "patience": 0, "runs": 0, "seed": 0}
    config = Config().replace(**{f"train.{k}": v for k, v in limits.items()}, **{"model.batch_size": 2})
    assert {name: getattr(config.train, name) for name in limits} == limits


def test_replace_changes_settings_and_adds_options() -> None:
    config = Config()
    changed = config.replace(**{"train.lr": 0.5, "model.alpha": 0.1, "data.k": 7})
    assert (changed.train.lr, changed.model.options, changed.data.options) == (0.5, {"alpha": 0.1}, {"k": 7})
    assert config == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 3.0
    for name in ("train.lrr", "trian.lr"):
        with pytest.raises(ConfigError, match="did you mean 'train.lr'"):
            config.replace(**{name: 1.0})
    with pytest.raises(ConfigError, match="unknown setting 'lr'"):
        config.replace(lr=1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.lr=0.01", ("train.lr", 0.01)),
        ("train.epochs=5", ("train.epochs", 5)),
        ("model.use_graph=false", ("model.use_graph", False)),
        ("model.use_graph=False", ("model.use_graph", False)),
        ("model.gnn_plain=True", ("model.gnn_plain", True)),
        ("model.attention=none", ("model.attention", "none")),
        ('data.dataset="a=b.npz"', ("data.dataset", "a=b.npz")),
        ("data.dataset=a=b.npz", ("data.dataset", "a=b.npz")),
        ("train.lr = 1e-3", ("train.lr", 1e-3)),
        ("data.root=", ("data.root", "")),
    ],
)
def test_assignments_are_read(text: str, expected: tuple) -> None:
    name, value = parse_assignment(text)
    assert (name, value, type(value)) == (*expected, type(expected[1]))


@pytest.mark.parametrize("text", ["train.lr", "lr=0.1", "=3", ""])
def test_other_assignments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.name=value"):
        parse_assignment(text)
