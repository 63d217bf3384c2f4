"""The approximation errors of the data types: the paper's table 2 for any type, block size and distribution.

By default a tensor goes through the codec as a gradient does: blocks, absolute maximum, nearest value. The paper's
table was made in another way, which `rounding="paper"` and `normalization="paper"` repeat; its column "mean absolute
error" is, but for one row, the mean squared error.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from hvd_eightbit import reference, wire
from hvd_eightbit.data_types import DATA_TYPES, DataType
from hvd_eightbit.data_types import get as get_data_type
from hvd_eightbit.speedup.plotting import pyplot

# The paper draws 25 million numbers from each: uniform in (0, 1), and normal with standard deviations 1, 10 and 0.2.
PAPER_DISTRIBUTIONS = ("uniform:0,1", "normal:0,1", "normal:0,10", "normal:0,0.2")
DEFAULT_SAMPLES = 1_000_000
MAX_SAMPLES = 2**28

ROUNDINGS = ("nearest", "paper")
NORMALIZATIONS = ("absmax", "paper")

# What the largest magnitude of the types with a fixed exponent stands for in the paper: 15 x 10 and 9.225 x 10.
FIXED_SCALE = {"mantissa": 150.0, "static_tree": 92.25}
# The paper's kernel: below the first a number becomes zero, above the second the absolute maximum.
_PAPER_ZERO, _PAPER_ONE = np.float32(1.5e-6), np.float32(0.990703)
_PIECE = 2**22


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of one data type on one set of numbers.

    `mean_relative` is the mean of |error| / |x| over the x that are not zero, as a fraction (not percent);
    `relative_l2` is the norm of the errors over the norm of x. Both are NaN where every x is zero.
    """

    data: str
    data_type: str
    block_size: int | None
    rounding: str
    normalization: str
    elements: int
    mean_absolute: float
    mean_squared: float
    mean_relative: float
    relative_l2: float


def sample(distribution: str, samples: int = DEFAULT_SAMPLES, seed: int = 0) -> np.ndarray:
    """Random numbers: float32[samples].

    Args:
        distribution: "uniform:LOW,HIGH" or "normal:MEAN,STANDARD_DEVIATION"; the name alone takes 0,1.
        samples: how many, at least 1.
        seed: of the generator.

    Raises:
        ValueError: for a distribution that is not known or has impossible parameters, or a bad number of samples.
    """
    expected = 'use "uniform:LOW,HIGH" with LOW < HIGH, or "normal:MEAN,STANDARD_DEVIATION" with a positive deviation'
    name, _, text = distribution.partition(":")
    try:
        first, second = (float(part) for part in (text or "0,1").split(","))
    except ValueError:
        raise ValueError(f"distribution={distribution!r}: {expected}") from None
    if not 1 <= samples <= MAX_SAMPLES:
        raise ValueError(f"samples={samples} must be from 1 to {MAX_SAMPLES}")
    finite = math.isfinite(first) and math.isfinite(second)
    generator = np.random.default_rng(seed)
    if name == "uniform" and finite and first < second:
        return generator.random(samples, np.float32) * np.float32(second - first) + np.float32(first)
    if name == "normal" and finite and second > 0:
        return generator.standard_normal(samples, np.float32) * np.float32(second) + np.float32(first)
    raise ValueError(f"distribution={distribution!r}: {expected}")


def load(path: str | pathlib.Path) -> np.ndarray:
    """The numbers of a .npy file, flat, as float32.

    Raises:
        ValueError: if the file is missing or no .npy file, holds no real numbers, or holds NaN or infinities.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a .npy file, as np.save(file, array) writes: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} holds {getattr(array, 'dtype', 'several arrays')}; an array of real numbers is needed"
        )
    if array.size == 0:
        raise ValueError(f"{path} holds no numbers: its shape is {array.shape}")
    with np.errstate(over="ignore"):
        flat = array.ravel().astype(np.float32)
    if not np.isfinite(flat).all():
        raise ValueError(f"{path} holds NaN, infinities or numbers beyond float32, for which an error is not defined")
    return flat


def _paper_magnitudes(a: np.ndarray, data_type: DataType) -> np.ndarray:
    """What the paper's kernel makes of magnitudes in [0, 1].

    Its binary search compares with every second entry of the table. Where the number then lies above the entry in
    between, it is not compared with the one after: such intervals truncate, and only the others round to the nearest.
    The dynamic tree's search goes over 126 entries, zero and one being codes apart; the others' over 128.
    """
    table = data_type.values[128:]
    is_dynamic = data_type.name == "dynamic_tree"
    if is_dynamic:
        table = table[1:-1]
    below = np.clip(np.searchsorted(table, a, side="right") - 1, 0, len(table) - 2)
    rounds = below % 2 == (1 if is_dynamic else 0)
    up = rounds & (a > (table[below] + table[below + 1]) / 2)
    result = table[below + up]
    result[a >= table[-1]] = table[-1]
    if data_type.name not in FIXED_SCALE:
        result[a < _PAPER_ZERO] = 0
        result[a > _PAPER_ONE] = 1
    return result


def approximate(
    x: np.ndarray,
    data_type: str | DataType = "dynamic_tree",
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
    rounding: str = "nearest",
    normalization: str = "absmax",
) -> np.ndarray:
    """Numbers after coding and decoding: float32[n] -> float32[n].

    Args:
        x: finite numbers, one dimension.
        data_type: "dynamic_tree", "linear", "mantissa", "static_tree" or a DataType.
        block_size: consecutive elements that share an absolute maximum; None for all, as in the paper.
        rounding: "nearest", as our kernels do; or "paper", as the paper's kernel did, which truncates in half of its
            intervals (only for the four named types).
        normalization: "absmax"; or "paper": mantissa and static tree take numbers up to 150 and 92.25 as they are, and
            saturate above, while the other two are divided by their absolute maximum.

    Raises:
        ValueError, TypeError: for arguments other than these.
    """
    data_type, block_size = get_data_type(data_type), wire.check_block_size(block_size)
    for name, value, known in (("rounding", rounding, ROUNDINGS), ("normalization", normalization, NORMALIZATIONS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known: use one of {', '.join(known)}")
    if rounding == "paper" and DATA_TYPES.get(data_type.name) != data_type:
        raise ValueError(
            f"rounding='paper' is defined for {', '.join(DATA_TYPES)}, not for the data type {data_type.name!r}"
        )
    x = np.ascontiguousarray(x, np.float32).ravel()
    is_fixed = normalization == "paper" and data_type.name in FIXED_SCALE
    if rounding == "nearest" and not is_fixed:
        codes, absmax = reference.quantize(x, data_type, block_size)
        return reference.dequantize(codes, absmax, data_type, block_size)
    step = x.size if block_size is None or is_fixed else block_size
    result = np.empty_like(x)
    for begin in range(0, x.size, max(step, 1)):
        block = x[begin : begin + step]
        scale = np.float32(FIXED_SCALE[data_type.name]) if is_fixed else reference.block_absmax(block)
        if scale == 0:
            decoded = np.zeros_like(block)
        elif rounding == "nearest":
            decoded = reference.decode_block(reference.encode_block(block, scale, data_type), scale, data_type)
        else:
            decoded = np.copysign(_paper_magnitudes(np.abs(block) / scale, data_type) * scale, block)
        result[begin : begin + step] = decoded
    return result


def measure(
    x: np.ndarray,
    data: str,
    data_type: str | DataType = "dynamic_tree",
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
    rounding: str = "nearest",
    normalization: str = "absmax",
) -> Errors:
    """The Errors of a data type on numbers x; `data` is what to call them, the rest as in `approximate`."""
    x = np.ascontiguousarray(x, np.float32).ravel()
    if x.size == 0 or not np.isfinite(x).all():
        raise ValueError(f"{data}: errors need one or more numbers, all of them finite")
    y = approximate(x, data_type, block_size, rounding, normalization)
    absolute = squared = relative = norm = nonzero = 0.0
    for begin in range(0, x.size, _PIECE):
        exact = x[begin : begin + _PIECE].astype(np.float64)
        error = np.abs(y[begin : begin + _PIECE] - exact)
        exact = np.abs(exact)
        absolute += error.sum()
        squared += np.square(error).sum()
        norm += np.square(exact).sum()
        there = exact > 0
        relative += (error[there] / exact[there]).sum()
        nonzero += there.sum()
    return Errors(
        data=data,
        data_type=get_data_type(data_type).name,
        block_size=block_size,
        rounding=rounding,
        normalization=normalization,
        elements=int(x.size),
        mean_absolute=float(absolute / x.size),
        mean_squared=float(squared / x.size),
        mean_relative=float(relative / nonzero) if nonzero else math.nan,
        relative_l2=math.sqrt(squared / norm) if norm else math.nan,
    )


def table(rows: Iterable[Errors]) -> str:
    """The errors as text, a line each."""
    columns = f"{'mean abs':>12}{'mean squared':>14}{'mean rel %':>12}{'rel L2 %':>10}"
    lines = [f"{'data':<22}{'data type':<15}{'block':>7}{columns}"]
    for e in rows:
        block = "all" if e.block_size is None else str(e.block_size)
        lines.append(
            f"{e.data:<22}{e.data_type:<15}{block:>7}{e.mean_absolute:12.4g}{e.mean_squared:14.4g}"
            f"{100 * e.mean_relative:12.3f}{100 * e.relative_l2:10.3f}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Errors], file: str | pathlib.Path) -> None:
    """Bars of the mean relative error and the relative L2 error, by data and data type; the suffix gives the format.

    Raises:
        ImportError: without matplotlib.
        ValueError: for a format that matplotlib does not write.
    """
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    data = list(dict.fromkeys(e.data for e in rows))
    kinds = list(dict.fromkeys(e.data_type for e in rows))
    values = {(e.data, e.data_type): e for e in rows}
    width = 0.8 / len(kinds)
    for axis, field, title in (
        (axes[0], "mean_relative", "mean relative error, %"),
        (axes[1], "relative_l2", "relative L2 error, %"),
    ):
        for i, kind in enumerate(kinds):
            heights = [100 * getattr(values[d, kind], field) if (d, kind) in values else 0 for d in data]
            axis.bar([j + (i - (len(kinds) - 1) / 2) * width for j in range(len(data))], heights, width, label=kind)
        axis.set_xticks(range(len(data)), data)
        axis.set_title(title)
    axes[0].legend()
    figure.savefig(file)
