"""All the ways to find a code on the CPU give the same one, whichever this machine would choose."""

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from numbers_of_all_kinds import CROWDED, TYPES, assert_same, numbers

from hvd_eightbit import reference

ROOT = pathlib.Path(__file__).parents[1]
CODINGS = {"best": 0, "search": 1, "buckets": 2, "avx512": 3}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("cpu") / "codings.so"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", f"-I{ROOT / 'tf_ops'}"]
    sources = [str(ROOT / "tests/cpu_codings.cc"), str(ROOT / "tf_ops/cpu_kernels.cc")]
    command = ["g++", *flags, "-isystem", tf.sysconfig.get_include(), *sources, "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(target))


def has_avx512() -> bool:
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512f" in flags and "avx512bw" in flags


def encode(library, coding: str, x: np.ndarray, absmax: np.float32, data_type) -> tuple[np.ndarray, str]:
    codes = np.full(len(x) + 64, 0xA5, np.uint8)
    values = np.array(data_type.values)
    used = library.encode(CODINGS[coding], values.ctypes.data_as(ctypes.c_void_p), x.ctypes.data_as(ctypes.c_void_p),
                          ctypes.c_int64(len(x)), ctypes.c_float(absmax),
                          codes.ctypes.data_as(ctypes.c_void_p))  # fmt: skip
    assert (codes[len(x) :] == 0xA5).all()
    return codes[: len(x)], list(CODINGS)[used]


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("data_type", [*TYPES, CROWDED], ids=repr)
def test_equals_the_reference(library, data_type, coding):
    at = np.concatenate([data_type.midpoints, data_type.values, np.float32([1, -1, 0.0, -0.0])])
    borders = np.concatenate([at, np.nextafter(at, np.float32(2)), np.nextafter(at, np.float32(-2))]).clip(-1, 1)
    inputs = [borders * absmax for absmax in np.float32([1, 3, 1e-38, 1e-44, 3e38])]
    inputs += [numbers(kind, n, n).astype(np.float32) for kind in ("normal", "wide", "subnormal", "zero") for n in
               (0, 1, 15, 16, 17, 31, 2048, 4095)]  # fmt: skip
    for x in inputs:
        absmax = reference.block_absmax(x)
        codes, used = encode(library, coding, x, absmax, data_type)
        assert_same(codes, reference.encode_block(x, absmax, data_type))
        if coding == "avx512":
            assert used == ("avx512" if has_avx512() else "search")
        elif coding == "buckets":
            assert used == ("search" if data_type is CROWDED else "buckets")
        elif coding == "search":
            assert used == "search"
