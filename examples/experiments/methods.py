"""The methods that are compared: Horovod compressors, one for each variable, so that each may keep an error.

Those of other authors are built from plain TensorFlow ops and Horovod's allgather, and send as few bytes as they claim:
in `compress` they exchange their codes, and Horovod's allreduce gets one number. Average only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_eightbit as eightbit

MIN_ELEMENTS = 16384  # smaller gradients, biases in the first place, stay float32 in all methods
BLOCK = 2048  # elements that share a scale in the stochastic method


class _Gathered:
    """Codes a gradient, gathers all ranks' codes, and adds up what they decode to.

    Args:
        shape: of the gradient.
        seed: of random numbers; another one on each rank.
    """

    def __init__(self, shape: tf.TensorShape, seed: int):
        self._shape = shape
        self._size = shape.num_elements()
        self._seed = seed

    def compress(self, gradient: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if self._size < MIN_ELEMENTS:
            return gradient, None
        messages = hvd.allgather(self.encode(gradient)[tf.newaxis])
        return tf.zeros([1]), tf.add_n([self.decode(messages[r]) for r in range(hvd.size())]) / hvd.size()

    def decompress(self, reduced: tf.Tensor, mean: Any) -> tf.Tensor:
        if mean is None:
            return reduced
        with tf.control_dependencies([reduced]):
            return tf.identity(mean)

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        """float32 gradient -> uint8[bytes]."""
        raise NotImplementedError

    def decode(self, message: tf.Tensor) -> tf.Tensor:
        """uint8[bytes] -> float32 gradient."""
        raise NotImplementedError


class OneBit(_Gathered):
    """1-bit SGD with error feedback (Seide et al. 2014): a bit a number, and for each column the means of both signs.

    The error that a rank makes is added to its next gradient. As all ranks get all codes, there is no second coding of
    the sum as in the original, and with more than 2 ranks more bytes: (N - 1) / 8 an element.
    """

    def __init__(self, shape: tf.TensorShape, seed: int):
        super().__init__(shape, seed)
        self._columns = shape[-1]
        self._error = tf.Variable(tf.zeros(shape), trainable=False) if self._size >= MIN_ELEMENTS else None

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        gradient = gradient + self._error
        flat = tf.reshape(gradient, [-1, self._columns])
        positive = flat >= 0
        count = tf.reduce_sum(tf.cast(positive, tf.float32), axis=0)
        above = tf.math.divide_no_nan(tf.reduce_sum(tf.nn.relu(flat), axis=0), count)
        below = -tf.math.divide_no_nan(tf.reduce_sum(tf.nn.relu(-flat), axis=0), len_of(flat) - count)
        bits = tf.cast(tf.reshape(positive, [-1]), tf.int32)
        bits = tf.reshape(tf.pad(bits, [[0, -self._size % 8]]), [-1, 8])
        octets = tf.cast(tf.reduce_sum(bits * tf.constant([1, 2, 4, 8, 16, 32, 64, 128]), axis=1), tf.uint8)
        levels = tf.reshape(tf.bitcast(tf.concat([above, below], axis=0), tf.uint8), [-1])
        message = tf.concat([octets, levels], axis=0)
        self._error.assign(gradient - self.decode(message))
        return message

    def decode(self, message: tf.Tensor) -> tf.Tensor:
        octets = tf.cast(message[: -8 * self._columns], tf.int32)
        levels = tf.bitcast(tf.reshape(message[-8 * self._columns :], [2, self._columns, 4]), tf.float32)
        bits = tf.bitwise.right_shift(octets[:, tf.newaxis], tf.range(8)[tf.newaxis]) & 1
        positive = tf.reshape(tf.reshape(bits, [-1])[: self._size], [-1, self._columns]) > 0
        return tf.reshape(tf.where(positive, levels[0], levels[1]), self._shape)


class Stochastic(_Gathered):
    """Linear 8 bits with stochastic rounding, so without a bias: QSGD (Alistarh et al. 2017) with 127 levels.

    Scaled by the absolute maximum of each block of 2048, where QSGD has the norm of a bucket. (N - 1) bytes an element.
    """

    def encode(self, gradient: tf.Tensor) -> tf.Tensor:
        blocks = tf.reshape(tf.pad(tf.reshape(gradient, [-1]), [[0, -self._size % BLOCK]]), [-1, BLOCK])
        scale = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True)
        noise = tf.random.uniform(tf.shape(blocks), seed=self._seed)
        codes = tf.floor(tf.math.divide_no_nan(blocks, scale) * 127 + noise)
        codes = tf.cast(tf.clip_by_value(codes, -127, 127), tf.int8)
        return tf.concat([tf.reshape(tf.bitcast(x, tf.uint8), [-1]) for x in (codes, scale)], axis=0)

    def decode(self, message: tf.Tensor) -> tf.Tensor:
        blocks = -(-self._size // BLOCK)
        codes = tf.cast(tf.bitcast(message[: blocks * BLOCK], tf.int8), tf.float32)
        scale = tf.bitcast(tf.reshape(message[blocks * BLOCK :], [-1, 1, 4]), tf.float32)
        flat = tf.reshape(tf.reshape(codes, [-1, BLOCK]) * (scale / 127), [-1])
        return tf.reshape(flat[: self._size], self._shape)


def len_of(matrix: tf.Tensor) -> float:
    return float(matrix.shape[0])


def _ours(data_type: str, block_size: int | None = BLOCK) -> Callable:
    compressor = eightbit.EightBitCompressor(data_type, block_size=block_size, min_elements=MIN_ELEMENTS)
    return lambda shape, seed: compressor


def _with_feedback(shape: tf.TensorShape, seed: int):
    compressor = eightbit.EightBitCompressor("dynamic_tree", min_elements=MIN_ELEMENTS, error_feedback=True)
    return compressor.for_variable(shape)


# Name -> what makes the compressor for a variable, given its shape and a seed.
METHODS: dict[str, Callable] = {
    "float32": lambda shape, seed: hvd.Compression.none,
    "fp16": lambda shape, seed: hvd.Compression.fp16,
    "dynamic_tree": _ours("dynamic_tree"),
    "linear": _ours("linear"),
    "mantissa": _ours("mantissa"),
    "static_tree": _ours("static_tree"),
    "dynamic_tree_256": _ours("dynamic_tree", 256),
    "dynamic_tree_whole": _ours("dynamic_tree", None),
    "dynamic_tree_feedback": _with_feedback,
    "stochastic": Stochastic,
    "one_bit": OneBit,
}
DATA_TYPES = {name: name for name in ("dynamic_tree", "linear", "mantissa", "static_tree")} | {"float32": None}
