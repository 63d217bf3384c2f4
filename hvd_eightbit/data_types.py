"""The 8-bit data types: a name and 256 code values each (NumPy only).

A data type is a table of 256 ascending float32 values in [-1, 1]; a code is an index into it. The four types of the
paper (Dettmers 2016, section 3.1 and figure 1) are symmetric: 128 magnitudes and their negatives, zero counted twice.
They are scaled so that the largest magnitude is 1, because a block is always divided by its absolute maximum.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

CODES = 256


@dataclasses.dataclass(frozen=True, eq=False)
class DataType:
    """An 8-bit data type: 256 ascending values, so that a byte is an index to a value.

    Immutable, hashable and compared by name and values, so that it can be part of a Horovod compressor (Horovod caches
    on the compressor) and of a Keras configuration.

    Args:
        name: what messages and reports call it.
        values: 256 finite numbers in [-1, 1], ascending; neighbours may be equal. Kept as float32.

    Raises:
        ValueError: if there are not 256 values, or they are not finite, not ascending, all zero or outside [-1, 1].
    """

    name: str
    values: np.ndarray

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={self.name!r}: a data type needs a name, a string that is not empty")
        values = np.array(self.values, dtype=np.float32)
        if values.shape != (CODES,):
            raise ValueError(f"values of data type {self.name!r} have shape {values.shape}; {CODES} numbers are needed")
        if not np.isfinite(values).all():
            raise ValueError(f"values of data type {self.name!r} must be finite")
        if (np.diff(values) < 0).any():
            where = int(np.argmax(np.diff(values) < 0))
            raise ValueError(
                f"values of data type {self.name!r} must ascend; "
                f"values[{where}]={values[where]} is above values[{where + 1}]={values[where + 1]}"
            )
        if np.abs(values).max() > 1:
            raise ValueError(
                f"values of data type {self.name!r} must lie in [-1, 1], since a block is divided by its absolute "
                f"maximum; the largest is {np.abs(values).max()}: divide all by it"
            )
        if not values.any():
            raise ValueError(f"values of data type {self.name!r} are all zero: nothing could be told apart")
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    @functools.cached_property
    def midpoints(self) -> np.ndarray:
        """float32[255]: the borders between neighbouring codes, computed in float32 as every kernel does."""
        midpoints = (self.values[:-1] + self.values[1:]) * np.float32(0.5)
        midpoints.setflags(write=False)
        return midpoints

    @functools.cached_property
    def zero_code(self) -> int:
        """The code of zero: what an all-zero block, and a block with a NaN or an infinity, is filled with."""
        return int(np.searchsorted(self.midpoints, np.float32(0), side="left"))

    def __eq__(self, other):
        if not isinstance(other, DataType):
            return NotImplemented
        return self.name == other.name and self.values.tobytes() == other.values.tobytes()

    def __hash__(self):
        return hash((self.name, self.values.tobytes()))

    def __repr__(self):
        return f"DataType({self.name!r})"

    def __reduce__(self):
        return DataType, (self.name, np.array(self.values))


def _symmetric(name: str, magnitudes: np.ndarray) -> DataType:
    """A data type from 128 ascending magnitudes, the first of them zero; the largest becomes 1."""
    magnitudes = np.sort(magnitudes) / np.max(magnitudes)
    return DataType(name, np.concatenate([-magnitudes[::-1], magnitudes]).astype(np.float32))


def _dynamic_tree() -> DataType:
    """The paper's dynamic tree: leading zero bits give the decade, the bits behind the flag a bisection tree.

    Its author's tree on (0.1, 1) has its root at 0.45, not at the midpoint 0.55: with F leaves in a decade, half of
    them share [0.1, 0.45] and half [0.45, 1], each leaf valued at the middle of its interval. Six decades hold
    2, 4, ..., 64 leaves; the two bit patterns left over are zero and the absolute maximum itself.
    """
    magnitudes = [0.0, 1.0]
    for decade in range(6):
        half = 2 ** (5 - decade)
        leaf = np.arange(half) + 0.5
        mantissas = np.concatenate([0.1 + leaf * 0.35 / half, 0.45 + leaf * 0.55 / half])
        magnitudes.extend(mantissas * 10.0**-decade)
    return _symmetric("dynamic_tree", np.array(magnitudes))


def _linear() -> DataType:
    """The paper's linear quantization: 127 equal steps from 0 to the absolute maximum."""
    return _symmetric("linear", np.arange(128) / 127)


def _mantissa() -> DataType:
    """The paper's 3-bit base-10 exponent and 4-bit mantissa: k 10^e, so 128 codes but only 114 distinct magnitudes."""
    return _symmetric("mantissa", np.outer(10.0 ** np.arange(-6, 2), np.arange(16)).ravel())


def _static_tree() -> DataType:
    """The paper's static tree: a 3-bit base-10 exponent and a 4-bit bisection tree, the smallest value given to zero.

    Eight steps of 0.4375 and eight of 0.675 a decade, as in the author's table (without its two misprints).
    """
    mantissas = np.concatenate([1 + 0.4375 * np.arange(9), 4.5 + 0.675 * np.arange(1, 8)])
    magnitudes = np.outer(10.0 ** np.arange(-6, 2), mantissas).ravel()
    magnitudes[0] = 0
    return _symmetric("static_tree", magnitudes)


DYNAMIC_TREE = _dynamic_tree()
LINEAR = _linear()
MANTISSA = _mantissa()
STATIC_TREE = _static_tree()

DATA_TYPES = {data_type.name: data_type for data_type in (DYNAMIC_TREE, LINEAR, MANTISSA, STATIC_TREE)}


def get(data_type: str | DataType) -> DataType:
    """The data type of that name; a DataType is returned as it is.

    Raises:
        ValueError: for a name that is not one of DATA_TYPES.
        TypeError: for anything that is neither a name nor a DataType.
    """
    if isinstance(data_type, DataType):
        return data_type
    if not isinstance(data_type, str):
        raise TypeError(
            f"data_type={data_type!r}: expected a name ({', '.join(DATA_TYPES)}) or a DataType(name, values)"
        )
    if data_type not in DATA_TYPES:
        raise ValueError(
            f"data_type={data_type!r} is not known: use one of {', '.join(DATA_TYPES)}, "
            "or DataType(name, values) for a table of your own"
        )
    return DATA_TYPES[data_type]
