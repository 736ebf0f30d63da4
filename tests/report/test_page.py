"""The page shows what the folders hold, loads nothing, and text in it stays text."""

import base64
import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from randombatch.report.page import page
from randombatch.train import compare as comparison
from randombatch.train.config import Config
from randombatch.train.job import train

VOID = {"meta", "img"}
ATTENTIONS = ["none", "origin", "random-batch"]


class Page(HTMLParser):
    """Reads a page: tables as lists of rows, images, text and tags; refuses tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.images: dict[str, bytes] = {}
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "img":
            start, _, content = (dict(attrs)["src"] or "").partition(",")
            assert start == "data:image/png;base64"
            self.images[dict(attrs)["alt"] or ""] = base64.b64decode(content, validate=True)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows: list[list[str]] = []
            self.caption = ""
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables.setdefault(self.caption, self.rows)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "caption":
            self.caption += data
        elif self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data
        if "style" not in self.open:
            self.text += data

    def facts(self, caption: str) -> dict[str, str]:
        return {row[0]: row[1] for row in self.tables[caption]}

    def paragraphs(self, kind: str) -> int:
        return sum(tag == "p" and attributes.get("class") == kind for tag, attributes in self.tags)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small comparison as `compare` writes it, its runs in this process."""
    folder = tmp_path_factory.mktemp("runs") / "digits-compare"
    config = Config().replace(**{
        "train.epochs": 3, "train.runs": 2, "train.seed": 5, "model.hidden_channels": 8, "model.batch_size": 32,
        "model.gnn_num_layers": 1,
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_run", lambda config, folder, *_: train(config, folder))
        comparison.compare(config, ATTENTIONS, folder, resume=False, quiet=True)
    return folder


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a folder whose result was changed."""
    shutil.copytree(folder, to)
    result = result_of(folder)
    change(result)
    (to / "result.json").write_text(json.dumps(result))
    return to


def find(tables: dict[str, list[list[str]]], start: str) -> list[list[str]]:
    (caption,) = [caption for caption in tables if caption.startswith(start)]
    return tables[caption]


def test_a_comparison(compared: Path) -> None:
    seen, result = Page(page([compared])), result_of(compared)
    assert result["verdict"] in seen.text
    head, *rows = find(seen.tables, "± deviation over runs")
    assert head == ["attention", "test accuracy, %", "minus none", "minus origin", "s/epoch", "peak GB", "parameters"]
    for row, cells in zip(result["rows"], rows, strict=True):
        expected = [row["attention"], f"{100 * row['score_mean']:.2f} ± {100 * row['score_std']:.2f}"]
        for other in ("minus_none", "minus_origin"):
            d = {name: 100 * value for name, value in row.get(other, {}).items()}
            text = "{mean:+.2f} ± {stderr:.2f}\n[{low:+.2f}, {high:+.2f}]"
            expected.append(text.format(**d) if d else "")
        costs = f"{row['seconds_per_epoch']:.3f}", f"{row['peak_bytes'] / 1e9:.2f}", f"{row['num_parameters']:,}"
        assert cells == [*expected, *costs]
    head, *rows = find(seen.tables, "Test accuracy of every run")
    assert head == ["seed", "split", *ATTENTIONS]
    assert [row[:2] for row in rows] == [["5", "0"], ["6", "1"]]
    assert [row[4] for row in rows] == [f"{100 * score:.2f}" for score in result["rows"][2]["scores"]]
    files = [compared / "comparison.png", *(compared / name / "curves.png" for name in ATTENTIONS)]
    assert list(seen.images.values()) == [path.read_bytes() for path in files]


def test_a_training_run(compared: Path) -> None:
    folder = compared / "random-batch"
    seen, result = Page(page([folder])), result_of(folder)
    score = f"{100 * result['score_mean']:.2f} ± {100 * result['score_std']:.2f}"
    assert f"test accuracy {score} %, {result['seconds_per_epoch']:.3f} s per epoch" in seen.text
    assert "attention random-batch" in seen.text
    _, *rows = find(seen.tables, "Every run")
    for row, cells in zip(result["rows"], rows, strict=True):
        whole = [str(row[name]) for name in ("run", "seed", "split", "best_epoch", "epochs")]
        scores = [f"{100 * row[name]:.2f}" for name in ("train", "val", "test")]
        assert cells == [*whole, *scores, f"{row['seconds_per_epoch']:.3f}"]
    assert list(seen.images.values()) == [(folder / "curves.png").read_bytes()]


def test_data_settings_and_machine_are_on_the_page(compared: Path) -> None:
    for folder in (compared, compared / "none"):
        seen, result = Page(page([folder])), result_of(folder)
        data = seen.facts("Data")
        assert data["nodes"] == "1,797"
        assert data["arcs"] == f"{result['data']['num_edges']:,} (edges: symmetric)"
        assert data["splits"] == f"5, hash {result['data']['split_hash']}"
        assert data["runs"] == "2, seeds 5, 6"
        assert (data["metric"], data["selection"]) == ("accuracy", result["selection"])
        settings = seen.facts("Settings")
        for section, table in result["settings"].items():
            for name, value in {**table, **table.get("options", {})}.items():
                assert name == "options" or settings[f"{section}.{name}"] == json.dumps(value)
        assert settings["model.gnn_num_layers"] == "1"
        machine = dict(result["machine"])
        versions = machine.pop("versions")
        assert seen.facts("Machine") == {name: str(value) for name, value in {**machine, **versions}.items()}


def test_nothing_is_loaded_and_nothing_is_written(compared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.rglob("*")}
    text = page([compared, compared / "origin"])
    assert text == page([compared, compared / "origin"])
    assert {path: path.stat().st_mtime_ns for path in compared.rglob("*")} == before
    seen = Page(text)
    assert not {tag for tag, _ in seen.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, attributes in seen.tags:
        assert not {"href", "srcset", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "http:" not in text
    assert "https:" not in text
    assert ("meta", {"charset": "utf-8"}) in seen.tags


NASTY = "<script>alert('1')</script> & \"<b>\" </td>"


def test_text_stays_text(compared: Path, tmp_path: Path) -> None:
    def spoil(result: dict[str, Any]) -> None:
        result["data"]["name"] = result["data"]["edges"] = result["selection"] = result["metric"] = NASTY
        result["settings"]["data"]["dataset"] = result["machine"]["processor"] = NASTY
        result["settings"]["model"]["options"] = {NASTY: NASTY}
        if "verdict" in result:
            result["verdict"] = result["rows"][1]["attention"] = NASTY
        else:
            result["attention"] = result["rows"][0]["run"] = NASTY

    folders = [changed(compared, tmp_path / "<i>&amp;", spoil), changed(compared / "none", tmp_path / "run", spoil)]
    clean, seen = Page(page([compared, compared / "none"])), Page(page(folders))
    assert {tag for tag, _ in seen.tags} == {tag for tag, _ in clean.tags}
    assert "<i>&amp;" in seen.text
    assert seen.text.count(NASTY) > 12
    assert find(seen.tables, "± deviation")[2][0] == NASTY


def test_an_attention_cannot_name_a_file_elsewhere(compared: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    shutil.copy(compared / "comparison.png", tmp_path / "secret" / "curves.png")

    def climb(result: dict[str, Any]) -> None:
        result["rows"][0]["attention"] = "../secret"
        result["rows"][1]["attention"] = str(tmp_path / "secret")

    seen = Page(page([changed(compared, tmp_path / "climb", climb)]))
    assert len(seen.images) == 2
    assert seen.text.count("No plot: curves.png is missing.") == 2


def test_several_folders_share_an_overview(compared: Path, tmp_path: Path) -> None:
    assert "Everything on this page" not in page([compared])
    folder = compared / "origin"
    seen = Page(page([compared, folder]))
    head, *rows = find(seen.tables, "Everything on this page")
    assert head == ["section", "data", "attention", "metric", "split hash", "runs", "test, %"]
    assert [row[:3] for row in rows] == [*(["1", "digits", name] for name in ATTENTIONS), ["2", "digits", "origin"]]
    assert rows[1][3:] == rows[3][3:]
    assert seen.paragraphs("caution") == 0

    def elsewhere(result: dict[str, Any]) -> None:
        result["data"]["split_hash"] = "0123456789abcdef"
        result["data"]["edges"] = "directed"
        result["machine"]["threads"] = 99

    seen = Page(page([folder, changed(folder, tmp_path / "elsewhere", elsewhere)]))
    assert seen.paragraphs("caution") == 3
    for words in ("digits appears with different splits", "metrics or edges", "Machines, threads or versions differ"):
        assert words in seen.text

    def renamed(result: dict[str, Any]) -> None:
        elsewhere(result)
        result["data"]["name"] = "other"
        result["machine"] = result_of(folder)["machine"]

    assert Page(page([folder, changed(folder, tmp_path / "renamed", renamed)])).paragraphs("caution") == 0


def test_a_single_run_has_no_deviation(compared: Path, tmp_path: Path) -> None:
    def single(result: dict[str, Any]) -> None:
        for name in ("seeds", "splits"):
            result[name] = result[name][:1]
        for row in result["rows"]:
            row["scores"], row["score_mean"] = [0.5], 0.5
            for other in ("minus_none", "minus_origin"):
                if other in row:
                    row[other] = {"mean": -0.01, "stderr": None, "low": None, "high": None}

    _, *rows = find(Page(page([changed(compared, tmp_path / "single", single)])).tables, "± deviation")
    assert [row[1:4] for row in rows] == [["50.00", "", "-1.00"], ["50.00", "-1.00", ""], ["50.00", "-1.00", "-1.00"]]


@pytest.mark.parametrize("content", [None, b"<svg onload=alert(1)>"])
def test_a_plot_that_is_none_is_said_to_be_missing(compared: Path, tmp_path: Path, content: bytes | None) -> None:
    folder = changed(compared / "none", tmp_path / "run", lambda result: None)
    (folder / "curves.png").unlink()
    if content is not None:
        (folder / "curves.png").write_bytes(content)
    seen = Page(page([folder]))
    assert not seen.images
    assert "No plot: curves.png is missing." in seen.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds neither a run of `train` nor a comparison of `compare` \(no result.json\)"),
        ({"config.toml": "", "metrics.jsonl": ""}, "is not finished .*--resume"),
        ({"result.json": '{"settings": '}, "result.json cannot be read as JSON"),
        ({"result.json": "\xff"}, "result.json"),
        ({"result.json": "[1, 2]"}, "is not the result of `train` or `compare`"),
        ({"result.json": '{"settings": {}, "machine": {}, "rows": [], "ratios": {}}'}, "is not the result of"),
        ({"result.json": "[" * 100_000}, "cannot be read as JSON"),
    ],
)
def test_refuses_other_folders(compared: Path, tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        page([compared, tmp_path])
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["compare", "train"])
def test_refuses_damaged_results(compared: Path, tmp_path: Path, part: str) -> None:
    """Whatever is missing or of another kind, it is one line that names the file."""
    folder = compared if part == "compare" else compared / "none"
    result = result_of(folder)
    keys = [(key,) for key in result] + [("data", key) for key in result["data"]]
    keys += [("rows", 0, key) for key in result["rows"][0]]
    refused = 0
    wrong: list[Any] = [..., None, "text", [{}]]
    for number, (*path, last) in enumerate(keys):
        for value in wrong:
            damaged = json.loads(json.dumps(result))
            place = damaged
            for key in path:
                place = place[key]
            if value is ...:
                del place[last]
            else:
                place[last] = value
            target = tmp_path / f"{number}"
            target.mkdir(exist_ok=True)
            (target / "result.json").write_text(json.dumps(damaged))
            try:
                Page(page([target, folder]))
            except ValueError as error:
                refused += 1
                assert str(target / "result.json") in str(error)
                assert "\n" not in str(error)
    assert refused > len(keys)


def test_refuses_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one folder"):
        page([])
    with pytest.raises(ValueError, match="holds neither"):
        page([tmp_path / "not there"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="holds neither"):
        page([tmp_path / "file"])
