"""Results as tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_training(console: Console, result: dict[str, Any]) -> None:
    """The runs of one job."""
    data = result["data"]
    title = f"{data['name']}: {data['num_nodes']:,} nodes, {data['num_edges']:,} arcs ({data['edges']}), "
    title += f"attention {result['attention']}"
    table = Table("run", "seed", "split", "best epoch", "train", "val", "test", "s/epoch", title=title)
    for row in result["rows"]:
        scores = [f"{100 * row[name]:.2f}" for name in ("train", "val", "test")]
        whole = [str(row[name]) for name in ("run", "seed", "split", "best_epoch")]
        table.add_row(*whole, *scores, f"{row['seconds_per_epoch']:.3f}")
    console.print(table)
    score = _score(result, len(result["rows"]))
    console.print(
        f"test {result['metric']} {score} %, {result['seconds_per_epoch']:.3f} s per epoch, "
        f"peak memory {result['peak_bytes'] / 1e9:.2f} GB, {result['num_parameters']:,} parameters",
        highlight=False,
    )


def _score(row: dict[str, Any], runs: int) -> str:
    """Mean and deviation; one run has none."""
    mean = f"{100 * row['score_mean']:.2f}"
    return mean if runs == 1 else f"{mean} ± {100 * row['score_std']:.2f}"


def print_comparison(console: Console, result: dict[str, Any]) -> None:
    """One row for each attention."""
    data, runs = result["data"], len(result["seeds"])
    title = f"{data['name']}: {data['num_nodes']:,} nodes, {data['num_edges']:,} arcs, {runs} runs, "
    title += f"test {result['metric']} in %"
    table = Table("attention", "score", "minus none", "minus origin", "s/epoch", "peak GB", title=title)
    for row in result["rows"]:
        table.add_row(
            row["attention"],
            _score(row, runs),
            _difference(row.get("minus_none")),
            _difference(row.get("minus_origin")),
            f"{row['seconds_per_epoch']:.3f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        )
    console.print(table)
    console.print("± deviation over runs; differences: mean over paired runs ± standard error", style="dim")
    console.print(result["verdict"], highlight=False)


def _difference(paired: dict[str, float | None] | None) -> str:
    if paired is None or paired["mean"] is None:
        return ""
    error = "" if paired["stderr"] is None else f" ± {100 * paired['stderr']:.2f}"
    return f"{100 * paired['mean']:+.2f}{error}"


def print_attention(console: Console, result: dict[str, Any]) -> None:
    """`bench attention`: contenders, growth, sweep, ratios."""
    s = result["settings"]
    title = "N = {nodes:,}, F = {dim}, H = {heads}, p = {batch_size}, {threads} threads".format(**s)
    table = Table("contender", "allocator", "forward ms", "train ms", "median ms", "extra MB", title=title)
    for row in result["rows"]:
        if "allocator" in row and row["name"] != "scaling":
            seconds = [f"{row[key] * 1e3:.1f}" for key in ("forward_s", "train_s", "train_median_s")]
            table.add_row(row["name"], row["allocator"], *seconds, f"{row['extra_bytes'] / 1e6:.1f}")
    console.print(table)
    if s["scaling"]:
        table = Table("N", "allocator", "train ms", "ns per node", "extra MB", title="our layer as N grows")
        for row in result["rows"]:
            if row["name"] == "scaling":
                figures = f"{row['train_s'] * 1e3:.1f}", f"{row['ns_per_node']:.0f}", f"{row['extra_bytes'] / 1e6:.1f}"
                table.add_row(f"{row['nodes']:,}", row["allocator"], *figures)
        console.print(table)
    if s["sweep"]:
        table = Table("H", "p", "train ms", "over its floor", title="other heads and batch sizes")
        for row in result["rows"]:
            if row["name"] == "sweep":
                time, ratio = f"{row['train_s'] * 1e3:.1f}", f"{row['over_floor']:.2f}"
                table.add_row(str(row["heads"]), str(row["batch_size"]), time, ratio)
        console.print(table)
    print_ratios(console, result["ratios"])


def print_epoch(console: Console, result: dict[str, Any]) -> None:
    """`bench epoch`: one training step of each contender in each case."""
    table = Table("case", "model", "allocator", "step s", "median s", "peak GB")
    for row in result["rows"]:
        if "failed" in row:
            table.add_row(row["case"], row["name"], row["allocator"], "failed", "", "")
            continue
        figures = f"{row['train_s']:.3f}", f"{row['train_median_s']:.3f}", f"{row['peak_bytes'] / 1e9:.2f}"
        table.add_row(row["case"], row["name"], row["allocator"], *figures)
    console.print(table)
    for row in result["rows"]:
        if "failed" in row:
            console.print(f"{row['case']} {row['name']} ({row['allocator']}): {row['failed']}", highlight=False)
    print_ratios(console, result["ratios"])


def print_ratios(console: Console, ratios: dict[str, Any]) -> None:
    table = Table("ratio (a peer's time or memory over ours: above 1 we are better)", "value")
    for name, value in ratios.items():
        if isinstance(value, dict):
            for peer, ratio in value.items():
                table.add_row(f"{name} {peer}", "" if ratio is None else f"{ratio:.2f}")
        elif value is not None:
            table.add_row(name, f"{value:,.0f}" if name.endswith("bytes") else f"{value:.3f}")
    console.print(table)


def print_convergence(console: Console, result: dict[str, Any]) -> None:
    """`converge`: cells, the constant, slopes, and what softmax leaves."""
    s = result["settings"]
    title = "N = {particles}, D = {dim}, T = {horizon:g}, {replicas} replicas".format(**s)
    table = Table("τ", "p", "sup J", "J / (τ c)", title=title)
    for row in result["rows"]:
        j, q = f"{row['sup']:.3e} ± {row['sup_stderr']:.1e}", f"{row['q']:.4f} ± {row['q_stderr']:.4f}"
        table.add_row(f"{row['tau']:g}", str(row["batch_size"]), j, q)
    console.print(table)
    g, fit = result["g"], result["fit"]
    lines = [
        "g measured {measured:.4f} ± {stderr:.4f}, predicted {predicted:.4f} ({z:+.3g} standard errors)".format(**g),
        "fit J / (τ c) = g + τ (a + b u): a = {a:.2f}, b = {b:.2f}, chi2 {chi2:.1f} on {dof}".format(**fit),
    ]
    for name, what in (("slope_tau", "τ"), ("slope_c", "c")):
        lines.append("slope in {} {value:.3f} [{low:.3f}, {high:.3f}]".format(what, **result[name]))
    lines.append(f"bound: J <= {result['bound']:.3f} (τ/(p-1) + τ²) in all of these")
    lines += [f"WARNING: {text}" for text in result["warnings"]]
    console.print("\n".join(lines), highlight=False, markup=False)
    if "softmax" in result:
        number = len(result["softmax"][0]["floors"])
        title = f"softmax inside the batch, mean over {number} W, |W| = {s['scale']:g}: not covered by the theorem"
        table = Table("dynamics", "p", "J as τ → 0", "cut", title=title)
        plain = {row["batch_size"]: row["floor"] for row in result["softmax"] if row["kind"] == "softmax"}
        for row in result["softmax"]:
            floor = f"{row['floor']:.2e} ± {row['floor_stderr']:.1e}"
            cut = f"{plain[row['batch_size']] / row['floor']:.1f}x" if "self_correction" in row["kind"] else ""
            table.add_row(row["kind"], str(row["batch_size"]), floor, cut)
        console.print(table)


def print_particles(console: Console, result: dict[str, Any]) -> None:
    """`bench particles`."""
    table = Table("what", "N", "D", "p", "step ms", "ns each", "path", "GB")
    for row in result["rows"]:
        memory = f"{row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in row else ""
        numbers = f"{row['particles']:.0e}", str(row["dim"]), str(min(row["batch_size"], row["particles"]))
        times = f"{1e3 * row['seconds']:.2f}", f"{row['ns_per_particle']:.1f}"
        table.add_row(row["name"], *numbers, *times, row.get("path", ""), memory)
    console.print(table)
    print_ratios(console, result["ratios"])


def print_ranks(console: Console, result: dict[str, Any]) -> None:
    """`bench ranks`: measured, predicted, and what fits."""
    s = result["settings"]
    title = "N = {nodes:,}, {edges:,} edges, F = {hidden}, p = {batch_size}, {partition}, one thread per rank".format(
        **s
    )
    table = Table("ranks", "step ms", "attention ms", "exchange ms", "waiting ms", "sent MB", "memory MB", title=title)
    for row in result["rows"]:
        sent = max(a + b for a, b in zip(row["attention_bytes"], row["halo_bytes"], strict=True))
        memory = "-".join(f"{m / 1e6:.0f}" for m in sorted({min(row["growth_bytes"]), max(row["growth_bytes"])}))
        times = (row["step_s"], row.get("attention_s"), row.get("exchange_s"), row["wait_s"])
        table.add_row(row["name"], *("" if t is None else f"{1e3 * t:.1f}" for t in times), f"{sent / 1e6:.1f}", memory)
    console.print(table)
    network = result["network"]
    console.print(
        f"an all-to-all here: {1e6 * network['alpha_s']:.0f} us per peer + {1e9 * network['beta_s_per_byte']:.2f} ns "
        f"per byte; memory is beyond that of the libraries",
        highlight=False,
    )
    title = f"predicted at {s['bandwidth'] / 1e9:g} GB/s, {1e6 * s['latency']:g} us"
    table = Table("ranks", "compute ms", "sending ms", "step ms", "if hidden ms", "speed-up", title=title)
    for row in result["predicted"]:
        times = (row["compute_s"], row["communication_s"], row["step_s"], row["overlapped_step_s"])
        table.add_row(str(row["ranks"]), *(f"{1e3 * t:.2f}" for t in times), f"{row['speedup']:.1f}")
    console.print(table)
    title = f"what fits into {s['memory'] / 2**30:g} GiB per rank (from the memory measured)"
    table = Table("ranks", "largest width", "most nodes", title=title)
    for row in result["fits"]:
        table.add_row(str(row["ranks"]), f"{row['largest_hidden']:,}", f"{row['most_nodes']:,}")
    console.print(table)
    print_ratios(console, result["ratios"])


def print_store(console: Console, result: dict[str, Any]) -> None:
    """`bench store`: one line for each measurement."""
    s = result["settings"]
    title = "N = {nodes:,}, {degree:g} arcs per node, {features} features, fan-out {fanouts}".format(**s)
    table = Table("what", "rate", "seconds", "peak MB", title=title)
    for row in result["rows"]:
        rate = row.get("edges_per_s") or row.get("rows_per_s")
        unit = "edges" if "edges_per_s" in row else "rows"
        table.add_row(
            row["name"],
            "" if rate is None else f"{rate / 1e6:.2f} M {unit}/s",
            f"{row['seconds']:.3f}" if "seconds" in row else "",
            f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else "",
        )
    console.print(table)
    print_ratios(console, result["ratios"])
