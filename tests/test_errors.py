"""Approximation errors of the data types, against recomputations of the paper's table 2."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from hvd_eightbit.data_types import DATA_TYPES, DataType
from hvd_eightbit.speedup import errors

TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")
SAMPLES = 2_000_000


@pytest.fixture(scope="module", params=errors.PAPER_DISTRIBUTIONS)
def drawn(request):
    return request.param, errors.sample(request.param, SAMPLES, seed=1)


# Mean relative error, %. The errors of types divided by the absolute maximum grow with the
# largest of the numbers drawn, and the square of that: they are given more room.
NEAREST = {
    "uniform:0,1": (0.94, 1.49, 4.97, 3.34),
    "normal:0,1": (1.64, 5.01, 4.97, 4.78),
    "normal:0,10": (1.61, 4.81, 4.97, 4.79),
    "normal:0,0.2": (1.63, 4.94, 5.97, 4.84),
}


def test_nearest(drawn):
    distribution, x = drawn
    for name, expected in zip(TYPES, NEAREST[distribution]):
        e = errors.measure(x, distribution, name, None, normalization="paper")
        by_maximum = name in ("dynamic_tree", "linear") and distribution != "uniform:0,1"
        assert 100 * e.mean_relative == pytest.approx(expected, rel=0.06 if by_maximum else 0.006), name


# (mean absolute, mean squared, mean relative %) with the paper's kernel.
PAPER = {
    "uniform:0,1": (
        (0.00507, 4.25e-5, 1.40),
        (0.00296, 1.30e-5, 1.98),
        (0.0317, 0.00171, 7.22),
        (0.0203, 0.00070, 4.82),
    ),
    "normal:0,1": ((0.0152, 4.5e-4, 2.44), (0.0156, 3.6e-4, 6.39), (0.0528, 0.01035, 6.87), (0.0563, 0.00924, 6.27)),
    "normal:0,10": ((0.157, 0.048, 2.49), (0.166, 0.041, 6.70), (0.563, 1.068, 7.19), (0.564, 0.927, 6.28)),
    "normal:0,0.2": ((0.0031, 1.85e-5, 2.46), (0.0032, 1.52e-5, 6.51), (0.0146, 5.5e-4, 8.26), (0.0104, 2.3e-4, 6.58)),
}


def test_papers_kernel(drawn):
    distribution, x = drawn
    for name, (absolute, squared, relative) in zip(TYPES, PAPER[distribution]):
        e = errors.measure(x, distribution, name, None, rounding="paper", normalization="paper")
        by_maximum = name in ("dynamic_tree", "linear") and distribution != "uniform:0,1"
        assert e.mean_absolute == pytest.approx(absolute, rel=0.12 if by_maximum else 0.015), name
        assert e.mean_squared == pytest.approx(squared, rel=0.22 if by_maximum else 0.025), name
        assert 100 * e.mean_relative == pytest.approx(relative, rel=0.09 if by_maximum else 0.005), name


def test_measures_by_hand():
    thirds = DataType("thirds", np.repeat([-1.0, 0.0, 1.0], (85, 86, 85)))
    e = errors.measure(np.array([1, -1, 0.25, 0, 0.75], np.float32), "five", thirds, None)
    assert (e.mean_absolute, e.mean_squared) == (pytest.approx(0.1), pytest.approx(0.025))
    assert e.mean_relative == pytest.approx((0 + 0 + 1 + 1 / 3) / 4)  # of the four that are not zero
    assert e.relative_l2 == pytest.approx((0.125 / 2.625) ** 0.5)
    assert (e.data_type, e.elements, e.block_size) == ("thirds", 5, None)


def test_blocks_lower_the_error_where_magnitudes_differ():
    x = errors.sample("normal", 1 << 16) * np.repeat(np.float32([1, 1e-3]), 1 << 15)
    for name in TYPES:
        whole, blocks = (errors.measure(x, "x", name, block).mean_relative for block in (None, 2048))
        assert blocks < whole, name


def test_zeros_have_no_relative_error():
    for rounding in errors.ROUNDINGS:
        e = errors.measure(np.zeros(10, np.float32), "zeros", "linear", 16, rounding=rounding)
        assert e.mean_absolute == 0 and np.isnan(e.mean_relative) and np.isnan(e.relative_l2)


def test_papers_kernel_truncates_every_second_interval():
    tree = DATA_TYPES["dynamic_tree"]
    table = tree.values[129:255]
    for i in (60, 61, 100, 101):
        x = np.array([1, table[i] + 0.9 * (table[i + 1] - table[i])], np.float32)
        nearest = errors.approximate(x, tree, None)[1]
        paper = errors.approximate(x, tree, None, rounding="paper")[1]
        assert nearest == table[i + 1]
        assert paper == table[i + i % 2]


def test_fixed_exponents_saturate():
    x = np.array([-1000, 1000, 10], np.float32)
    assert errors.approximate(x, "mantissa", None, normalization="paper").tolist() == pytest.approx([-150, 150, 10])
    assert errors.approximate(x, "static_tree", None, normalization="paper").tolist()[:2] == [-92.25, 92.25]


def test_sample_is_seeded_and_as_asked():
    a, b, c = (errors.sample("normal:3,0.5", 100_000, seed) for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).any() and a.dtype == np.float32
    assert a.mean() == pytest.approx(3, abs=0.01) and a.std() == pytest.approx(0.5, abs=0.01)
    u = errors.sample("uniform:-2,4", 100_000)
    assert u.min() >= -2 and u.max() <= 4 and u.mean() == pytest.approx(1, abs=0.02)


def test_table_names_what_it_measured():
    x = errors.sample("uniform", 1000)
    rows = [errors.measure(x, "mine", name, 256) for name in TYPES]
    lines = errors.table(rows).splitlines()
    assert len(lines) == 5 and all("mine" in line and "256" in line for line in lines[1:])
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows]))[1]["data_type"] == "linear"


@pytest.mark.parametrize(
    "distribution", ["cauchy", "uniform:1,0", "uniform:0", "normal:0,-1", "normal:0,0", "normal:a,b", "normal:0,inf"]
)
def test_bad_distribution_is_named(distribution):
    with pytest.raises(ValueError, match=f"distribution='{distribution}'.*uniform:LOW,HIGH"):
        errors.sample(distribution)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounding": "up"}, "rounding='up'.*nearest"),
        ({"normalization": "none"}, "normalization='none'.*absmax"),
        ({"block_size": 3}, "block_size=3"),
        ({"data_type": "int8"}, "data_type='int8'"),
        ({"data_type": DataType("own", np.linspace(-1, 1, 256)), "rounding": "paper"}, "rounding='paper'.*'own'"),
    ],
)
def test_bad_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        errors.approximate(np.ones(4, np.float32), **change)


def test_bad_samples_and_numbers():
    with pytest.raises(ValueError, match="samples=0"):
        errors.sample("normal", 0)
    for bad in ([], [1, np.nan], [np.inf]):
        with pytest.raises(ValueError, match="mine: errors need"):
            errors.measure(np.array(bad, np.float32), "mine")


def test_load(tmp_path):
    np.save(tmp_path / "good.npy", np.arange(6, dtype=np.float64).reshape(2, 3))
    assert errors.load(tmp_path / "good.npy").tolist() == [0, 1, 2, 3, 4, 5]
    np.save(tmp_path / "nan.npy", np.array([1.0, np.nan]))
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    (tmp_path / "junk.npy").write_text("not an array")
    for name, message in [
        ("nan", "NaN"),
        ("empty", "no numbers"),
        ("text", "real numbers"),
        ("junk", "cannot be read"),
        ("none", "cannot be read"),
    ]:
        with pytest.raises(ValueError, match=message):
            errors.load(tmp_path / f"{name}.npy")
    with pytest.raises(ValueError, match="several arrays"):
        errors.load(tmp_path / "several.npz")


def test_needs_neither_tensorflow_nor_horovod():
    code = "import sys, hvd_eightbit.speedup.errors; assert not {'tensorflow', 'horovod'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [errors.measure(errors.sample("normal", 1000), "normal", name) for name in TYPES]
    errors.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
