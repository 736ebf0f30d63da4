"""One self-contained HTML page about training runs and comparisons: no scripts, nothing to load, all text escaped."""

import base64
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n"
CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5f6570; --paper: #fff; --line: #dcdfe4; --tint: #f4f6f9;
  --accent: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --soft: #9aa1ad; --paper: #16181c; --line: #343941;
  --tint: #1f2329; --accent: #ff8a80; } }
body { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .25rem; border-top: 1px solid var(--line);
  padding-top: 1.5rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
code { font-size: .9em; overflow-wrap: anywhere; }
.soft, caption { color: var(--soft); font-size: .875rem; }
.verdict, .caution { margin: 1rem 0; padding: .6rem .9rem; background: var(--tint);
  border-left: 4px solid var(--soft); }
.caution { border-color: var(--accent); }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: pre; }
th { font-weight: 600; } thead th { color: var(--soft); font-size: .875rem; vertical-align: bottom; }
th:first-child, .facts td, .words { text-align: left; } .facts td { white-space: pre-wrap; overflow-wrap: anywhere; }
.facts th { font-weight: 400; color: var(--soft); }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 4px; margin: 1rem 0; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
"""


def page(folders: list[Path]) -> str:
    """The page as text, from folders that `train` and `compare` have written. Equal folders give equal pages.

    Args:
        folders: one section each, in this order.

    Raises:
        ValueError: in one line, for a folder that holds neither (or not yet) a finished run nor a comparison.
    """
    if not folders:
        raise ValueError("a report needs at least one folder of `train` or `compare`")
    results = [_read(folder) for folder in folders]
    sections = []
    for number, (folder, result) in enumerate(zip(folders, results, strict=True), 1):
        try:
            sections += ["<section>", *_section(number, folder, result), "</section>"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(f"{type(error).__name__} {error}".split())
            raise ValueError(f"{folder / 'result.json'} is damaged or of another version ({reason})") from None
    title = _text("randombatch: " + ", ".join(_names(results)))
    # The policy makes browsers keep the promise of the first line.
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta http-equiv='
        "\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<style>{CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    )
    return "\n".join([head, *_overview(results), *sections, "</body>\n</html>\n"])


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    if not path.is_file():
        if (folder / "config.toml").is_file():
            raise ValueError(f"{folder} is not finished (no result.json): finish it with `randombatch train --resume`")
        raise ValueError(f"{folder} holds neither a run of `train` nor a comparison of `compare` (no result.json)")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(result, dict) or not {"settings", "machine", "data", "rows", "metric"} <= set(result):
        raise ValueError(f"{path} is not the result of `train` or `compare`")
    return result


def _is_comparison(result: dict[str, Any]) -> bool:
    return "verdict" in result


def _names(results: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(result["data"]["name"]) for result in results))


def _overview(results: list[dict[str, Any]]) -> Iterator[str]:
    """One line for every score, and what forbids to compare them; nothing for a single folder."""
    if len(results) == 1:
        return
    rows = []
    for number, result in enumerate(results, 1):
        for row in result["rows"] if _is_comparison(result) else [result]:
            data, runs = result["data"], len(_seeds(result))
            score = _score(row["score_mean"], row["score_std"], runs)
            words = [str(number), data["name"], row["attention"], result["metric"], data["split_hash"]]
            rows.append([*words, str(runs), score])
    head = ["section", "data", "attention", "metric", "split hash", "runs", "test, %"]
    yield _table(head, rows, "Everything on this page; ± is the deviation over runs.", words=5)
    yield from _cautions(results)


def _cautions(results: list[dict[str, Any]]) -> Iterator[str]:
    for name in _names(results):
        mine = [result for result in results if str(result["data"]["name"]) == name]
        if len({str(result["data"]["split_hash"]) for result in mine}) > 1:
            yield _paragraph("caution", f"{name} appears with different splits: those scores cannot be compared.")
        if len({f"{result['metric']} {result['data']['edges']}" for result in mine}) > 1:
            yield _paragraph("caution", f"{name} appears with different metrics or edges: compare with care.")
    if len({json.dumps(result["machine"], sort_keys=True) for result in results}) > 1:
        yield _paragraph("caution", "Machines, threads or versions differ: compare times inside a section only.")


def _section(number: int, folder: Path, result: dict[str, Any]) -> Iterator[str]:
    data = result["data"]
    compared = _is_comparison(result)
    what = "comparison" if compared else f"attention {result['attention']}"
    yield f"<h2>{number}. {_text(data['name'])}: {_text(what)}</h2>"
    yield f'<p class="soft"><code>{_text(folder)}</code></p>'
    yield from _comparison(folder, result) if compared else _training(folder, result)
    seeds = _seeds(result)
    yield _facts("Data", {
        "nodes": f"{data['num_nodes']:,}", "arcs": f"{data['num_edges']:,} (edges: {data['edges']})",
        "features, classes": f"{data['num_features']:,}, {data['num_classes']:,}",
        "splits": f"{data['num_splits']}, hash {data['split_hash']}", "metric": result["metric"],
        "selection": result["selection"], "runs": f"{len(seeds)}, seeds {', '.join(map(str, seeds))}",
    })  # fmt: skip
    yield f"<details><summary>settings</summary>{_facts('Settings', _flat(result['settings']))}</details>"
    machine = dict(result["machine"])
    versions = machine.pop("versions")
    yield f"<details><summary>machine and versions</summary>{_facts('Machine', {**machine, **versions})}</details>"


def _comparison(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    yield _paragraph("verdict", result["verdict"])
    rows, runs = result["rows"], len(result["seeds"])
    others = [name for name in ("none", "origin") if any(f"minus_{name}" in row for row in rows)]
    head = ["attention", f"test {result['metric']}, %", *(f"minus {name}" for name in others)]
    body = [
        [
            row["attention"],
            _score(row["score_mean"], row["score_std"], runs),
            *(_difference(row.get(f"minus_{name}")) for name in others),
            *_cost(row),
            f"{row['num_parameters']:,}",
        ]
        for row in rows
    ]
    caption = "± deviation over runs. Differences are taken run by run: mean ± standard error, [interval]."
    caption += " All intervals of the page's table hold together with 95 % (Student's t, Bonferroni)."
    yield _table([*head, "s/epoch", "peak GB", "parameters"], body, caption)
    yield _image(folder / "comparison.png", "test scores, seconds per epoch and peak memory of each attention")
    pairs = zip(result["seeds"], result["splits"], *(row["scores"] for row in rows), strict=True)
    scores = [[str(seed), str(split), *map(_percent, values)] for seed, split, *values in pairs]
    names = [row["attention"] for row in rows]
    table = _table(["seed", "split", *names], scores, f"Test {result['metric']} of every run, %.")
    yield f"<details><summary>scores of every run</summary>{table}</details>"
    yield "<details><summary>curves</summary>"
    for name in names:
        yield f"<h3>{_text(name)}</h3>"
        # A name, never a path: nothing outside of the folder is read.
        yield _image(folder / Path(name).name / "curves.png", f"loss and scores over the epochs, attention {name}")
    yield "</details>"


def _training(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    score = _score(result["score_mean"], result["score_std"], len(result["rows"]))
    seconds, peak = _cost(result)
    yield _paragraph(
        "verdict",
        f"test {result['metric']} {score} %, {seconds} s per epoch, peak memory {peak} GB, "
        f"{result['num_parameters']:,} parameters",
    )
    body = [
        [
            *(str(row[name]) for name in ("run", "seed", "split", "best_epoch", "epochs")),
            *(_percent(row[name]) for name in ("train", "val", "test")),
            f"{row['seconds_per_epoch']:.3f}",
        ]
        for row in result["rows"]
    ]
    head = ["run", "seed", "split", "best epoch", "epochs", "train, %", "val, %", "test, %", "s/epoch"]
    yield _table(head, body, f"Every run: {result['metric']} at its best validation score.")
    yield _image(folder / "curves.png", "loss and scores over the epochs")


def _seeds(result: dict[str, Any]) -> list[int]:
    return result["seeds"] if _is_comparison(result) else [row["seed"] for row in result["rows"]]


def _flat(settings: dict[str, Any]) -> dict[str, str]:
    """`section.name` and value; options beside the section's own settings, as in the recipe."""
    return {
        f"{section}.{name}": json.dumps(value, ensure_ascii=False)
        for section, table in settings.items()
        for name, value in {**table, **table.get("options", {})}.items()
        if name != "options"
    }


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _score(mean: float, deviation: float, runs: int) -> str:
    """A single run has no deviation."""
    return f"{_percent(mean)} ± {_percent(deviation)}" if runs > 1 else _percent(mean)


def _difference(paired: dict[str, float | None] | None) -> str:
    if paired is None or paired["mean"] is None:
        return ""
    text = f"{100 * paired['mean']:+.2f}"
    if paired["stderr"] is None or paired["low"] is None or paired["high"] is None:
        return text
    return f"{text} ± {_percent(paired['stderr'])}\n[{100 * paired['low']:+.2f}, {100 * paired['high']:+.2f}]"


def _cost(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['seconds_per_epoch']:.3f}", f"{row['peak_bytes'] / 1e9:.2f}"


def _text(value: object) -> str:
    return html.escape(str(value))


def _paragraph(kind: str, text: str) -> str:
    return f'<p class="{kind}">{_text(text)}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, words: int = 1) -> str:
    """First cells name their row, the first `words` columns are no numbers; all text is escaped here."""

    def cell(place: int, text: str, tag: str) -> str:
        kind = ' class="words"' if place < words else ""
        return f"<{tag}{kind}>{_text(text)}</{tag.split()[0]}>"

    top = "".join(cell(place, text, 'th scope="col"') for place, text in enumerate(head))
    body = ""
    for row in rows:
        cells = (cell(place, text, "td" if place else 'th scope="row"') for place, text in enumerate(row))
        body += f"<tr>{''.join(cells)}</tr>\n"
    return (
        f'<div class="scroll"><table><caption>{_text(caption)}</caption>\n<thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _facts(caption: str, facts: dict[str, Any]) -> str:
    lines = [f'<tr><th scope="row">{_text(k)}</th><td>{_text(v)}</td></tr>\n' for k, v in facts.items()]
    return (
        f'<div class="scroll"><table class="facts"><caption>{_text(caption)}</caption>\n'
        f"<tbody>\n{''.join(lines)}</tbody></table></div>"
    )


def _image(path: Path, description: str) -> str:
    content = path.read_bytes() if path.is_file() else b""
    if not content.startswith(PNG):
        return _paragraph("soft", f"No plot: {path.name} is missing.")
    data = base64.b64encode(content).decode()
    return f'<img alt="{_text(description)}" src="data:image/png;base64,{data}">'
