"""The five kernels on the CPU, beside plain TensorFlow ops, NumPy and bitsandbytes doing the same, in copies.

    python benchmarks/kernels.py [--elements 16777216] [--threads 1 2] [--json FILE]

A figure is the time of a kernel divided by that of copying its tensor in the same run and with as many threads: for
reduce, by that of copying its inputs as float32. All times are the best of --rounds, in which everything takes turns,
so that what else the machine does meets all alike. Memory is used again from call to call (see ENVIRONMENT): page
faults are not what is measured here. Each number of threads has a process of its own, as TensorFlow's is set once.

bitsandbytes is left out where it or PyTorch cannot be imported; --bitsandbytes names another Python that has both.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hvd_eightbit import data_types, reference, wire  # noqa: E402

# The C library gives memory of large tensors back to the system, to be faulted in again by the next call.
ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "TF_CPP_MIN_LOG_LEVEL": "3"}
KERNELS = ["quantize", "dequantize", "pack", "reduce", "unpack"]
REFERENCE_ELEMENTS = 2**20  # NumPy's time grows with their number, and would be most of the run


def cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} CPUs" if names else "unknown CPU"


def copy_in_threads(target: np.ndarray, source: np.ndarray, threads: int) -> None:
    """Each thread copies its part; NumPy releases Python's lock meanwhile."""
    bounds = np.linspace(0, source.size, threads + 1).astype(int)
    parts = [slice(a, b) for a, b in zip(bounds, bounds[1:])]
    workers = [threading.Thread(target=np.copyto, args=(target[p], source[p])) for p in parts[1:]]
    for worker in workers:
        worker.start()
    np.copyto(target[parts[0]], source[parts[0]])
    for worker in workers:
        worker.join()


def best_seconds(functions: dict, rounds: int) -> dict:
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds + 1):  # the first is for tracing, and does not count for much
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def plain_tensorflow(data_type, block_size: int):
    """quantize, dequantize and reduce as they can be written without this package; of whole blocks."""
    import tensorflow as tf

    values, midpoints = tf.constant(data_type.values), tf.constant(data_type.midpoints)

    def quantize(x):
        blocks = tf.reshape(x, [-1, block_size])
        absmax = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True)
        codes = tf.searchsorted(midpoints, tf.reshape(tf.math.divide_no_nan(blocks, absmax), [-1]))
        return tf.cast(codes, tf.uint8), absmax

    def dequantize(codes, absmax):
        blocks = tf.reshape(tf.gather(values, tf.cast(codes, tf.int32)), [-1, block_size])
        return tf.reshape(blocks * absmax, [-1])

    def reduce(own, received):
        total = tf.add_n([own] + [dequantize(codes, absmax) for codes, absmax in received])
        return quantize(total / (1 + len(received)))

    return tf.function(quantize), tf.function(dequantize), tf.function(reduce)


def measure_bitsandbytes(args: argparse.Namespace) -> dict:
    """In a process that needs neither TensorFlow nor this package's ops."""
    import bitsandbytes
    import torch
    from bitsandbytes import functional

    torch.set_num_threads(args.threads[0])
    data_type, x = data_types.get(args.data_type), numbers(args.elements)
    y, tensor, table = np.empty_like(x), torch.from_numpy(x), torch.from_numpy(data_type.values.copy())
    codes, state = functional.quantize_blockwise(tensor, code=table, blocksize=args.block_size)
    best = best_seconds(
        {
            "copy": lambda: copy_in_threads(y, x, args.threads[0]),
            "quantize": lambda: functional.quantize_blockwise(tensor, code=table, blocksize=args.block_size),
            "dequantize": lambda: functional.dequantize_blockwise(codes, state),
        },
        args.rounds,
    )
    few = min(args.elements, REFERENCE_ELEMENTS)
    expected, _ = reference.quantize(x[:few], data_type, args.block_size)
    return {
        "version": bitsandbytes.__version__,
        "torch": torch.__version__,
        "codes_other_than_reference": float(np.mean(codes.numpy().ravel()[:few] != expected)),
        "copy": best["copy"] / args.elements * 1e9,
        "copies": {name: best[name] / best["copy"] for name in ("quantize", "dequantize")},
    }


def numbers(elements: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(elements, np.float32)


def measure(args: argparse.Namespace) -> dict:
    """All but bitsandbytes, in a process whose number of threads is args.threads[0]."""
    import tensorflow as tf

    from hvd_eightbit import ops

    threads, ranks, block_size = args.threads[0], args.ranks, args.block_size
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    data_type, host = data_types.get(args.data_type), numbers(args.elements)
    x, target = tf.constant(host), np.empty_like(host)
    few = host[:REFERENCE_ELEMENTS]

    codes, absmax = ops.quantize(x, data_type, block_size)
    messages = ops.pack([x], ranks, 0, data_type, block_size)
    received = tf.tile(messages[1:2], [ranks, 1])
    message = ops.reduce(received, [x], 0, data_type, block_size)
    gathered = tf.tile(message[None], [ranks, 1])
    chunk = wire.layout([args.elements], ranks, block_size).chunk_elements

    # Nothing is compared that is not the same.
    expected = reference.quantize(few, data_type, block_size)
    for actual, e in zip((codes, absmax), expected):
        np.testing.assert_array_equal(actual.numpy()[: e.size], e)
    np.testing.assert_array_equal(
        ops.reduce(received, [x], 0, data_type, block_size).numpy(),
        reference.reduce(received.numpy(), [host], 0, data_type, block_size),
    )
    plain_quantize, plain_dequantize, plain_reduce = plain_tensorflow(data_type, block_size)
    plain_codes, plain_absmax = plain_quantize(x)
    others = [(plain_codes[chunk : 2 * chunk], plain_absmax[chunk // block_size : 2 * chunk // block_size])]
    few_codes, few_absmax = expected
    few_messages = reference.pack([few], ranks, 0, data_type, block_size)
    few_received = np.tile(few_messages[1:2], (ranks, 1))
    few_gathered = np.tile(reference.reduce(few_received, [few], 0, data_type, block_size), (ranks, 1))

    # (what, kernel): (function, number of elements whose copying it is compared with)
    n, f = args.elements, few.size
    work = {
        ("hvd_eightbit", "quantize"): (lambda: ops.quantize(x, data_type, block_size), n),
        ("hvd_eightbit", "dequantize"): (lambda: ops.dequantize(codes, absmax, data_type, block_size), n),
        ("hvd_eightbit", "pack"): (lambda: ops.pack([x], ranks, 0, data_type, block_size), n),
        ("hvd_eightbit", "reduce"): (lambda: ops.reduce(received, [x], 0, data_type, block_size), ranks * chunk),
        ("hvd_eightbit", "unpack"): (lambda: ops.unpack(gathered, [x], 1.0, data_type, block_size), n),
        ("TensorFlow ops", "quantize"): (lambda: plain_quantize(x), n),
        ("TensorFlow ops", "dequantize"): (lambda: plain_dequantize(plain_codes, plain_absmax), n),
        ("TensorFlow ops", "reduce"): (lambda: plain_reduce(x[:chunk], others * (ranks - 1)), ranks * chunk),
        ("NumPy", "quantize"): (lambda: reference.quantize(few, data_type, block_size), f),
        ("NumPy", "dequantize"): (lambda: reference.dequantize(few_codes, few_absmax, data_type, block_size), f),
        ("NumPy", "pack"): (lambda: reference.pack([few], ranks, 0, data_type, block_size), f),
        ("NumPy", "reduce"): (lambda: reference.reduce(few_received, [few], 0, data_type, block_size), f),
        ("NumPy", "unpack"): (lambda: reference.unpack(few_gathered, [few], data_type, block_size, 1.0), f),
    }
    functions = {"copy": lambda: copy_in_threads(target, host, threads)}
    functions.update({key: function for key, (function, _) in work.items()})
    best = best_seconds(functions, args.rounds)
    copy = best["copy"] / n
    copies = {}
    for (what, kernel), (_, elements) in work.items():
        copies.setdefault(what, {})[kernel] = best[what, kernel] / elements / copy
    library = ctypes.CDLL(str(pathlib.Path(ops.__file__).with_name("_tf_ops.so")))
    library.eightbit_cpu_instruction_set.restype = ctypes.c_char_p
    return {
        "instruction_set": library.eightbit_cpu_instruction_set().decode(),
        "tensorflow": tf.__version__,
        "plain_codes_other_than_reference": float(np.mean(plain_codes.numpy()[:f] != few_codes)),
        "copy": copy * 1e9,
        "copies": copies,
    }


def in_process_of_its_own(python: str, args: argparse.Namespace, part: str, threads: int) -> dict | None:
    """The part's result; None, with the reason printed, if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        options = {"elements": args.elements, "data-type": args.data_type, "block-size": args.block_size}
        options |= {"ranks": args.ranks, "rounds": args.rounds, "threads": threads, "part": part, "json": result}
        command = [python, __file__, *[f"--{name}={value}" for name, value in options.items()]]
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            print(f"{part} is left out: {' '.join(done.stderr.strip().splitlines()[-1:])}", file=sys.stderr)
            return None
        return json.loads(result.read_text())


def print_table(copies: dict) -> None:
    print(f"{'':<16}" + "".join(f"{kernel:>12}" for kernel in KERNELS))
    for what, figures in copies.items():
        cells = [f"{figures[kernel]:.2f}" if kernel in figures else "-" for kernel in KERNELS]
        print(f"{what:<16}" + "".join(f"{cell:>12}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**24, help="float32, of a tensor; %(default)s by default")
    parser.add_argument("--data-type", choices=data_types.DATA_TYPES, default="dynamic_tree")
    parser.add_argument("--block-size", type=int, default=wire.DEFAULT_BLOCK_SIZE)
    parser.add_argument("--ranks", type=int, default=2, help="of pack, reduce and unpack; %(default)s by default")
    parser.add_argument("--rounds", type=int, default=15, help="of which the best counts; %(default)s by default")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--bitsandbytes", default=sys.executable, metavar="PYTHON", help="a Python that has it")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there as well")
    parser.add_argument("--part", choices=["ops", "bitsandbytes"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.elements % (2 * args.ranks * args.block_size) or args.ranks < 2:
        parser.error(
            f"--elements={args.elements}: plain TensorFlow ops need whole blocks in each of --ranks={args.ranks} "
            f"chunks, so a multiple of {2 * args.ranks * args.block_size}, and at least 2 ranks"
        )
    if args.part:
        args.json.write_text(json.dumps(measure(args) if args.part == "ops" else measure_bitsandbytes(args)))
        return

    result = {
        "cpu": cpu_name(),
        "load_before": os.getloadavg()[0],
        "settings": {name: getattr(args, name) for name in ("elements", "data_type", "block_size", "ranks", "rounds")},
        "threads": {},
    }
    for threads in args.threads:
        figures = in_process_of_its_own(sys.executable, args, "ops", threads)
        if figures is None:
            sys.exit(1)
        other = in_process_of_its_own(args.bitsandbytes, args, "bitsandbytes", threads)
        if other:
            figures["copies"]["bitsandbytes"] = other.pop("copies")
            figures["bitsandbytes"] = other
        result["threads"][threads] = figures
        print(
            f"{result['cpu']}, {figures['instruction_set']}; {args.elements:,} float32, {args.data_type}, block "
            f"{args.block_size}, {args.ranks} ranks, {threads} thread{'s' * (threads > 1)}; TensorFlow "
            f"{figures['tensorflow']}; a copy takes {figures['copy']:.3f} ns an element. Time in copies:"
        )
        print_table(figures["copies"])
    result["load_after"] = os.getloadavg()[0]
    if max(result["load_before"], result["load_after"]) > 0.5 + max(args.threads):
        print("The machine was busy: take these figures for what they are.")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
