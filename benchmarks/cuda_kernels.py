"""The CUDA kernels on a real GPU: equal to the reference, and how near to the speed of copying memory.

    python benchmarks/cuda_kernels.py [--elements 67108864] [--json FILE]

Needs nvcc (CUDA_HOME or PATH), a GPU and CuPy or PyTorch, but neither TensorFlow nor Horovod: it builds the launchers
of tf_ops/cuda_kernels.cu into a library of their own and calls them by ctypes. A figure is the bytes that a kernel must
read and write, divided by its time, as a share of the same for a device-to-device copy in the same run; inputs take
turns, so that together they are larger than the GPU's cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hvd_eightbit import data_types, reference, wire  # noqa: E402

KINDS = {"float16": 0, "float32": 2, "float64": 3}
TURNS, ROUNDS = 4, 10


class Device:
    """The little of a GPU library that is needed here, from CuPy or else PyTorch."""

    def __init__(self):
        try:
            import cupy

            self.library, self.cupy, self.torch = "CuPy", cupy, None
            self.name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        except ImportError:
            import torch

            self.library, self.cupy, self.torch = "PyTorch", None, torch
            self.name = torch.cuda.get_device_name(0)

    def upload(self, array: np.ndarray):
        return self.cupy.asarray(array) if self.cupy else self.torch.from_numpy(array.copy()).cuda()

    def download(self, array) -> np.ndarray:
        return self.cupy.asnumpy(array) if self.cupy else array.cpu().numpy()

    def pointer(self, array) -> int:
        return array.data.ptr if self.cupy else array.data_ptr()

    def copy(self, target, source) -> None:
        if self.cupy:
            self.cupy.copyto(target, source)
        else:
            target.copy_(source)

    def seconds(self, function) -> float:
        """Of one call of function(turn), the median over rounds of all turns, by the GPU's own clock."""
        events = (self.cupy or self.torch).cuda
        stream = events.get_current_stream() if self.cupy else events.current_stream()
        if self.cupy:
            begin, end = events.Event(), events.Event()
        else:
            begin, end = events.Event(enable_timing=True), events.Event(enable_timing=True)
        times = []
        for _ in range(ROUNDS + 1):
            begin.record(stream)
            for turn in range(TURNS):
                function(turn)
            end.record(stream)
            end.synchronize()
            milliseconds = events.get_elapsed_time(begin, end) if self.cupy else begin.elapsed_time(end)
            times.append(milliseconds / 1e3 / TURNS)
        return float(np.median(times[1:]))

    @property
    def stream(self) -> int:
        cuda = (self.cupy or self.torch).cuda
        return cuda.get_current_stream().ptr if self.cupy else cuda.current_stream().cuda_stream


def build() -> ctypes.CDLL:
    home = os.environ.get("CUDA_HOME")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if not nvcc:
        sys.exit("no nvcc in CUDA_HOME or PATH: install CUDA's compiler")
    target = os.path.join(tempfile.mkdtemp(), "launchers.so")
    flags = ["-O3", "-std=c++17", "--fmad=false", "-Xcompiler", "-fPIC", "-shared", "-arch=native"]
    subprocess.run([nvcc, *flags, str(ROOT / "tf_ops/cuda_kernels.cu"), "-o", target], check=True)
    return ctypes.CDLL(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64 * 2**20, help="of a tensor, %(default)s by default")
    parser.add_argument("--data-type", choices=data_types.DATA_TYPES, default="dynamic_tree")
    parser.add_argument("--block-size", type=int, default=wire.DEFAULT_BLOCK_SIZE)
    parser.add_argument("--dtype", choices=KINDS, default="float32")
    parser.add_argument("--ranks", type=int, default=4, help="in reduce, %(default)s by default")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there as well")
    args = parser.parse_args()

    device, library = Device(), build()
    data_type, kind, n = data_types.get(args.data_type), ctypes.c_int(KINDS[args.dtype]), args.elements
    size = np.dtype(args.dtype).itemsize
    layout = wire.layout([n], args.ranks, args.block_size)
    blocks = wire.blocks(n, args.block_size)
    rng = np.random.default_rng(0)
    values = device.upload(np.array(data_type.values))
    hosts = [rng.standard_normal(n, np.float32).astype(args.dtype) for _ in range(TURNS)]
    x, y = [device.upload(h) for h in hosts], [device.upload(np.empty(n, args.dtype)) for _ in range(TURNS)]
    codes = [device.upload(np.empty(n, np.uint8)) for _ in range(TURNS)]
    absmax = [device.upload(np.empty(blocks, np.float32)) for _ in range(TURNS)]
    messages = [device.upload(np.empty((args.ranks, layout.chunk_bytes), np.uint8)) for _ in range(TURNS)]
    chunk = [device.upload(np.empty(layout.chunk_bytes, np.uint8)) for _ in range(TURNS)]
    sizes = (ctypes.c_int64 * 1)(n)

    def call(name: str, *arguments) -> None:
        converted = [
            a if isinstance(a, (ctypes._SimpleCData, ctypes.Array)) else
            ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(device.pointer(a))
            for a in arguments
        ]  # fmt: skip
        error = getattr(library, f"eightbit_cuda_{name}")(kind, *converted, ctypes.c_void_p(device.stream))
        if error:
            sys.exit(f"{name} failed: CUDA error {error}")

    def pointers(tensor):
        return (ctypes.c_void_p * 1)(device.pointer(tensor))

    b, ranks = args.block_size, args.ranks
    kernels = {
        "quantize": lambda i: call("quantize", values, x[i], n, b, codes[i], absmax[i]),
        "dequantize": lambda i: call("dequantize", values, codes[i], absmax[i], n, b, y[i]),
        "pack": lambda i: call("pack", values, pointers(x[i]), sizes, 1, ranks, ranks - 1, b, messages[i]),
        "reduce": lambda i: call("reduce", values, pointers(x[i]), sizes, 1, ranks, 0, b, messages[i], chunk[i]),
        "unpack": lambda i: call("unpack", values, pointers(y[i]), sizes, 1, ranks, b, messages[i], ctypes.c_float(1)),
    }
    c = layout.chunk_elements
    must_move = {
        "quantize": n * (size + 1) + 4 * blocks,
        "dequantize": n * (size + 1) + 4 * blocks,
        "pack": (n - c) * (size + 1) + 4 * blocks,
        "reduce": c * (size + ranks),
        "unpack": n * (size + 1) + 4 * blocks,
    }

    kernels["quantize"](0)
    kernels["dequantize"](0)
    kernels["pack"](0)
    kernels["reduce"](0)
    few = min(n, 2**20) // b * b
    wanted_codes, wanted_absmax = reference.quantize(hosts[0][:few], data_type, b)
    wanted = reference.dequantize(wanted_codes, wanted_absmax, data_type, b, args.dtype)
    for name, actual, expected in (
        ("codes", codes[0], wanted_codes),
        ("absmax", absmax[0], wanted_absmax),
        ("decoded", y[0], wanted),
    ):
        if device.download(actual)[: len(expected)].tobytes() != expected.tobytes():
            sys.exit(f"{name} of the GPU are not those of the reference")

    copied = 2 * n * size / device.seconds(lambda i: device.copy(y[i], x[i]))
    print(f"{device.name} ({device.library}), {n:,} {args.dtype}, {args.data_type}, block {b}; equal to the reference")
    print(f"copy        {copied / 1e9:8.0f} GB/s")
    result = {
        "device": device.name,
        "elements": n,
        "copy_gb_per_s": copied / 1e9,
        "settings": vars(args) | {"json": None},
    }
    for name, function in kernels.items():
        rate = must_move[name] / device.seconds(function)
        result[name] = {"gb_per_s": rate / 1e9, "of_copy": rate / copied}
        print(f"{name:<12}{rate / 1e9:8.0f} GB/s {100 * rate / copied:5.0f}% of the copy")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
