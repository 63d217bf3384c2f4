"""A table, the paper's test and a plot of what run.py left in a folder:

python examples/experiments/report.py results [--json FILE] [--markdown FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import numpy as np

CONFIDENCE = 0.99


def beyond(f: float, d1: int, d2: int) -> float:
    """Probability of more than f in the F distribution with d1 and d2 degrees of freedom."""

    def beta(end: float) -> float:  # of x = sin(angle)^2, up to the end, not normalized
        nodes, weights = np.polynomial.legendre.leggauss(200)
        angle = (nodes + 1) / 2 * end
        return end / 2 * float(np.sum(weights * np.sin(angle) ** (d2 - 1) * np.cos(angle) ** (d1 - 1)))

    return beta(np.arcsin(np.sqrt(d2 / (d2 + d1 * f)))) / beta(np.pi / 2)


def half_width(values: np.ndarray) -> float | None:
    """Half of the interval that has the mean of such values with 99% confidence (Student); None for one value."""
    n = len(values)
    if n < 2:
        return None
    low, high = 0.0, 1e4  # the t that is exceeded, on both sides, with 1%: t^2 is F(1, n - 1)
    for _ in range(100):
        t = (low + high) / 2
        low, high = (t, high) if beyond(t * t, 1, n - 1) > 1 - CONFIDENCE else (low, t)
    return float(low * values.std(ddof=1) / np.sqrt(n))


def f_test(groups: list[np.ndarray]) -> dict | None:
    """Whether all groups have one mean: one-way analysis of variance; None without spread or with one group."""
    n, k = sum(map(len, groups)), len(groups)
    if k < 2 or n <= k:
        return None
    mean = np.concatenate(groups).mean()
    between = sum(len(g) * (g.mean() - mean) ** 2 for g in groups) / (k - 1)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (n - k)
    if within == 0:
        return None
    return {"F": between / within, "degrees": [k - 1, n - k], "p": beyond(between / within, k - 1, n - k)}


def summarize(runs: list[dict]) -> list[dict]:
    """For each experiment (net, parallelism, ranks) a row per method, and the test over the paper's types."""
    found = []
    for key in dict.fromkeys((r["net"], r["parallelism"], r["ranks"]) for r in runs):
        own = [r for r in runs if (r["net"], r["parallelism"], r["ranks"]) == key]
        rows, errors = [], {}
        for method in dict.fromkeys(r["method"] for r in own):
            mine = [r for r in own if r["method"] == method]
            of = {
                k: np.array([r[k] for r in mine if r[k] is not None])
                for k in ("test_error", "bytes", "seconds", "codec_ms", "error_of_mean")
            }
            errors[method] = of["test_error"]
            row = {"method": method, "seeds": len(mine)}
            row["test_error"] = float(of["test_error"].mean()) if len(of["test_error"]) else None
            row["half_width"] = half_width(of["test_error"])
            row["bytes"] = float(of["bytes"].min())
            row["seconds"] = float(np.median(of["seconds"]))
            row["codec_ms"] = float(of["codec_ms"].min()) if len(of["codec_ms"]) else None
            row["error_of_mean"] = float(of["error_of_mean"].mean()) if len(of["error_of_mean"]) else None
            rows.append(row)
        types = ("float32", "dynamic_tree", "linear", "mantissa", "static_tree")
        test = f_test([errors[m] for m in types if m in errors and len(errors[m])])
        found.append(dict(zip(("net", "parallelism", "ranks"), key)) | {"settings": own[0]["settings"]})
        found[-1] |= {"data": own[0]["data"], "rows": rows, "f_test": test}
    return found


def table(experiment: dict) -> str:
    """In Markdown."""

    def number(value, form: str) -> str:
        return "" if value is None else format(value, form)

    settings = {k: v for k, v in experiment["settings"].items() if v is not None}
    if experiment["net"] != "alexnet":
        settings.pop("side", None)
    facts = ", ".join([pathlib.Path(experiment["data"]).name, *(f"{k} {v}" for k, v in settings.items())])
    title = f"{experiment['net']}, {experiment['parallelism']}-parallel, {experiment['ranks']} ranks ({facts})"
    lines = [f"**{title}**", "", "| method | seeds | test error % | bytes a step | of float32 | error of the mean |"]
    lines[-1] += " codec ms | s a step |"
    lines.append("|---|---|---|---|---|---|---|---|")
    whole = next((r["bytes"] for r in experiment["rows"] if r["method"] == "float32"), None)
    for r in experiment["rows"]:
        error = number(r["test_error"], ".2f") + (f" ± {r['half_width']:.2f}" if r["half_width"] is not None else "")
        ratio = number(whole and r["bytes"] / whole, ".3f")
        cells = [r["method"], str(r["seeds"]), error, f"{r['bytes']:,.0f}", ratio, number(r["error_of_mean"], ".4f")]
        lines.append(f"| {' | '.join([*cells, number(r['codec_ms'], '.2f'), number(r['seconds'], '.3f')])} |")
    if experiment["f_test"]:
        t = experiment["f_test"]
        lines += ["", f"float32 and the paper's types: F({t['degrees'][0]}, {t['degrees'][1]}) = {t['F']:.2f}, "]
        lines[-1] += f"p = {t['p']:.2f}."
    return "\n".join(lines)


def plot(experiments: list[dict], path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [e for e in experiments if e["rows"][0]["test_error"] is not None]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(5 * len(shown), 4), squeeze=False)
    for axis, experiment in zip(axes[0], shown):
        rows = experiment["rows"]
        spread = [r["half_width"] or 0 for r in rows]
        axis.errorbar([r["test_error"] for r in rows], range(len(rows)), xerr=spread, fmt="o")
        axis.set_yticks(range(len(rows)), [r["method"] for r in rows])
        axis.invert_yaxis()
        axis.set_xlabel("test error %, 99% intervals")
        axis.set_title(f"{experiment['net']}, {experiment['parallelism']}-parallel, {experiment['ranks']} ranks")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    for option in ("json", "markdown", "plot"):
        parser.add_argument(f"--{option}", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*-*-*-*-*.json"))
    if not files:
        parser.error(f"argument folder: no results of run.py in {str(args.folder)!r}")
    experiments = summarize([json.loads(p.read_text()) for p in files])
    text = "\n\n".join(map(table, experiments)) + "\n"
    print(text)
    if args.json:
        args.json.write_text(json.dumps(experiments, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text)
    if args.plot:
        plot(experiments, args.plot)


if __name__ == "__main__":
    main()
