"""Error feedback (Seide et al. 2014): what the codes lost of a gradient is added to the next one.

Both codings of an exchange are made up for by one tensor a rank. Of the parts that a rank sends to others it keeps what
their codes lost. Of its own part, which enters the mean exactly, it keeps what the coding of the mean lost, times the
number of ranks. So the sum of all results, plus the mean of the ranks' errors, is the sum of the exact means.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_eightbit import collectives, ops, wire
from hvd_eightbit.data_types import DataType


class ErrorFeedback(tf.Module):
    """A Horovod compressor for the gradient of one variable, from `EightBitCompressor.for_variable`.

    Give it to `compression=` of hvd.allreduce, for the gradient of this variable only, with Average or Sum. `error` is
    a tf.Variable of this rank, made here and never again, so that a tf.function may be traced as often as it likes; a
    tf.train.Checkpoint that holds this object, written by each rank, restores it. A gradient that is not finite on
    some rank leaves the error as it was on all ranks.

    Args:
        compressor: an EightBitCompressor without error feedback.
        shape: of the gradient, fully known.
        dtype: of the gradient. The error is float64 for float64, else float32.
    """

    def __init__(self, compressor: Any, shape: tf.TensorShape, dtype: tf.DType = tf.float32):
        super().__init__()
        self._compressor = compressor
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        self.error = tf.Variable(tf.zeros(shape, wide), trainable=False, name="eightbit_error")

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Called by Horovod, as EightBitCompressor.compress."""
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.shape.is_compatible_with(self.error.shape):
            raise ValueError(
                f"error_feedback=True: a gradient of shape {tensor.shape} for the error of one of {self.error.shape}; "
                "make one compressor for each variable"
            )
        name = "gradient" if tf.executing_eagerly() else tensor.op.name
        corrected = tf.add(tf.cast(tensor, self.error.dtype), self.error, name=f"{name.split('/')[-1]}_corrected")
        reduced, context = self._compressor.compress(corrected)
        return reduced, (context, corrected, tensor.dtype)

    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Called by Horovod, as EightBitCompressor.decompress."""
        context, corrected, dtype = ctx
        if context is None or isinstance(context, tf.DType):  # not coded, so nothing was lost
            return tf.cast(self._compressor.decompress(tensor, context), dtype)
        context.group.close()
        c = self._compressor
        scale = self._compressor.agreed_scale(tensor, context)
        name = collectives.unique_name([corrected], "exchange")
        result, error = mean_and_error(corrected, scale, c.data_type, c.block_size, c.ranks, name)
        # Equal on all ranks, since the result is: they all keep the new error, or none does.
        finite = tf.reduce_all(tf.math.is_finite(result))
        self.error.assign(tf.where(finite, error, self.error))
        return tf.cast(result, dtype)


def mean_and_error(
    tensor: tf.Tensor,
    scale: tf.Tensor,
    data_type: DataType,
    block_size: int | None,
    process_set: hvd.ProcessSet,
    name: str | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The five steps of `collectives.scaled_mean` for one tensor, and what they lost of it on this rank.

    Returns:
        (scale times the mean, the error), both of tensor's shape and dtype.
    """
    here = collectives.static_world(process_set)

    def named(step: str) -> str | None:
        return name and f"{name}_{step}"

    messages = ops.pack([tensor], here.ranks, here.rank, data_type, block_size)
    with tf.control_dependencies([scale]):  # nothing leaves before the ranks are known to agree
        received = collectives._alltoall(messages, here, process_set, named("alltoall"))
    mean = ops.reduce(received, [tensor], here.rank, data_type, block_size)
    gathered = collectives._allgather(mean, here, process_set, named("allgather"))
    (result,) = ops.unpack(gathered, [tensor], scale, data_type, block_size)

    (as_sent,) = ops.unpack(messages, [tensor], tf.constant(1.0), data_type, block_size)
    lost = tf.reshape(tensor - as_sent, [-1])
    layout = wire.layout([tensor.shape.num_elements()], here.ranks, block_size)
    for segment in layout.chunks[here.rank]:  # one, or none if the tensor is short
        begin, end = segment.begin, segment.begin + segment.elements

        def decode(message: tf.Tensor, segment: wire.Segment = segment) -> tf.Tensor:
            first = layout.chunk_elements + wire.ABSMAX_BYTES * segment.block
            last = first + wire.ABSMAX_BYTES * wire.blocks(segment.elements, block_size)
            absmax = tf.bitcast(tf.reshape(message[first:last], [-1, wire.ABSMAX_BYTES]), tf.float32)
            codes = message[segment.code : segment.code + segment.elements]
            return ops.dequantize(codes, absmax, data_type, block_size, tensor.dtype)

        others = [decode(received[r]) for r in range(here.ranks) if r != here.rank]
        exact_sum = tf.add_n([tf.reshape(tensor, [-1])[begin:end], *others])
        own = exact_sum - here.ranks * decode(mean)
        lost = tf.concat([lost[:begin], own, lost[end:]], axis=0)
    return result, tf.reshape(lost, tensor.shape)
