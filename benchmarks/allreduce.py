"""Allreduce of tensors of many sizes, between hosts on links of a known rate: float32, float16 and 8 bits side by side.

    python benchmarks/allreduce.py [--ranks 2 4] [--backends gloo mpi] [--gbit 0.1 1 10 0] [--json FILE] [--plot FILE]

Every rank is a host of its own: a network namespace whose card sends at most so many Gbit/s (0: no limit). All
compressions take turns in one run, so that what else the machine does meets all alike; figures are medians over the
rounds, and the least of them. Bytes are counted on the card of a host. The error is that of the mean of Gaussian
numbers, relative L2. Needs Linux, iproute2 and root (or user namespaces).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

import namespaces
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
KILOBYTES = [64, 256, 1024, 4096, 16384, 65536, 100_000, 262144]  # of a float32 tensor; 100,000 are 25 million elements
SECONDS = 2.0  # a size at which one float32 allreduce would take longer on the link is left out
NAMES = ("float32", "float16", "8 bits")


def worker(args: argparse.Namespace) -> None:
    """On each rank; rank 0 writes a list with a dict for each size."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd_eightbit as eightbit

    hvd.init()
    compressions = (hvd.Compression.none, hvd.Compression.fp16, eightbit.EightBitCompressor(min_elements=0))
    table = []
    for kilobytes in args.kilobytes:
        elements = kilobytes * 256
        everyones = [np.random.default_rng(r).standard_normal(elements, np.float32) for r in range(hvd.size())]
        exact, x = np.mean(everyones, axis=0, dtype=np.float64), tf.constant(everyones[hvd.rank()])
        del everyones
        reduces = {
            name: tf.function(lambda x, c=compression: hvd.allreduce(x, compression=c))
            for name, compression in zip(NAMES, compressions)
        }
        row = {"kilobytes": kilobytes, "error": {}, "bytes": {}, "seconds": {name: [] for name in NAMES}}
        for name, reduce in reduces.items():
            reduce(x)  # traces
            barrier(hvd, tf)
            before = namespaces.bytes_through_card()
            mean = reduce(x)
            barrier(hvd, tf)
            row["bytes"][name] = namespaces.bytes_through_card() - before
            row["error"][name] = float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))
        for _ in range(args.rounds * (4 if kilobytes <= 4096 else 1)):
            for name, reduce in reduces.items():
                barrier(hvd, tf)
                start = time.perf_counter()
                reduce(x)
                row["seconds"][name].append(time.perf_counter() - start)
        table.append(row)
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(table))


def barrier(hvd, tf) -> None:
    hvd.allreduce(tf.zeros([]), name="barrier")


def measure(ranks: int, backend: str, gbit: float, args: argparse.Namespace) -> list[dict]:
    """The rows of one network."""
    sizes = [k for k in args.kilobytes if not gbit or 2 * (ranks - 1) / ranks * k * 8192 / gbit / 1e9 <= SECONDS]
    with tempfile.TemporaryDirectory() as folder, namespaces.hosts(ranks, gbit or None) as hosts:
        result = pathlib.Path(folder, "result.json")
        command = [__file__, "--worker", f"--json={result}", f"--rounds={args.rounds}", "--kilobytes", *map(str, sizes)]
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        done = hosts.run([1] * ranks, command, backend=backend, timeout=args.timeout, env={"PYTHONPATH": path})
        if done.returncode:
            sys.exit(f"{ranks} ranks over {backend} failed:\n{done.stdout}")
        rows = json.loads(result.read_text())
    for row in rows:
        seconds = row.pop("seconds")
        row["median_seconds"] = {name: float(np.median(all_of)) for name, all_of in seconds.items()}
        row["least_seconds"] = {name: min(all_of) for name, all_of in seconds.items()}
    return [{"ranks": ranks, "backend": backend, "gbit": gbit, **row} for row in rows]


def print_rows(rows: list[dict]) -> None:
    first = rows[0]
    link = f"{first['gbit']:g} Gbit/s" if first["gbit"] else "no limit"
    print(f"\n{first['ranks']} hosts of one rank, {first['backend']}, {link}")
    print(f"{'':>8}{'milliseconds':>27}{'8 bits, times as fast as':>29}")
    print("".join(f"{head:>9}" for head in ("MB", *NAMES, *NAMES[:2], "bytes", "error")))
    for row in rows:
        ms = [1e3 * row["median_seconds"][name] for name in NAMES]
        ratio = row["bytes"]["8 bits"] / row["bytes"]["float32"]
        figures = [f"{row['kilobytes'] / 1024:.4g}", *[f"{t:.2f}" for t in (*ms, ms[0] / ms[2], ms[1] / ms[2])]]
        figures += [f"{ratio:.3f}", f"{row['error']['8 bits']:.4f}"]
        print("".join(f"{figure:>9}" for figure in figures), flush=True)


def plot(rows: list[dict], file: pathlib.Path) -> None:
    """How many times as fast as float32 over the size, a panel for each rate."""
    from hvd_eightbit.speedup.plotting import pyplot as matplotlibs

    pyplot = matplotlibs()
    rates = sorted({row["gbit"] for row in rows}, key=lambda gbit: gbit or 1e9)
    figure, panels = pyplot.subplots(1, len(rates), figsize=(4 * len(rates), 4), sharey=True, squeeze=False)
    for panel, gbit in zip(panels[0], rates):
        panel.set_title(f"{gbit:g} Gbit/s" if gbit else "no limit")
        for key in sorted({(row["ranks"], row["backend"]) for row in rows}):
            own = [row for row in rows if (row["ranks"], row["backend"], row["gbit"]) == (*key, gbit)]
            for name, style in (("8 bits", "-"), ("float16", ":")):
                faster = [row["median_seconds"]["float32"] / row["median_seconds"][name] for row in own]
                megabytes = [row["kilobytes"] / 1024 for row in own]
                panel.plot(megabytes, faster, style, label=f"{name}, {key[0]} ranks, {key[1]}")
        panel.axhline(1, color="gray", linewidth=0.5)
        panel.set_xscale("log")
        panel.set_xlabel("MB of float32")
    panels[0][0].set_ylabel("times as fast as float32")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="hosts, %(default)s by default")
    parser.add_argument("--backends", nargs="+", choices=("gloo", "mpi"), default=["gloo"], help="gloo by default")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1, 10, 0], help="%(default)s by default")
    parser.add_argument("--kilobytes", type=int, nargs="+", default=KILOBYTES, help="%(default)s by default")
    parser.add_argument("--rounds", type=int, default=5, help="of large tensors; small ones have four times as many")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for a network, %(default)s by default")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there as well")
    parser.add_argument("--plot", type=pathlib.Path, help="draw a figure; needs matplotlib")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    problem = namespaces.why_not()
    if problem:
        parser.error(problem)
    load, rows = os.getloadavg()[0], []
    for ranks in args.ranks:
        for backend in args.backends:
            for gbit in args.gbit:
                own = measure(ranks, backend, gbit, args)
                print_rows(own)
                rows += own
    facts = {"cpus": os.cpu_count(), "load_before": load, "rounds": args.rounds, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return None


if __name__ == "__main__":
    main()
