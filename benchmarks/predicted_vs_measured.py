"""Predicted against measured: reductions and training steps over links of known rates.

    python benchmarks/predicted_vs_measured.py OUT [--ranks 2 4 8] [--rates 0.1 0.25 0.5 1] [--backend gloo]

Every rank is a host of its own: a network namespace whose card is limited by `tc` (so: Linux, root, iproute2). Times
are predicted twice: from a calibration on that very link (`hvd-eightbit predict --measure`, which does not see the
sizes and the training steps that are compared), and from one without a limit and the nominal rate alone, as for a
network that one does not have yet. Writes OUT.json, OUT.md, and OUT.png if matplotlib is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
import tempfile

import namespaces

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hvd_eightbit.speedup import calibration, plotting  # noqa: E402
from hvd_eightbit.speedup.model import Efficiency, Link, Setting, allreduce_seconds  # noqa: E402
from hvd_eightbit.speedup.model import predict as predict_step  # noqa: E402
from hvd_eightbit.speedup.models import Layer, Network  # noqa: E402

CALIBRATE = ["-m", "hvd_eightbit.cli", "predict", "--measure"]
HEADERS = 1448 / 1514  # of a full packet of TCP, the part that is data
PREDICTIONS = ("calibrated", "nominal")  # on the link itself; from the nominal rate
TRAIN = [str(pathlib.Path(__file__).with_name("training_step.py"))]


def run(program: list[str], ranks: int, rate: float | None, backend: str) -> dict:
    """The JSON that a program writes to its last argument, run on hosts of one rank with cards of `rate` Gbit/s."""
    with tempfile.TemporaryDirectory() as folder, namespaces.hosts(ranks, rate) as hosts:
        file = pathlib.Path(folder) / "out.json"
        env = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = hosts.run([1] * ranks, [*program, str(file)], backend=backend, timeout=900, env=env)
        if done.returncode:
            sys.exit(f"{program} failed on {ranks} ranks:\n{done.stdout}")
        return json.loads(file.read_text())


def at_rate(unlimited: calibration.Calibration, rate: float) -> calibration.Calibration:
    """Ranks on a link that was not measured, of so many Gbit/s.

    Without a limit it is the processor that moves and adds what a collective sends, at a bandwidth of its own. With
    one, both take their time and overlap in part: the longer hides most of the shorter where one is much longer, and
    little where they are alike. Taken to be the root of the sum of their squares.
    """
    free, bandwidth = unlimited.cluster, HEADERS * rate * 1e9 / 8
    shares = {
        name: 1 / math.hypot(1, bandwidth / (share * free.between.bandwidth))
        for name, share in dataclasses.asdict(free.efficiency).items()
    }
    link = Link(bandwidth, free.between.latency)
    cluster = dataclasses.replace(free, between=link, within=link, efficiency=Efficiency(**shares))
    return calibration.Calibration(cluster, unlimited.kernels)


def perceptron(widths: list[int]) -> Network:
    """The network of training_step.py."""
    pairs = list(zip(widths, widths[1:]))
    return Network("perceptron", tuple(Layer(f"{a}x{b}", (a * b, b), 2 * a * b) for a, b in pairs))


def compare(ranks: int, rates: list[float], backend: str) -> list[dict]:
    """Reductions and training steps on so many ranks, measured and predicted, at each rate."""
    rows = []
    unlimited = calibration.from_json(run(CALIBRATE, ranks, None, backend))
    for rate in rates:
        measured_link = run(CALIBRATE, ranks, rate, backend)
        links = (calibration.from_json(measured_link), at_rate(unlimited, rate))
        for check in measured_link["checks"]:
            method, elements = check["method"], check["elements"]
            predicted = (allreduce_seconds(link.cluster, link.kernels, elements, method) for link in links)
            rows.append((rate, f"reduction of {elements:,}", method, check["measured"], *predicted))
        steps = run(TRAIN, ranks, rate, backend)
        network, compute = perceptron(steps.pop("widths")), steps.pop("compute")
        settings = [Setting(network, link.cluster, link.kernels, compute_seconds=compute) for link in links]
        for method, measured in steps.items():
            predicted = (predict_step(setting, method).step for setting in settings)
            rows.append((rate, "training step", method, measured, *predicted))
    names = ("rate", "what", "method", "measured", *PREDICTIONS)
    return [{"ranks": ranks, "backend": backend, **dict(zip(names, row))} for row in rows]


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| ranks | card, Gbit/s | what | method | measured ms | calibrated ms | ratio | nominal ms | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        predicted = (f"{1e3 * r[p]:.1f} | {r[p] / r['measured']:.2f} |" for p in PREDICTIONS)
        start = f"| {r['ranks']} | {r['rate']:g} | {r['what']} | {r['method']} | {1e3 * r['measured']:.1f} |"
        lines.append(" ".join([start, *predicted]))
    lines.append("")
    for p in PREDICTIONS:
        errors = sorted(abs(r[p] / r["measured"] - 1) for r in rows)
        within = sum(e <= 0.15 for e in errors)
        middle, most = (f"{100 * e:.0f}%" for e in (errors[len(errors) // 2], errors[-1]))
        lines.append(f"{p}: {within} of {len(rows)} within 15%; median {middle}, most {most}\n")
    return "\n".join(lines)


def plot(rows: list[dict], file: str) -> None:
    """Predicted over measured."""
    figure, axes = plotting.pyplot().subplots(1, 2, figsize=(10, 5), layout="constrained", sharey=True)
    ends = [1e3 * f(r["measured"] for r in rows) for f in (min, max)]
    for axis, p, title in zip(axes, PREDICTIONS, ("calibrated on the link", "from the nominal rate")):
        for method in dict.fromkeys(r["method"] for r in rows):
            chosen = [r for r in rows if r["method"] == method]
            axis.loglog([1e3 * r["measured"] for r in chosen], [1e3 * r[p] for r in chosen], "o", label=method)
        axis.loglog(ends, ends, "k-", linewidth=0.8)
        axis.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="k", alpha=0.1, label="15%")
        axis.set(title=title, xlabel="measured, ms")
    axes[0].set_ylabel("predicted, ms")
    axes[0].legend()
    figure.savefig(file, dpi=80)


def main() -> None:
    """Measures, predicts, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="OUT.json, OUT.md and OUT.png are written")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1], help="Gbit/s of a host's card")
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="gloo")
    parser.add_argument("--plot-only", action="store_true", help="draw OUT.json, measured before")
    options = parser.parse_args()
    out = options.out
    if not options.plot_only:
        rows = []
        for ranks in options.ranks:
            rows += compare(ranks, options.rates, options.backend)
            pathlib.Path(f"{out}.json").write_text(json.dumps(rows, indent=1) + "\n")
            pathlib.Path(f"{out}.md").write_text(table(rows))
    rows = json.loads(pathlib.Path(f"{out}.json").read_text())
    print(table(rows))
    try:
        plot(rows, f"{out}.png")
    except ImportError as error:
        print(error)


if __name__ == "__main__":
    main()
