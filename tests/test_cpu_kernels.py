"""tf_ops/cpu_kernels.cc for every instruction set that this CPU has: equal to reference.py bit for bit.

test_ops.py tests the set that is chosen, through TensorFlow; here the others are asked for.
"""

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from numbers_of_all_kinds import CROWDED, DTYPES, KINDS, TYPES, assert_same, cast, numbers

from hvd_eightbit import data_types, reference, wire

ROOT = pathlib.Path(__file__).parents[1]
SETS = ["plain", "AVX2", "AVX-512", "AVX-512 VBMI"]
GUARD = 64  # bytes around each buffer: NaN where it is read, watched where it is written


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("cpu") / "kernels.so"
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]
    sources = [str(ROOT / "tests/cpu_kernels.cc"), str(ROOT / "tf_ops/cpu_kernels.cc")]
    command = ["g++", *flags, "-isystem", tf.sysconfig.get_include(), *sources, "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(target))
    library.cpu_instruction_set.restype = ctypes.c_char_p
    library.cpu_table.restype = ctypes.c_void_p
    return library


class Buffer:
    """Memory for an array, `shift` elements after an aligned address, with guards around it."""

    def __init__(self, content: np.ndarray, shift: int = 0):
        self.dtype, self.shape, self.size = content.dtype, content.shape, content.nbytes
        self.raw = np.full(content.nbytes + 3 * GUARD + shift * content.itemsize, 0xFF, np.uint8)
        self.start = -self.raw.ctypes.data % GUARD + GUARD + shift * content.itemsize
        self.raw[self.start : self.start + self.size] = np.frombuffer(content.tobytes(), np.uint8)

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.raw.ctypes.data + self.start)

    @property
    def array(self) -> np.ndarray:
        """The content, once it is sure that nothing was written around it."""
        assert (self.raw[: self.start] == 0xFF).all() and (self.raw[self.start + self.size :] == 0xFF).all()
        return self.raw[self.start : self.start + self.size].copy().view(self.dtype).reshape(self.shape)


def unwritten(shape, dtype) -> np.ndarray:
    return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)


class Kernels:
    """The five kernels with the signatures of reference.py, for one instruction set."""

    def __init__(self, library, instruction_set: str):
        self.library, self.set, self.tables = library, SETS.index(instruction_set), {}

    def call(self, name: str, data_type, dtype, *arguments) -> None:
        if data_type not in self.tables:
            values = Buffer(data_type.values)
            self.tables[data_type] = self.library.cpu_table(values.pointer, self.set)
        converted = [ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments]
        kind = DTYPES.index(np.dtype(dtype).type)
        getattr(self.library, f"cpu_{name}")(ctypes.c_void_p(self.tables[data_type]), ctypes.c_int(kind), *converted)

    def close(self) -> None:
        for table in self.tables.values():
            self.library.cpu_free_table(ctypes.c_void_p(table))

    def quantize(self, x, data_type, block_size, shift=0):
        source, codes = Buffer(x, shift), Buffer(unwritten(x.shape, np.uint8), shift)
        absmax = Buffer(unwritten((wire.blocks(x.size, block_size),), np.float32))
        self.call("quantize", data_type, x.dtype, source.pointer, x.size, block_size or 0, codes.pointer,
                  absmax.pointer)  # fmt: skip
        return codes.array, absmax.array

    def dequantize(self, codes, absmax, data_type, block_size, dtype, shift=0):
        source, scales, x = Buffer(codes, shift), Buffer(absmax), Buffer(unwritten(codes.shape, dtype), shift)
        self.call("dequantize", data_type, dtype, source.pointer, scales.pointer, codes.size, block_size or 0,
                  x.pointer)  # fmt: skip
        return x.array

    @staticmethod
    def bucket(tensors):
        buffers = [Buffer(t, i % 3) for i, t in enumerate(tensors)]
        pointers = (ctypes.c_void_p * len(tensors))(*[b.pointer.value for b in buffers])
        return buffers, (pointers, (ctypes.c_int64 * len(tensors))(*[t.size for t in tensors]), len(tensors))

    def pack(self, tensors, ranks, rank, data_type, block_size):
        layout = wire.layout([t.size for t in tensors], ranks, block_size)
        _keep, arguments = self.bucket(tensors)
        messages = Buffer(unwritten((ranks, layout.chunk_bytes), np.uint8))
        self.call("pack", data_type, tensors[0].dtype, *arguments, ranks, rank, block_size or 0, messages.pointer)
        return messages.array

    def reduce(self, received, tensors, rank, data_type, block_size):
        _keep, arguments = self.bucket(tensors)
        others, message = Buffer(received), Buffer(unwritten(received.shape[1:], np.uint8))
        self.call("reduce", data_type, tensors[0].dtype, *arguments, len(received), rank, block_size or 0,
                  others.pointer, message.pointer)  # fmt: skip
        return message.array

    def unpack(self, gathered, like, data_type, block_size, scale):
        buffers, arguments = self.bucket([unwritten(t.shape, t.dtype) for t in like])
        source = Buffer(gathered)
        self.call("unpack", data_type, like[0].dtype, *arguments, len(gathered), block_size or 0, source.pointer,
                  ctypes.c_float(scale))  # fmt: skip
        return [buffer.array for buffer in buffers]


@pytest.fixture(params=SETS)
def kernels(library, request):
    if library.cpu_instruction_set(SETS.index(request.param)) is None:
        pytest.skip(f"this CPU has no {request.param}")
    kernels = Kernels(library, request.param)
    yield kernels
    kernels.close()


def test_names_of_the_sets(library):
    names = [library.cpu_instruction_set(i) for i in range(len(SETS) + 1)]
    assert names[0] == b"plain" and names[-1] is None
    assert all(name in (None, expected.encode()) for name, expected in zip(names, SETS))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_and_dequantize(kernels, kind, dtype):
    cases = [(0, 16), (1, 16), (17, 16), (63, 64), (64, 64), (129, 128), (6145, 2048), (9001, 5000), (9001, None)]
    for i, (n, block_size) in enumerate(cases):
        for data_type in [*TYPES, CROWDED]:
            x = cast(numbers(kind, n, seed=n), dtype)
            codes, absmax = kernels.quantize(x, data_type, block_size, shift=i % 3)
            expected_codes, expected_absmax = reference.quantize(x, data_type, block_size)
            assert_same(codes, expected_codes)
            assert_same(absmax, expected_absmax)
            decoded = kernels.dequantize(codes, absmax, data_type, block_size, dtype, shift=i % 2)
            assert_same(decoded, reference.dequantize(codes, absmax, data_type, block_size, dtype))


@pytest.mark.parametrize("n", range(1, 131))
def test_every_length_and_code(kernels, n):
    """Lengths around those of vectors; over all of them, each code."""
    codes = np.arange(37 * n, 38 * n).astype(np.uint8)
    decoded = kernels.dequantize(codes, np.float32([3.7]), data_types.LINEAR, None, np.float32, shift=n % 5)
    assert_same(decoded, reference.dequantize(codes, np.float32([3.7]), data_types.LINEAR, None))
    again, _ = kernels.quantize(decoded, data_types.LINEAR, None, shift=n % 7)
    assert_same(again, reference.quantize(decoded, data_types.LINEAR, None)[0])


@pytest.mark.parametrize("data_type", [*TYPES, CROWDED], ids=repr)
def test_borders(kernels, data_type):
    """Inputs at, just below and just above each midpoint and each value, where a code changes; and both zeros."""
    at = np.concatenate([data_type.midpoints, data_type.values, np.float32([1, -1, 0.0, -0.0])])
    x = np.concatenate([at, np.nextafter(at, np.float32(2)), np.nextafter(at, np.float32(-2))]).clip(-1, 1)
    for absmax in np.float32([1, 3, 1e-38, 1e-44, 3e38]):
        scaled = np.concatenate([x * absmax, [absmax]]).astype(np.float32)
        codes, _ = kernels.quantize(scaled, data_type, None)
        assert_same(codes, reference.quantize(scaled, data_type, None)[0])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_border_at_a_zero_of_either_sign(kernels, zero):
    values = np.concatenate([np.linspace(-1, -0.5, 127), [-0.25, 0.25], np.linspace(0.5, 1, 127)]).astype(np.float32)
    values[126:129] = zero
    data_type = data_types.DataType("zeros", np.sort(values))
    x = np.float32([0.0, -0.0, 1e-45, -1e-45, 1, -1] * 40)
    assert_same(kernels.quantize(x, data_type, None)[0], reference.quantize(x, data_type, None)[0])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
def test_all_numbers_of_16_bits(kernels, dtype):
    """Each one is read right: with blocks of 16, alone with zeros, it is the block's absmax."""
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    _, absmax = kernels.quantize(np.repeat(every, 16), data_types.LINEAR, 16)
    expected = np.abs(every.astype(np.float32))
    expected[~np.isfinite(expected)] = np.nan
    assert_same(absmax, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_rounding_to_the_output_type(kernels, dtype):
    """Numbers of all magnitudes, ties between two numbers of 16 bits among them."""
    rng = np.random.default_rng(5)
    absmax = rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    ties = (rng.integers(0, 2**16, 20000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    half_ties = (rng.integers(0, 2**19, 20000).astype(np.uint32) << 13 | 0x1000).view(np.float32)
    limits = np.float32([6.1e-5, 6e-8, 2.98e-8, 65504, 65519.996, 65520, 3.39e38])
    absmax = np.concatenate([absmax, ties, half_ties, limits])
    codes = np.full(16 * absmax.size, 255, np.uint8)  # 1 * absmax
    assert_same(
        kernels.dequantize(codes, absmax, data_types.LINEAR, 16, dtype),
        reference.dequantize(codes, absmax, data_types.LINEAR, 16, dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_exchange(kernels, kind, dtype):
    """The three kernels of an allreduce over simulated ranks, each step checked against the reference."""
    shapes = [(3, 5), (0,), (), (2500,), (7,), (9001,), (41, 31)]
    for ranks, block_size, scale in [(1, 64, 1.0), (2, 2048, 1.0), (3, 16, 3.0), (4, None, 0.25), (7, 5000, 1.0)]:
        data_type = TYPES[ranks % 4]
        buckets = [
            [cast(numbers(kind, int(np.prod(s)), 100 * r + i).reshape(s), dtype) for i, s in enumerate(shapes)]
            for r in range(ranks)
        ]
        sent, reduced = [], []
        for rank, bucket in enumerate(buckets):
            sent.append(kernels.pack(bucket, ranks, rank, data_type, block_size))
            assert_same(sent[-1], reference.pack(bucket, ranks, rank, data_type, block_size))
        for rank, bucket in enumerate(buckets):
            received = np.stack([messages[rank] for messages in sent])
            reduced.append(kernels.reduce(received, bucket, rank, data_type, block_size))
            assert_same(reduced[-1], reference.reduce(received, bucket, rank, data_type, block_size))
        outputs = kernels.unpack(np.stack(reduced), buckets[0], data_type, block_size, scale)
        expected = reference.unpack(np.stack(reduced), buckets[0], data_type, block_size, scale)
        for output, e in zip(outputs, expected):
            assert_same(output, e)
