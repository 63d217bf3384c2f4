"""Inputs that tests of the codec share: ordinary, adversarial, and of every floating type."""

import ml_dtypes
import numpy as np

from hvd_eightbit import data_types

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
TYPES = list(data_types.DATA_TYPES.values())
# The values of a type that nobody designed: many in one place, so that the fast way to a code does not work for it.
CROWDED = data_types.DataType("crowded", np.sort(np.random.default_rng(1).normal(0, 1e-6, 256).clip(-1, 1)))


def numbers(kind: str, n: int, seed: int) -> np.ndarray:
    """n float64 numbers; kind says of what sort."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    if kind == "wide":
        x *= 10.0 ** rng.uniform(-12, 4, n)
    elif kind == "subnormal":
        x *= 1e-42
    elif kind == "huge":
        x *= 1e38
    elif kind == "zero":
        x *= 0
    elif kind == "sparse":
        x *= rng.random(n) < 0.001
    elif kind == "bad":
        for bad in (np.nan, np.inf, -np.inf):
            x[rng.integers(0, max(n, 1), size=min(n, 1))] = bad
    return x


KINDS = ["normal", "wide", "subnormal", "huge", "zero", "sparse", "bad"]


def cast(x: np.ndarray, dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def assert_same(actual, expected):
    """Equal bit for bit, except that any NaN equals any."""
    actual = np.asarray(actual.numpy() if hasattr(actual, "numpy") else actual)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = np.isnan(expected) if expected.dtype != np.uint8 else np.zeros(expected.shape, bool)
    if expected.dtype != np.uint8:
        np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.uint8), expected[~nan].view(np.uint8))
