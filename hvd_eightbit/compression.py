"""Horovod's Compressor interface: pass `compression=` to an unmodified Horovod program.

Horovod calls `compress(tensor)`, reduces what that returned with the user's op and factors, and gives the result to
`decompress`. Codes must not be summed, so `compress` only remembers the tensor and returns a probe, a few numbers;
`decompress` learns from the reduced probe what was asked for, and whether all ranks agree, and then runs the 8-bit
allreduce.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import weakref
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_eightbit import collectives, ops, wire
from hvd_eightbit.data_types import DataType
from hvd_eightbit.data_types import get as get_data_type
from hvd_eightbit.feedback import ErrorFeedback

DEFAULT_MIN_ELEMENTS = 16384


class _Group:
    """The tensors compressed since the last decompression: one exchange serves them all.

    For a single allreduce that is one tensor; for grouped_allreduce, `num_groups` or `groups`, Horovod compresses all
    of a group before it decompresses the first.
    """

    def __init__(self, compressor: EightBitCompressor):
        self._compressor = compressor
        self._tensors: list[tf.Tensor] = []
        self._outputs: list[tf.Tensor] | None = None

    @property
    def is_open(self) -> bool:
        return self._outputs is None

    def add(self, tensor: tf.Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def close(self) -> None:
        """Nothing is added any more; the tensors are taken out."""
        self._outputs, self._tensors = [], []

    def output(self, index: int, scale: tf.Tensor) -> tf.Tensor:
        if self._outputs is None:
            c = self._compressor
            name = collectives.unique_name(self._tensors, "exchange")
            self._outputs = collectives.scaled_mean(self._tensors, scale, c.data_type, c.block_size, c.ranks, name)
            self._tensors = []
        return self._outputs[index]


@dataclasses.dataclass(frozen=True)
class _Context:
    """What decompress needs of compress."""

    group: _Group
    index: int
    world: collectives.World
    fingerprint: int
    what: str


class _OpenGroups(threading.local):
    """The group that this thread is filling, for each compressor, graph, dtype and device.

    A group lives as long as the contexts of its tensors: should Horovod raise between compress and decompress, it is
    gone, and its tensors are not taken into the next exchange.
    """

    def __init__(self):
        self._groups: weakref.WeakValueDictionary[Any, _Group] = weakref.WeakValueDictionary()

    def get(self, compressor: EightBitCompressor, tensor: tf.Tensor) -> _Group:
        graph = None if tf.executing_eagerly() else id(tf.compat.v1.get_default_graph())
        key = (compressor, graph, tensor.dtype, tensor.device)
        group = self._groups.get(key)
        if group is None or not group.is_open:
            group = self._groups[key] = _Group(compressor)
        return group


_open_groups = _OpenGroups()


@dataclasses.dataclass(frozen=True)
class EightBitCompressor:
    """A Horovod compressor: gradients cross the wire as 8-bit codes (Dettmers 2016), a quarter of float32's bytes.

    Give an instance to `compression=` of hvd.allreduce, hvd.grouped_allreduce, hvd.DistributedGradientTape or
    hvd.DistributedOptimizer, with op Average or Sum. Immutable and hashable, as Horovod needs it.

    Args:
        data_type: "dynamic_tree" (default), "linear", "mantissa", "static_tree" or a DataType of your own.
        block_size: consecutive elements that share an absolute maximum, at least 16; None for one per tensor and chunk.
        min_elements: smaller tensors are reduced by Horovod uncoded (float16 and bfloat16 in float32, since Horovod
            has no bfloat16, and groups one dtype only): they cost time rather than bytes.
        exclude: regular expressions; a tensor whose name one of them matches (re.search) is reduced by Horovod uncoded.
            Names are those in the graph, as `tensor.name` gives them; eager tensors have none.
        process_set: the hvd.ProcessSet that the collective runs in, if it is not the global one.
        error_feedback: add to each gradient what the codes lost of the one before (see `feedback`). That is state for
            each variable, and Horovod does not tell a compressor which variable a gradient is of: to be used with
            hvd_eightbit.keras.DistributedOptimizer, in training loops of your own too, or by `for_variable`.

    Raises:
        TypeError, ValueError: for an argument that will not do.
        tf.errors.InvalidArgumentError: on every rank, while training, if the op is not a sum or an average, the
            collective runs in another process set, or the ranks' settings differ.

    Tensors that are not floating point are reduced by Horovod as they are; so is everything where there is one rank.
    """

    data_type: str | DataType = "dynamic_tree"
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE
    min_elements: int = DEFAULT_MIN_ELEMENTS
    exclude: tuple[str, ...] = ()
    process_set: hvd.ProcessSet | None = None
    error_feedback: bool = False

    def __post_init__(self):
        object.__setattr__(self, "data_type", get_data_type(self.data_type))
        wire.check_block_size(self.block_size)
        if isinstance(self.min_elements, bool) or not isinstance(self.min_elements, int) or self.min_elements < 0:
            raise ValueError(f"min_elements={self.min_elements!r}: expected an integer of 0 or more")
        if isinstance(self.exclude, str):
            raise TypeError(
                f"exclude={self.exclude!r}: expected a sequence of regular expressions, such as ({self.exclude!r},)"
            )
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"exclude={self.exclude!r}: {pattern!r} is not a regular expression: {error}"
                ) from None
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.process_set is not None and not isinstance(self.process_set, hvd.ProcessSet):
            raise TypeError(f"process_set={self.process_set!r}: expected a hvd.ProcessSet, or None for all ranks")

        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"error_feedback={self.error_feedback!r}: expected True or False")

    def for_variable(self, shape: tf.TensorShape, dtype: tf.DType | str = tf.float32) -> Any:
        """With error_feedback, a compressor for the gradient of one variable of this shape and dtype; else this one."""
        if not self.error_feedback:
            return self
        if isinstance(collectives.world(self.ranks).ranks, tf.Tensor):
            raise ValueError("error_feedback=True in an elastic job: the error belongs to a fixed number of ranks")
        return ErrorFeedback(dataclasses.replace(self, error_feedback=False), tf.TensorShape(shape), tf.as_dtype(dtype))

    @property
    def ranks(self) -> hvd.ProcessSet:
        return hvd.global_process_set if self.process_set is None else self.process_set

    def _passes_by(self, tensor: tf.Tensor) -> bool:
        """Whether Horovod reduces the tensor uncoded. The same on all ranks: it depends on nothing else."""
        elements = tensor.shape.num_elements()
        if elements is not None and elements < self.min_elements:
            return True
        if self.exclude and not tf.executing_eagerly():
            return any(re.search(pattern, tensor.name) for pattern in self.exclude)
        return False

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Called by Horovod: (what it is to allreduce, what decompress needs)."""
        if self.error_feedback:
            raise RuntimeError(
                "error_feedback=True: Horovod does not tell a compressor which variable a gradient is of, and each has "
                "an error of its own. Use hvd_eightbit.keras.DistributedOptimizer (Keras 3), also in a training loop "
                "of your own, or hvd.allreduce with compression=compressor.for_variable(shape), one for each variable"
            )
        tensor = tf.convert_to_tensor(tensor)
        world = collectives.world(self.ranks)
        if tensor.dtype not in ops.DTYPES or (isinstance(world.ranks, int) and world.ranks == 1):
            return tensor, None
        # Horovod groups tensors of one dtype: probes and what passes by have the same.
        wire_dtype = tf.float64 if tensor.dtype == tf.float64 else tf.float32
        if self._passes_by(tensor):
            return tf.cast(tensor, wire_dtype), tensor.dtype
        what = "a tensor" if tf.executing_eagerly() else tensor.name
        name = collectives.unique_name([tensor], "probe")
        fingerprint = collectives.fingerprint(tensor, self.data_type, self.block_size, name)
        group = _open_groups.get(self, tensor)
        context = _Context(group, group.add(tensor), world, fingerprint, what)
        # Not before the tensor is there: the iterations of a loop must not overtake one another (names are taken once).
        with tf.name_scope(name or "eightbit_probe"), tf.control_dependencies([tensor]):
            return ops.probe(world.rank, fingerprint, wire_dtype), context

    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Called by Horovod with the reduced probe and what compress gave: the reduced gradient."""
        if ctx is None:
            return tensor
        if isinstance(ctx, tf.DType):
            return tf.cast(tensor, ctx)
        return ctx.group.output(ctx.index, self.agreed_scale(tensor, ctx))

    def agreed_scale(self, reduced: tf.Tensor, ctx: _Context) -> tf.Tensor:
        """What the reduction of a probe amounts to, by which the mean is to be multiplied: a float32 scalar.

        Raises:
            ValueError: for a reducescatter.
        """
        if reduced.shape.rank is not None and not reduced.shape.is_compatible_with(ops.PROBE_SHAPE):
            raise ValueError(
                f"8-bit compression of {ctx.what}: only an allreduce can be compressed; hvd.reducescatter and "
                "hvd.grouped_reducescatter cannot"
            )
        return ops.agreed_scale(reduced, ctx.world.ranks, ctx.fingerprint, ctx.what)


class Compression:
    """Ready-made compressors, to be used like hvd.Compression.fp16: the data types of the paper in blocks of 2048."""

    dynamic_tree = EightBitCompressor("dynamic_tree")
    linear = EightBitCompressor("linear")
    mantissa = EightBitCompressor("mantissa")
    static_tree = EightBitCompressor("static_tree")
