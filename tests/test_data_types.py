"""The data types against the values of the paper."""

import pickle

import numpy as np
import pytest

from hvd_eightbit import data_types, reference
from hvd_eightbit.data_types import DataType

VALUES = np.linspace(-1, 1, 256)


def nearest(data_type: DataType, x: float, scale: float) -> float:
    code = reference.encode_block(np.float32([x / scale]), np.float32(1), data_type)
    return float(data_type.values[code[0]]) * scale


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [("dynamic_tree", 1, 0.236719), ("static_tree", 92.25, 0.23125), ("mantissa", 150, 0.2)],
)
def test_worked_example_of_the_paper(name, scale, expected):
    """0.2345678 (paper, section 3.1); static tree and mantissa are printed unscaled there."""
    assert nearest(data_types.get(name), 0.2345678, scale) == pytest.approx(expected, abs=5e-7)


def test_small_example_of_the_paper():
    assert nearest(data_types.DYNAMIC_TREE, 0.0000234, 1) == pytest.approx(1.9e-5, abs=5e-7)


def test_dynamic_tree_of_the_author():
    """Ends of the table that the author shipped."""
    positive = data_types.DYNAMIC_TREE.values[129:]
    first = [2.75e-6, 7.25e-6, 1.875e-5, 3.625e-5, 5.875e-5, 8.625e-5, 1.4375e-4]
    np.testing.assert_allclose(positive[:7], first, rtol=1e-6)
    np.testing.assert_allclose(positive[-4:], [0.957031, 0.974219, 0.991406, 1], atol=5e-7)
    assert len(positive) == 127


def test_linear_is_127_equal_steps():
    np.testing.assert_allclose(data_types.LINEAR.values[128:] * 127, np.arange(128), atol=1e-5)


def test_mantissa_has_114_distinct_magnitudes():
    magnitudes = np.unique(data_types.MANTISSA.values[128:].astype(np.float64).round(12))
    assert len(magnitudes) == 114
    assert (data_types.MANTISSA.values[128:] == 0).sum() == 8
    assert np.float32(0.9 * 1e1 / 150) in data_types.MANTISSA.values


def test_static_tree_in_a_decade():
    decade = data_types.STATIC_TREE.values[-16:] * 92.25
    expected = [1, 1.4375, 1.875, 2.3125, 2.75, 3.1875, 3.625, 4.0625, 4.5, 5.175, 5.85, 6.525, 7.2, 7.875, 8.55, 9.225]
    np.testing.assert_allclose(decade, np.array(expected) * 10, rtol=1e-6)


@pytest.mark.parametrize("data_type", data_types.DATA_TYPES.values(), ids=repr)
def test_tables_are_symmetric_with_an_exact_one_and_zero(data_type):
    v = data_type.values
    assert v.dtype == np.float32 and v.shape == (256,)
    np.testing.assert_array_equal(v, -v[::-1])
    assert v[-1] == 1 and v[127] == v[128] == 0
    assert v[data_type.zero_code] == 0
    assert (np.diff(v) >= 0).all() and not v.flags.writeable


# Mean relative error in percent with nearest rounding, one absmax for all, after the paper's table 2.
@pytest.mark.parametrize(("name", "uniform", "normal"), [("dynamic_tree", 0.94, 1.64), ("linear", 1.49, 5.01)])
def test_relative_errors(name, uniform, normal):
    rng = np.random.default_rng(0)
    for x, expected in ((rng.random(2_000_000), uniform), (rng.normal(size=2_000_000), normal)):
        x = x[x != 0].astype(np.float32)
        codes, absmax = reference.quantize(x, data_types.get(name), None)
        decoded = reference.dequantize(codes, absmax, data_types.get(name), None)
        error = 100 * np.mean(np.abs(decoded - x) / np.abs(x), dtype=np.float64)
        assert error == pytest.approx(expected, rel=0.1)  # depends on the largest of the samples


def test_own_data_type():
    own = DataType("own", VALUES)
    assert own == DataType("own", VALUES) and hash(own) == hash(DataType("own", VALUES))
    assert own != DataType("other", VALUES) and own != DataType("own", VALUES / 2) and own != "own"
    assert data_types.get(own) is own
    assert pickle.loads(pickle.dumps(own)) == own


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (VALUES[:255], "256 numbers are needed"),
        (VALUES[::-1], "must ascend"),
        (VALUES * 2, "lie in"),
        (VALUES * np.nan, "finite"),
        (VALUES * 0, "all zero"),
        (VALUES.reshape(16, 16), "shape"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        DataType("bad", values)


def test_bad_names():
    with pytest.raises(ValueError, match="needs a name"):
        DataType("", VALUES)
    with pytest.raises(ValueError, match="'fp8' is not known: use one of dynamic_tree, linear, mantissa, static_tree"):
        data_types.get("fp8")
    with pytest.raises(TypeError, match="data_type=None"):
        data_types.get(None)
