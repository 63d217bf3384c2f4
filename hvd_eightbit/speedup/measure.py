"""Calibrates the model on the user's own ranks: `horovodrun -np N hvd-eightbit predict --measure FILE`.

Each collective and kernel is timed at three sizes, and seconds = fixed + slope * size fitted. Slopes give bandwidths
and rates, the fixed parts the cost of a call and the latency of a message. Reductions at sizes in between, not used in
the fit, are then predicted and measured, so that the file says itself how far it can be trusted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_eightbit import collectives, ops, wire
from hvd_eightbit.data_types import DYNAMIC_TREE
from hvd_eightbit.speedup.calibration import Calibration
from hvd_eightbit.speedup.model import METHODS, Cluster, Efficiency, Kernels, Link, allreduce_seconds

SIZES = (1 << 16, 1 << 20, 1 << 23)  # elements
CHECKS = (1 << 18, 1 << 21, 1 << 22)
LEAST_REPEATS, MOST_REPEATS, BUDGET = 3, 10, 2.0  # times that a call is repeated, within so many seconds
_ABSORBED = 1e18  # elements a second: adding floats is part of the measured bandwidth of an allreduce


def seconds(call: Callable[..., object], *arguments: object) -> float:
    """The least time of `call(*arguments)`, which all ranks make together, until the slowest has it; the same on all.

    The least of several: what else runs on the machine can only add to it.
    """

    def once() -> float:
        hvd.allreduce(tf.zeros(1))  # all ranks begin together
        begin = time.perf_counter()
        result = call(*arguments)
        tf.nest.map_structure(lambda t: t.numpy(), result)  # waits for the device
        took = time.perf_counter() - begin
        return float(hvd.allgather(tf.constant([took], tf.float64)).numpy().max())

    first = once()  # sets up connections and buffers; equal on all ranks, so that all repeat as often
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(BUDGET / first)))
    return min(once() for _ in range(repeats))


def fit(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(fixed, slope), neither negative, that fit times = fixed + slope * size with the least relative error.

    Where small sizes take less than their share (buffers on the way let them through, caches hold them), fixed is
    0 and the slope that of the largest size.
    """
    sizes, times = np.asarray(sizes, float), np.asarray(times, float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    fixed, slope = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, times[-1] / sizes[-1]
    if slope <= 0:
        raise ValueError(
            f"times {times.tolist()} do not grow with the sizes {sizes.tolist()}: measure on an idle machine"
        )
    return float(fixed), float(slope)


def _vector(elements: int) -> tf.Tensor:
    return tf.random.stateless_normal([elements], [hvd.rank(), elements])


def _scaled_mean(x: tf.Tensor) -> list[tf.Tensor]:
    one = tf.constant(1.0)
    return collectives.scaled_mean([x], one, DYNAMIC_TREE, wire.DEFAULT_BLOCK_SIZE, hvd.global_process_set, None)


def _reduction(method: str, x: tf.Tensor) -> object:
    if method == "float32":
        return hvd.allreduce(x, op=hvd.Sum)
    if method == "fp16":
        return hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    return _scaled_mean(x)


def kernels() -> Kernels:
    """Rates of this rank's kernels, all ranks running them at once."""
    ranks, rank = hvd.size(), hvd.rank()
    codec = (DYNAMIC_TREE, wire.DEFAULT_BLOCK_SIZE)
    packs, unpacks, casts = [], [], []
    for elements in SIZES:
        x = _vector(elements)
        packs.append(seconds(ops.pack, [x], ranks, rank, *codec))
        gathered = tf.zeros([ranks, wire.layout([elements], ranks, codec[1]).chunk_bytes], tf.uint8)
        unpacks.append(seconds(ops.unpack, gathered, [x], tf.constant(1.0), *codec))
        casts.append(seconds(tf.cast, x, tf.float16))
    (launch, pack), (_, unpack), (_, cast) = (fit(SIZES, times) for times in (packs, unpacks, casts))
    return Kernels((ranks - 1) / ranks / pack, 1 / unpack, 1 / cast, _ABSORBED, _ABSORBED, launch)


def cluster() -> Cluster:
    """Links between these ranks: between hosts if there are several, else within the one.

    Raises:
        ValueError: with one rank, or with hosts that have different numbers of ranks.
    """
    ranks, per_node = hvd.size(), hvd.local_size()
    if ranks == 1:
        raise ValueError("one rank has nobody to talk to: run `horovodrun -np N hvd-eightbit predict --measure FILE`")
    if not hvd.is_homogeneous():
        raise ValueError("the hosts have different numbers of ranks: the model wants the same on each")
    nodes, others = ranks // per_node, ranks - 1
    vectors = {n: _vector(n) for n in SIZES}
    halves = {n: tf.cast(v, tf.float16) for n, v in vectors.items()}
    codes = {n: tf.zeros([ranks, n // ranks // 16 * 16], tf.uint8) for n in SIZES}
    own = {n: codes[n][0] for n in SIZES}
    here, everyone = collectives.world(hvd.global_process_set), hvd.global_process_set
    calls = {
        "allreduce_float32": (functools.partial(hvd.allreduce, op=hvd.Sum), vectors),
        "allreduce_fp16": (functools.partial(hvd.allreduce, op=hvd.Sum), halves),
        "alltoall": (lambda x: collectives._alltoall(x, here, everyone, None), codes),
        "allgather": (lambda x: collectives._allgather(x, here, everyone, None), own),
    }
    # bytes through the slowest link for an element, and messages one after another
    across = others if nodes == 1 else per_node * (ranks - per_node)
    load = {
        "allreduce_float32": (8 * others / ranks, 2 * others),
        "allreduce_fp16": (4 * others / ranks, 2 * others),
        "alltoall": (across / ranks, others),
        "allgather": (others / ranks, others),
    }
    fits = {name: fit(SIZES, [seconds(call, inputs[n]) for n in SIZES]) for name, (call, inputs) in calls.items()}
    reached = {name: load[name][0] / slope for name, (_, slope) in fits.items()}
    bandwidth = max(reached.values())
    share = {name: value / bandwidth for name, value in reached.items()}
    fixed, messages = [f for f, _ in fits.values()], [load[name][1] for name in fits]
    call, latency = np.linalg.lstsq(np.stack([np.ones(4), messages], axis=1), fixed, rcond=None)[0]
    if latency < 0 or call < 0:
        call, latency = (
            (float(np.mean(fixed)), 0.0) if latency < 0 else (0.0, float(np.mean(fixed) / np.mean(messages)))
        )
    link = Link(float(bandwidth), float(latency))
    return Cluster(
        nodes=nodes,
        ranks_per_node=per_node,
        between=link,
        within=link,
        call=float(call),
        efficiency=Efficiency(**share, reducescatter=share["allreduce_float32"]),
        allreduce="ring",
    )


def checks(found: Calibration) -> list[dict]:
    """Reductions that the fit did not see: [{"method", "elements", "measured", "predicted"}], seconds."""
    rows = []
    for method in [m for m in METHODS if m in ("float32", "fp16", "flat")]:
        for elements in CHECKS:
            x = _vector(elements)
            measured = seconds(_reduction, method, x)
            predicted = allreduce_seconds(found.cluster, found.kernels, elements, method)
            rows.append({"method": method, "elements": elements, "measured": measured, "predicted": predicted})
    return rows


def _report(found: Calibration, rows: Sequence[dict], file: str) -> str:
    c, k = found.cluster, found.kernels
    shares = ", ".join(f"{name} {100 * v:.0f}%" for name, v in dataclasses.asdict(c.efficiency).items())
    lines = [
        f"{c.ranks} ranks on {c.nodes} hosts: {8e-9 * c.within.bandwidth:.3g} Gbit/s, "
        f"{1e6 * c.within.latency:.3g} us a message, {1e6 * c.call:.3g} us a call; of that bandwidth {shares}",
        f"a rank quantizes {1e-9 * k.quantize:.3g} and dequantizes {1e-9 * k.dequantize:.3g} G elements/s",
        f"{'reduction':<10}{'elements':>10}{'measured ms':>13}{'predicted ms':>14}{'ratio':>8}",
    ]
    for r in rows:
        ratio = r["predicted"] / r["measured"]
        columns = f"{1e3 * r['measured']:13.3f}{1e3 * r['predicted']:14.3f}{ratio:8.2f}"
        lines.append(f"{r['method']:<10}{r['elements']:>10}{columns}")
    if c.nodes > 1 and c.ranks_per_node > 1:
        lines.append("links within a host were not told apart: run on one host and give --within-bandwidth")
    return "\n".join([*lines, f"written to {file}: hvd-eightbit predict --calibration {file}"])


def run(file: str | pathlib.Path) -> int:
    """Measures on all ranks; rank 0 writes the file and prints what was found. Returns the exit status.

    Raises:
        ValueError: with one rank, hosts of different numbers of ranks, or times that make no sense.
        ImportError: if the ops are not built.
    """
    ops.library()
    hvd.init()
    found = Calibration(cluster(), kernels())
    rows = checks(found)
    if hvd.rank() == 0:
        content = {**found.to_json(), "checks": rows}
        pathlib.Path(file).write_text(json.dumps(content, indent=2) + "\n")
        print(_report(found, rows, str(file)))
    return 0
