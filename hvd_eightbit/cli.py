"""The command line: `hvd-eightbit info | errors | predict`.

`predict --measure` needs TensorFlow and Horovod, reading a Keras model TensorFlow, --plot matplotlib; `info` says what
is wrong with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence

from hvd_eightbit import __version__, data_types, wire
from hvd_eightbit.speedup import calibration, errors, model, models, paper, plotting

GBIT = 1e9 / 8
DEFAULTS = {"nodes": 4, "ranks_per_node": 1, "bandwidth": 10.0, "latency": 20.0}
WITHIN = {"bandwidth": 100.0, "latency": 5.0}

_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "keras", "tf-keras", "horovod", "numpy", "matplotlib")
_HOROVOD = """
import json
import horovod.tensorflow as hvd
print(json.dumps({name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl", "cuda", "rocm")}))
"""
_OPS = """
import json
from hvd_eightbit import ops
from tensorflow.python.framework import kernels
names = sorted(n for n in dir(ops.library()) if n.startswith("eight_bit_") and not n.endswith("_eager_fallback"))
devices = {k.device_type for k in kernels.get_registered_kernels_for_op("EightBitQuantize").kernel}
print(json.dumps({"ops": names, "devices": sorted(devices)}))
"""
_INSTALL_HOROVOD = (
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps horovod"
)


def _block_size(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return wire.check_block_size(int(text))
    except ValueError as error:
        message = f"{text!r}: an integer, or all for one block" if not text.lstrip("-").isdigit() else str(error)
        raise argparse.ArgumentTypeError(message) from None


def _number(kind: type, low: float, wanted: str):
    """An argparse type: a finite number above `low`; the message of anything else says what is wanted."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > low and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


_count = _number(int, 0, "an integer of at least 1")
_whole = _number(int, -1, "an integer of at least 0")
_positive = _number(float, 0, "a positive number")
_not_negative = _number(float, -1e-300, "a number of at least 0")


def _probe(code: str) -> dict:
    """What a Python program prints as JSON, or {"error": its last line}: a process of its own, so that it may crash."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with status {done.returncode}"}


def info() -> dict:
    """What is installed, what the op library was built for, what works, and how to mend what does not.

    Returns:
        {"versions": {name: version or None}, "build": dict or None, "horovod": {backend: built} or {"error": ...},
        "ops": {"ops": names, "devices": names} or {"error": ...}, "problems": [sentences]}.
    """
    versions = {"hvd_eightbit": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    build_file = pathlib.Path(__file__).with_name("_build.json")
    try:
        build = json.loads(build_file.read_text())
    except (OSError, ValueError):
        build = None
    problems = []
    has_tensorflow = bool(versions["tensorflow"] or versions["tensorflow-cpu"])
    if not has_tensorflow:
        problems.append("TensorFlow is not installed: pip install tensorflow, before Horovod and hvd-eightbit")
    missing = {"error": "not installed"}
    horovod = _probe(_HOROVOD) if versions["horovod"] and has_tensorflow else missing
    if "error" in horovod:
        problems.append(f"Horovod does not work ({horovod['error']}): {_INSTALL_HOROVOD}")
    elif not (horovod["mpi"] or horovod["gloo"]):
        problems.append(f"Horovod was built without MPI and without Gloo: {_INSTALL_HOROVOD}")
    ops = _probe(_OPS) if has_tensorflow and versions["horovod"] else {"error": "TensorFlow and Horovod come first"}
    if build is None:
        problems.append(
            f"{build_file.name} is missing or not readable: pip install . in the source folder builds the ops"
        )
    if "error" in ops:
        problems.append(f"the ops do not load: {ops['error']}")
    elif "GPU" in ops["devices"] and "error" not in horovod and not horovod["nccl"]:
        problems.append(
            "the ops run on GPUs, but Horovod was built without NCCL: HOROVOD_GPU_OPERATIONS=NCCL, then build it"
        )
    return {"versions": versions, "build": build, "horovod": horovod, "ops": ops, "problems": problems}


def _run_info(options: argparse.Namespace) -> int:
    found = info()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, version in found["versions"].items():
        print(f"{name:<16}{version or 'not installed'}")
    build = found["build"]
    print(f"{'built for':<16}{', '.join(f'{k} {v}' for k, v in build.items()) if build else 'nothing'}")
    horovod = found["horovod"]
    backends = ", ".join(name for name, built in horovod.items() if built) or "none"
    print(f"{'Horovod has':<16}{'does not load' if 'error' in horovod else backends}")
    ops = found["ops"]
    loaded = "" if "error" in ops else f"{', '.join(ops['ops'])} on {', '.join(ops['devices'])}"
    print(f"{'ops':<16}{loaded or 'do not load'}")
    for problem in found["problems"]:
        print(f"! {problem}")
    if not found["problems"]:
        print("all is well")
    return 0


def _run_errors(options: argparse.Namespace) -> int:
    if options.plot:
        plotting.pyplot()
    if options.paper:
        options.rounding, options.normalization, options.block_size = "paper", "paper", None
    chosen = options.distribution or ([] if options.file else errors.PAPER_DISTRIBUTIONS)
    data = [(name, lambda name=name: errors.sample(name, options.samples, options.seed)) for name in chosen]
    data += [(pathlib.Path(file).name, lambda file=file: errors.load(file)) for file in options.file or []]
    rows = []
    for name, draw in data:
        x = draw()
        for data_type in options.data_type or data_types.DATA_TYPES:
            rows.append(errors.measure(x, name, data_type, options.block_size, options.rounding, options.normalization))
    if options.json:
        listed = [dataclasses.asdict(row) for row in rows]
        print(json.dumps([{k: None if v != v else v for k, v in row.items()} for row in listed], indent=2))
    else:
        print(errors.table(rows))
    if options.plot:
        errors.plot(rows, options.plot)
    return 0


def _network(name: str) -> models.Network:
    """A preset, or the Keras model in a file."""
    if name in models.PRESETS or not (pathlib.Path(name).suffix or pathlib.Path(name).exists()):
        return models.preset(name)
    if not pathlib.Path(name).exists():
        raise ValueError(f"model={name!r}: no such file; or use one of {', '.join(models.PRESETS)}")
    try:
        from tensorflow import keras
    except ImportError as error:
        raise ImportError(f"model={name!r} can be read only with TensorFlow: {error}") from None
    try:
        return models.from_keras(keras.models.load_model(name, compile=False))
    except (OSError, TypeError, AttributeError) as error:
        raise ValueError(f"model={name!r} cannot be read as a Keras model: {error}") from None


def _setting(options: argparse.Namespace) -> model.Setting:
    """The Setting that the options describe, on top of a calibration if there is one."""
    calibrated = calibration.load(options.calibration) if options.calibration else None
    base = calibrated.cluster if calibrated else None

    def link(base: model.Link | None, bandwidth: float | None, latency: float | None, default: dict) -> model.Link:
        if base is None:
            base = model.Link(default["bandwidth"] * GBIT, default["latency"] * 1e-6)
        changed = {} if bandwidth is None else {"bandwidth": bandwidth * GBIT}
        changed |= {} if latency is None else {"latency": latency * 1e-6}
        return dataclasses.replace(base, **changed)

    def number(given: int | None, base: int | None, default: int) -> int:
        return given if given is not None else default if base is None else base

    cluster = model.Cluster(
        nodes=number(options.nodes, base and base.nodes, DEFAULTS["nodes"]),
        ranks_per_node=number(options.ranks_per_node, base and base.ranks_per_node, DEFAULTS["ranks_per_node"]),
        between=link(base and base.between, options.bandwidth, options.latency, DEFAULTS),
        within=link(base and base.within, options.within_bandwidth, options.within_latency, WITHIN),
    )
    if base:
        cluster = dataclasses.replace(cluster, call=base.call, efficiency=base.efficiency, allreduce=base.allreduce)
    if options.call is not None:
        cluster = dataclasses.replace(cluster, call=options.call * 1e-6)
    kernels = calibrated.kernels if calibrated and options.kernels is None else model.KERNELS[options.kernels or "gpu"]
    return model.Setting(
        network=_network(options.model),
        cluster=cluster,
        kernels=kernels,
        flops=options.tflops * 1e12,
        batch=options.batch,
        compute_seconds=None if options.compute_ms is None else options.compute_ms * 1e-3,
        block_size=options.block_size,
        min_elements=options.min_elements,
        groups=options.groups,
        overlap=not options.no_overlap,
        kernels_overlap=options.kernels_overlap,
    )


def _describe(setting: model.Setting) -> str:
    c, network = setting.cluster, setting.network
    lines = [
        f"{network.name}: {network.parameters:,} parameters, batch {setting.batch} a rank, "
        f"forward and backward pass {3e3 * setting.forward_seconds:.4g} ms",
        f"{c.ranks} ranks on {c.nodes} hosts",
    ]
    if c.nodes > 1:
        lines[1] += f"; a host's card {c.between.bandwidth / GBIT:.4g} Gbit/s, {c.between.latency * 1e6:.3g} us"
    if c.ranks_per_node > 1:
        lines[1] += f"; within a host {c.within.bandwidth / GBIT:.4g} Gbit/s, {c.within.latency * 1e6:.3g} us"
    return "\n".join(lines)


def _predictions_table(predictions: Sequence[model.Prediction]) -> str:
    heads = ("method", "step", "compute", "exposed", "network", "coding", "a rank sends", "a host sends")
    lines = [f"{heads[0]:<11}" + "".join(f"{h:>10}" for h in heads[1:6]) + "".join(f"{h:>15}" for h in heads[6:])]
    for p in predictions:
        times = "".join(f"{1e3 * t:10.2f}" for t in (p.step, p.compute, p.exposed, p.network, p.kernels))
        lines.append(f"{p.method:<11}{times}{p.rank_bytes / 1e6:12.1f} MB{p.host_bytes / 1e6:12.1f} MB")
    return "\n".join([*lines, "times in ms; network and coding include what computation hides"])


def _break_even(setting: model.Setting, algorithm: str) -> dict:
    bandwidth, nodes = model.break_even_bandwidth(setting, algorithm), model.break_even_nodes(setting, algorithm)
    return {"bandwidth_gbit": None if bandwidth is None else bandwidth / GBIT, "nodes": nodes}


def _break_even_text(found: dict, setting: model.Setting) -> str:
    where = "between hosts" if setting.cluster.nodes > 1 else "within the host"
    bandwidth, nodes = found["bandwidth_gbit"], found["nodes"]
    lines = [
        f"8 bits pay up to {bandwidth:.3g} Gbit/s {where}" if bandwidth else f"8 bits pay at no bandwidth {where}",
        f"8 bits pay from {nodes[0]} to {nodes[1]} hosts"
        if nodes
        else "8 bits pay for no number of hosts at this bandwidth",
    ]
    return "\n".join(lines)


def _plot_predictions(setting: model.Setting, file: str) -> None:
    """Step time over bandwidth and over the number of hosts."""
    figure, axes = plotting.pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    bandwidths = [10 ** (i / 8) for i in range(-8, 25)]
    nodes = [2**i for i in range(15)]
    for axis, values, change, label in (
        (axes[0], bandwidths, lambda v: model.with_bandwidth(setting, v * GBIT), "bandwidth, Gbit/s"),
        (axes[1], nodes, lambda v: model.with_nodes(setting, v), "hosts"),
    ):
        for method in [p.method for p in model.predict_all(setting)]:
            axis.loglog(values, [1e3 * model.predict(change(v), method).step for v in values], label=method)
        axis.set_xlabel(label)
    axes[0].set_ylabel("step, ms")
    axes[0].legend()
    figure.suptitle(f"{setting.network.name}: {setting.cluster.ranks} ranks on {setting.cluster.nodes} hosts")
    figure.savefig(file)


def _run_predict(options: argparse.Namespace) -> int:
    if options.measure:
        from hvd_eightbit.speedup import measure

        return measure.run(options.measure)
    if options.plot:
        plotting.pyplot()
    if options.paper:
        print(paper.report())
        return 0
    setting = _setting(options)
    is_model_parallel = options.parallelism == "model"
    if is_model_parallel and (options.plot or options.algorithm != "flat"):
        raise ValueError("--parallelism model goes without --plot, and with --algorithm flat only")
    if options.sub_batch is not None and not is_model_parallel:
        raise ValueError("--sub-batch is for --parallelism model")
    predictions = model.predict_all(setting, options.sub_batch, is_model_parallel)
    algorithm = options.algorithm
    if algorithm == "two_level" and algorithm not in {p.method for p in predictions}:
        raise ValueError("--algorithm two_level needs several hosts, with several ranks on each")
    verdict = model.verdict(predictions, algorithm)
    found = None if is_model_parallel else _break_even(setting, algorithm)
    if options.json:
        result = {
            "setting": {
                "model": setting.network.name,
                "parameters": setting.network.parameters,
                "cluster": dataclasses.asdict(setting.cluster),
                "kernels": dataclasses.asdict(setting.kernels),
                "batch": setting.batch,
                "compute_seconds": 3 * setting.forward_seconds,
            },
            "predictions": [dataclasses.asdict(p) for p in predictions],
            "verdict": dataclasses.asdict(verdict),
            "break_even": found,
        }
        print(json.dumps(result, indent=2))
    else:
        print(_describe(setting), _predictions_table(predictions), sep="\n\n", end="\n\n")
        if found:
            print(_break_even_text(found, setting))
        print(verdict.text)
        better = min(predictions, key=lambda p: p.step)
        if better.method in model.ALGORITHMS and better.method != algorithm:
            print(f"(--algorithm {better.method}: {model.verdict(predictions, better.method).text})")
    if options.plot:
        _plot_predictions(setting, options.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    top = argparse.ArgumentParser("hvd-eightbit", description="8-bit communication for TensorFlow on Horovod.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)

    p = commands.add_parser("info", help="what is installed, what works, and how to mend what does not")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=_run_info)

    p = commands.add_parser("errors", help="approximation errors of the data types (the paper's table 2)")
    p.add_argument(
        "--data-type", action="append", choices=list(data_types.DATA_TYPES), help="may be repeated; default: all"
    )
    p.add_argument(
        "--distribution",
        action="append",
        metavar="NAME:A,B",
        help="uniform:LOW,HIGH or normal:MEAN,DEVIATION; may be repeated; default: the paper's four",
    )
    p.add_argument("--file", action="append", metavar="FILE.npy", help="numbers of your own; may be repeated")
    p.add_argument("--block-size", type=_block_size, default=wire.DEFAULT_BLOCK_SIZE, metavar="N|all")
    p.add_argument("--samples", type=_count, default=errors.DEFAULT_SAMPLES, help="numbers drawn (default %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rounding", choices=errors.ROUNDINGS, default="nearest")
    p.add_argument("--normalization", choices=errors.NORMALIZATIONS, default="absmax")
    p.add_argument("--paper", action="store_true", help="as the paper's kernel: its rounding, normalization, one block")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--plot", metavar="FILE", help="draw the errors (needs matplotlib)")
    p.set_defaults(run=_run_errors)

    p = commands.add_parser("predict", help="whether 8 bits pay: the time of a training step on given hardware")
    p.add_argument("--model", default="resnet50", help=f"{', '.join(models.PRESETS)}, or the file of a Keras model")
    p.add_argument("--nodes", type=_count, help=f"hosts (default {DEFAULTS['nodes']})")
    p.add_argument("--ranks-per-node", type=_count, help=f"ranks on each (default {DEFAULTS['ranks_per_node']})")
    p.add_argument(
        "--bandwidth", type=_positive, help=f"Gbit/s of a host's network card (default {DEFAULTS['bandwidth']:g})"
    )
    p.add_argument(
        "--latency", type=_not_negative, help=f"us of a message between hosts (default {DEFAULTS['latency']:g})"
    )
    p.add_argument(
        "--within-bandwidth", type=_positive, help=f"Gbit/s of a rank in its host (default {WITHIN['bandwidth']:g})"
    )
    p.add_argument("--within-latency", type=_not_negative, help=f"us within a host (default {WITHIN['latency']:g})")
    p.add_argument("--call", type=_not_negative, help="us that a collective costs whatever its size (default 500)")
    p.add_argument("--kernels", choices=list(model.KERNELS), help="coding rates (default gpu, or the calibration's)")
    p.add_argument("--tflops", type=_positive, default=20.0, help="reached by a rank in training (default %(default)s)")
    p.add_argument("--compute-ms", type=_positive, help="measured forward and backward pass; instead of --tflops")
    p.add_argument("--batch", type=_count, default=32, help="samples of a rank in a step (default %(default)s)")
    p.add_argument("--block-size", type=_block_size, default=wire.DEFAULT_BLOCK_SIZE, metavar="N|all")
    p.add_argument(
        "--min-elements", type=_whole, default=model.DEFAULT_MIN_ELEMENTS, help="smaller tensors stay float32"
    )
    p.add_argument("--groups", type=_count, help="Horovod's num_groups (default: an exchange for each tensor)")
    p.add_argument("--no-overlap", action="store_true", help="exchange only after the backward pass")
    p.add_argument("--kernels-overlap", action="store_true", help="coding does not delay the backward pass")
    p.add_argument("--algorithm", choices=model.ALGORITHMS, default="flat", help="that the verdict is about")
    p.add_argument("--parallelism", choices=("data", "model"), default="data", help="of fully connected layers")
    p.add_argument("--sub-batch", type=_count, help="samples of all ranks that pass at a time in model parallelism")
    p.add_argument("--measure", metavar="FILE", help="under horovodrun: measure kernels and links, write them to FILE")
    p.add_argument("--calibration", metavar="FILE", help="what --measure wrote")
    p.add_argument("--paper", action="store_true", help="the paper's predictions, and what is left of them")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--plot", metavar="FILE", help="draw step times over bandwidth and hosts (needs matplotlib)")
    p.set_defaults(run=_run_predict)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 2 for what cannot be done, with the reason on standard error."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, TypeError, ImportError) as error:
        print(f"hvd-eightbit {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
