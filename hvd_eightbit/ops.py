"""The compiled TensorFlow ops as typed Python functions: loads the library, checks arguments.

What each op computes is defined, bit for bit, by `hvd_eightbit.reference`.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence

import tensorflow as tf

from hvd_eightbit import wire
from hvd_eightbit.data_types import DataType
from hvd_eightbit.data_types import get as get_data_type

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

_LIBRARY = pathlib.Path(__file__).with_name("_tf_ops.so")
_BUILD = pathlib.Path(__file__).with_name("_build.json")
_REBUILD = (
    "build it again for this TensorFlow with `pip install --force-reinstall --no-deps --no-cache-dir --no-binary "
    "hvd-eightbit hvd-eightbit`, or `pip install .` in its source folder"
)


@functools.cache
def library():
    """The op library, loaded on first use.

    Raises:
        ImportError: if it was not built, was built for another TensorFlow, or does not load; the message says which
            TensorFlow and how to build it again.
    """
    if not _LIBRARY.exists() or not _BUILD.exists():
        raise ImportError(
            f"the op library of hvd_eightbit is not built ({_LIBRARY} is missing): run `pip install .` in the source "
            "folder, with the TensorFlow that you use installed"
        )
    built_for = json.loads(_BUILD.read_text())["tensorflow"]
    if built_for.split(".")[:2] != tf.__version__.split(".")[:2]:
        raise ImportError(
            f"the op library of hvd_eightbit was built for TensorFlow {built_for}, but TensorFlow {tf.__version__} is "
            f"installed: {_REBUILD}"
        )
    try:
        return tf.load_op_library(str(_LIBRARY))
    except (tf.errors.NotFoundError, OSError) as error:
        raise ImportError(
            f"the op library of hvd_eightbit, built for TensorFlow {built_for}, does not load into TensorFlow "
            f"{tf.__version__}: {_REBUILD}. The loader says: {error}"
        ) from error


def check_dtype(dtype: tf.DType | str, name: str) -> tf.DType:
    """Returns dtype as a tf.DType.

    Raises:
        TypeError: if it is not one of float16, bfloat16, float32, float64; `name` is the argument's name.
    """
    dtype = tf.as_dtype(dtype)
    if dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype.name}, which cannot be coded in 8 bits: use {', '.join(d.name for d in DTYPES)}"
        )
    return dtype


def _attribute(block_size: int | None) -> int:
    """block_size as the ops have it: 0 for one block per tensor."""
    return wire.check_block_size(block_size) or 0


def _values(data_type: DataType) -> tf.Tensor:
    return tf.constant(data_type.values)


def quantize(
    x: tf.Tensor, data_type: str | DataType = "dynamic_tree", block_size: int | None = wire.DEFAULT_BLOCK_SIZE
) -> tuple[tf.Tensor, tf.Tensor]:
    """Codes a tensor in 8 bits (paper section 3.1, with the absolute maximum taken per block).

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        data_type: "dynamic_tree", "linear", "mantissa", "static_tree" or a DataType.
        block_size: consecutive elements that share an absolute maximum; None for the whole tensor, as in the paper.

    Returns:
        (codes, absmax): uint8 of x's shape, and float32[number of blocks]. A block with a NaN or an infinity has
        absmax NaN, and decodes to NaN.

    Raises:
        TypeError, ValueError: for a dtype, data type or block size that is not known.
    """
    x = tf.convert_to_tensor(x)
    check_dtype(x.dtype, "x")
    values = _values(get_data_type(data_type))
    result = library().eight_bit_quantize(x, values, block_size=_attribute(block_size))
    return result.codes, result.absmax


def dequantize(
    codes: tf.Tensor,
    absmax: tf.Tensor,
    data_type: str | DataType = "dynamic_tree",
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
    dtype: tf.DType | str = tf.float32,
) -> tf.Tensor:
    """The tensor that `quantize` coded.

    Args:
        codes: uint8, any shape.
        absmax: float32[number of blocks].
        data_type, block_size: as they were given to `quantize`.
        dtype: of the result: float16, bfloat16, float32 or float64.

    Returns:
        A tensor of codes' shape.

    Raises:
        TypeError, ValueError: for a dtype, data type or block size that is not known.
        tf.errors.InvalidArgumentError: if the number of absmax values is not that of the blocks.
    """
    values = _values(get_data_type(data_type))
    dtype = check_dtype(dtype, "dtype")
    return library().eight_bit_dequantize(codes, absmax, values, T=dtype, block_size=_attribute(block_size))


PROBE_SHAPE = (25,)


def probe(rank: tf.Tensor, fingerprint: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """What a compressor hands to Horovod's allreduce in place of a tensor: a few numbers (see tf_ops/agreement.h).

    Args:
        rank: int32 scalar, within the process set.
        fingerprint: a hash of what all ranks must agree on; its lowest 20 bits count.
        dtype: float32 or float64.
    """
    return library().eight_bit_probe(rank, T=dtype, fingerprint=fingerprint % 2**20)


def agreed_scale(reduced: tf.Tensor, ranks: tf.Tensor, fingerprint: int, what: str) -> tf.Tensor:
    """The scalar by which the reduction of a probe multiplies the mean over ranks: float32.

    Args:
        reduced: the reduced probe.
        ranks: int32 scalar, the number of ranks in the process set.
        fingerprint: as given to `probe`.
        what: what an error is about.

    Raises:
        tf.errors.InvalidArgumentError: if the reduction was not a sum or average over all of these ranks, or the
            fingerprints of the ranks differ. All ranks raise, or none.
    """
    return library().eight_bit_agreed_scale(reduced, ranks, fingerprint=fingerprint % 2**20, what=what)


def pack(
    tensors: Sequence[tf.Tensor], ranks: tf.Tensor, rank: tf.Tensor, data_type: DataType, block_size: int | None
) -> tf.Tensor:
    """One rank's messages to all: tensors of one dtype -> uint8[ranks, chunk_bytes] (see `wire`); the own row is zero.

    Args:
        tensors: one or more, all of the same floating dtype.
        ranks, rank: int32 scalars.
    """
    return library().eight_bit_pack(list(tensors), _values(data_type), ranks, rank, block_size=_attribute(block_size))


def reduce(
    received: tf.Tensor, tensors: Sequence[tf.Tensor], rank: tf.Tensor, data_type: DataType, block_size: int | None
) -> tf.Tensor:
    """Mean over ranks of this rank's chunk, coded: uint8[ranks, chunk_bytes] -> uint8[chunk_bytes].

    The own contribution is taken from `tensors`, those that were packed, and so is exact.
    """
    return library().eight_bit_reduce(
        received, list(tensors), _values(data_type), rank, block_size=_attribute(block_size)
    )


def unpack(
    gathered: tf.Tensor,
    like: Sequence[tf.Tensor],
    scale: tf.Tensor,
    data_type: DataType,
    block_size: int | None,
) -> list[tf.Tensor]:
    """The means times scale (float32 scalar): uint8[ranks, chunk_bytes] -> tensors of the shapes and dtype of `like`.

    Memory of a tensor in `like` that nothing else uses is used again for the result.
    """
    outputs = library().eight_bit_unpack(
        gathered, list(like), _values(data_type), scale, block_size=_attribute(block_size)
    )
    return list(outputs)
