"""tf_ops/cuda_kernels.cu, executed by g++ and a stand-in for CUDA: equal to reference.py bit for bit."""

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from numbers_of_all_kinds import CROWDED, DTYPES, KINDS, TYPES, assert_same, cast, numbers

from hvd_eightbit import data_types, reference, wire

ROOT = pathlib.Path(__file__).parents[1]
GUARD = 64  # bytes around each buffer: NaN where it is read, watched where it is written
ORDERS = [0, 1, 2]  # in which the threads of a block run: lowest first, highest first, random


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("cuda") / "emulated.so"
    includes = [f"-I{ROOT / 'tf_ops'}", f"-I{ROOT / 'tests/cuda_emulation'}", "-isystem", tf.sysconfig.get_include()]
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-DHVD_EIGHTBIT_CUDA_EMULATION"]
    command = ["g++", *flags, *includes, "-x", "c++", str(ROOT / "tf_ops/cuda_kernels.cu"), "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(target))


class Buffer:
    """Memory for an array, `shift` elements after an aligned address, with guards around it."""

    def __init__(self, content: np.ndarray, shift: int = 0):
        self.dtype, self.shape, self.size = content.dtype, content.shape, content.nbytes
        raw = np.full(content.nbytes + 3 * GUARD + shift * content.itemsize, 0xFF, np.uint8)
        self.start = -raw.ctypes.data % GUARD + GUARD + shift * content.itemsize
        raw[self.start : self.start + self.size] = np.frombuffer(content.tobytes(), np.uint8)
        self.raw = raw

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.raw.ctypes.data + self.start)

    @property
    def array(self) -> np.ndarray:
        """The content, once it is sure that nothing was written around it."""
        assert (self.raw[: self.start] == 0xFF).all() and (self.raw[self.start + self.size :] == 0xFF).all()
        return self.raw[self.start : self.start + self.size].copy().view(self.dtype).reshape(self.shape)


def unwritten(shape, dtype) -> np.ndarray:
    return (
        np.frombuffer(b"\xa5" * (int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)
    )


def call(function, *arguments) -> None:
    converted = [ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments]
    assert function(*converted, None) == 0


def kind_of(dtype) -> ctypes.c_int:
    return ctypes.c_int(DTYPES.index(np.dtype(dtype).type))


def quantize(library, x, data_type, block_size, shift):
    values = Buffer(data_type.values)
    source, codes = Buffer(x, shift), Buffer(unwritten(x.shape, np.uint8), shift)
    absmax = Buffer(unwritten((wire.blocks(x.size, block_size),), np.float32))
    call(library.eightbit_cuda_quantize, kind_of(x.dtype), values.pointer, source.pointer, x.size, block_size or 0,
         codes.pointer, absmax.pointer)  # fmt: skip
    return codes.array, absmax.array


def dequantize(library, codes, absmax, data_type, block_size, dtype, shift):
    values, source, scales = Buffer(data_type.values), Buffer(codes, shift), Buffer(absmax)
    x = Buffer(unwritten(codes.shape, dtype), shift)
    call(library.eightbit_cuda_dequantize, kind_of(dtype), values.pointer, source.pointer, scales.pointer, codes.size,
         block_size or 0, x.pointer)  # fmt: skip
    return x.array


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_and_dequantize(library, kind, dtype, order):
    library.emulation_set_order(order)
    cases = [(0, 16), (1, 16), (17, 16), (4096, 2048), (6145, 2048), (5003, 4096), (9001, 5000), (9001, None)]
    for i, (n, block_size) in enumerate(cases):
        data_type = [*TYPES, CROWDED][(i + KINDS.index(kind) + order) % 5]
        x = cast(numbers(kind, n, seed=n + order), dtype)
        codes, absmax = quantize(library, x, data_type, block_size, shift=i % 3)
        expected_codes, expected_absmax = reference.quantize(x, data_type, block_size)
        assert_same(codes, expected_codes)
        assert_same(absmax, expected_absmax)
        decoded = dequantize(library, codes, absmax, data_type, block_size, dtype, shift=i % 2)
        assert_same(decoded, reference.dequantize(expected_codes, expected_absmax, data_type, block_size, dtype))


@pytest.mark.parametrize("data_type", [*TYPES, CROWDED], ids=repr)
def test_borders(library, data_type):
    """Inputs at, just below and just above each midpoint and each value, where a code changes."""
    at = np.concatenate([data_type.midpoints, data_type.values, np.float32([1, -1])])
    x = np.concatenate([at, np.nextafter(at, np.float32(2)), np.nextafter(at, np.float32(-2))]).clip(-1, 1)
    for absmax in np.float32([1, 3, 1e-44, 3e38]):
        scaled = np.concatenate([x * absmax, [absmax]]).astype(np.float32)
        codes, _ = quantize(library, scaled, data_type, 2048, shift=0)
        assert_same(codes, reference.quantize(scaled, data_type, 2048)[0])


def exchange(library, buckets, data_type, block_size, scale, shift):
    """The three kernels of an allreduce over simulated ranks, each step checked against the reference."""
    ranks, count, dtype = len(buckets), len(buckets[0]), buckets[0][0].dtype
    sizes = (ctypes.c_int64 * count)(*[t.size for t in buckets[0]])
    layout = wire.layout([t.size for t in buckets[0]], ranks, block_size)
    values, kind = Buffer(data_type.values), kind_of(dtype)

    def pointers(buffers):
        return (ctypes.c_void_p * count)(*[b.pointer.value for b in buffers])

    sources = [[Buffer(t, (shift + i) % 3) for i, t in enumerate(bucket)] for bucket in buckets]
    sent = []
    for rank, bucket in enumerate(buckets):
        messages = Buffer(unwritten((ranks, layout.chunk_bytes), np.uint8))
        call(library.eightbit_cuda_pack, kind, values.pointer, pointers(sources[rank]), sizes, count, ranks, rank,
             block_size or 0, messages.pointer)  # fmt: skip
        sent.append(messages.array)
        assert_same(sent[-1], reference.pack(bucket, ranks, rank, data_type, block_size))
    reduced = []
    for rank, bucket in enumerate(buckets):
        received = np.stack([messages[rank] for messages in sent])
        others, message = Buffer(received), Buffer(unwritten((layout.chunk_bytes,), np.uint8))
        call(library.eightbit_cuda_reduce, kind, values.pointer, pointers(sources[rank]), sizes, count, ranks, rank,
             block_size or 0, others.pointer, message.pointer)  # fmt: skip
        reduced.append(message.array)
        assert_same(reduced[-1], reference.reduce(received, bucket, rank, data_type, block_size))
    gathered = Buffer(np.stack(reduced))
    outputs = [Buffer(unwritten(t.shape, dtype), (shift + i) % 3) for i, t in enumerate(buckets[0])]
    call(library.eightbit_cuda_unpack, kind, values.pointer, pointers(outputs), sizes, count, ranks, block_size or 0,
         gathered.pointer, ctypes.c_float(scale))  # fmt: skip
    expected = reference.unpack(np.stack(reduced), buckets[0], data_type, block_size, scale)
    for output, e in zip(outputs, expected):
        assert_same(output.array, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_exchange(library, kind, dtype):
    shapes = [(3, 5), (0,), (), (2500,), (7,), (5001,), (41, 31)]
    cases = [(1, 64, 1.0), (2, 2048, 1.0), (3, 16, 3.0), (4, None, 0.25), (3, 5000, 1.0)]
    for i, (ranks, block_size, scale) in enumerate(cases):
        if (i + KINDS.index(kind) + DTYPES.index(dtype)) % 2:
            continue  # half of the cases for each pair of kind and dtype, all of them for each kind
        library.emulation_set_order(ORDERS[i % 3])
        buckets = [
            [cast(numbers(kind, int(np.prod(s)), 100 * r + k).reshape(s), dtype) for k, s in enumerate(shapes)]
            for r in range(ranks)
        ]
        exchange(library, buckets, TYPES[i % 4], block_size, scale, shift=i)


def test_more_tensors_than_one_launch_takes(library):
    library.emulation_set_order(0)
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 60, size=130)
    buckets = [[rng.normal(size=n).astype(np.float32) for n in sizes] for _ in range(2)]
    for block_size in (16, None):
        exchange(library, buckets, data_types.DYNAMIC_TREE, block_size, 1.0, shift=1)


def test_tiles_that_outnumber_the_grid(library):
    """Each block of threads then works on several tiles, one after another."""
    x = np.random.default_rng(4).normal(size=20 * 4096 + 5).astype(np.float32)
    for order in ORDERS:
        library.emulation_set_order(order)
        codes, absmax = quantize(library, x, data_types.LINEAR, 2048, shift=0)
        expected_codes, expected_absmax = reference.quantize(x, data_types.LINEAR, 2048)
        assert_same(codes, expected_codes)
        assert_same(absmax, expected_absmax)
