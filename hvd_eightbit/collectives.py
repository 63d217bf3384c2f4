"""The 8-bit allreduce, on top of Horovod's own collectives.

Codes are never summed by the network: each rank decodes what the others sent it for its chunk, adds in float32, and
codes the mean once. All ranks decode the same bytes, so their results are equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_eightbit import ops, wire
from hvd_eightbit.data_types import DataType
from hvd_eightbit.data_types import get as get_data_type


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks that take part: their number and the own one among them.

    Integers, or int32 scalars where an elastic job may change them while the program runs.
    """

    ranks: int | tf.Tensor
    rank: int | tf.Tensor


def world(process_set: hvd.ProcessSet) -> World:
    """The World of a process set.

    Raises:
        ValueError: if the process set is not registered with Horovod, or this rank is not in it.
    """
    if process_set.process_set_id is None:
        raise ValueError(
            f"process_set={process_set} is not registered: give it to hvd.init(process_sets=[...]), or call "
            "hvd.add_process_set(...)"
        )
    if os.environ.get("HOROVOD_ELASTIC", "0") != "0" and process_set.process_set_id == 0:
        return World(hvd.size_op(), hvd.rank_op())
    ranks = process_set.size()
    if not process_set.included():
        raise ValueError(f"process_set={process_set} does not include this rank, {hvd.rank()}")
    return World(ranks, process_set.rank())


def _normalize(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def unique_name(tensors: Sequence[tf.Tensor], kind: str) -> str | None:
    """A name for collectives on these tensors, the same on every rank: Horovod matches collectives by name.

    In a graph it is built from the name of the first tensor, and no other call on that graph gets it. Eager tensors
    have no names, and neither have Horovod's own eager collectives: None.
    """
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph().unique_name(f"eightbit_{kind}_{_normalize(tensors[0].name)}")


def fingerprint(tensor: tf.Tensor, data_type: DataType, block_size: int | None, name: str | None) -> int:
    """A hash of all that must be the same on every rank for an exchange of this tensor to succeed."""
    settings = (data_type.values.tobytes(), block_size, tensor.dtype.name, str(tensor.shape), name)
    return zlib.crc32(repr(settings).encode())


def scaled_mean(
    tensors: Sequence[tf.Tensor],
    scale: tf.Tensor,
    data_type: DataType,
    block_size: int | None,
    process_set: hvd.ProcessSet,
    name: str | None,
) -> list[tf.Tensor]:
    """The 8-bit allreduce of a bucket of tensors: scale times their mean over the ranks.

    1. pack: the bucket, seen as one flat vector, is cut into a chunk per rank; each is coded into a message.
    2. alltoall: every rank receives all ranks' versions of its own chunk.
    3. reduce: it decodes them, adds in float32, and codes the mean. Its own contribution is exact.
    4. allgather: every rank receives all means.
    5. unpack: it decodes them into tensors, times scale.

    Differentiable: the adjoint of a mean over ranks is the mean over ranks of the gradients, in 8 bits too.

    Args:
        tensors: one or more of one dtype (float16, bfloat16, float32 or float64), of any shapes, equal on all ranks.
        scale: float32 scalar; the exchange starts when it is there.
        data_type, block_size: the codec.
        process_set: the ranks that take part; all must call.
        name: of the collectives, from `unique_name`.

    Returns:
        Tensors of the same shapes and dtype, equal bit for bit on all ranks.
    """
    here = world(process_set)

    def named(step: str) -> str | None:
        return name and f"{name}_{step}"

    @tf.custom_gradient
    def exchange(*tensors: tf.Tensor):
        messages = ops.pack(tensors, here.ranks, here.rank, data_type, block_size)
        with tf.control_dependencies([scale]):  # nothing leaves before the ranks are known to agree
            received = _alltoall(messages, here, process_set, named("alltoall"))
        mean = ops.reduce(received, tensors, here.rank, data_type, block_size)
        gathered = _allgather(mean, here, process_set, named("allgather"))
        outputs = ops.unpack(gathered, tensors, scale, data_type, block_size)

        def gradient(*upstream: tf.Tensor):
            return scaled_mean(upstream, scale, data_type, block_size, process_set, named("gradient"))

        return outputs, gradient

    return list(exchange(*tensors))


def _alltoall(messages: tf.Tensor, here: World, process_set: hvd.ProcessSet, name: str | None) -> tf.Tensor:
    """uint8[ranks, bytes], row r for rank r -> the same, row r from rank r; the own row is without meaning."""
    if not _two_ranks_on_gloo(here):
        return hvd.alltoall(messages, name=name, process_set=process_set)
    others = _swap_by_sum(messages[1 - here.rank], process_set, name)
    return tf.stack([others, others])


def _allgather(message: tf.Tensor, here: World, process_set: hvd.ProcessSet, name: str | None) -> tf.Tensor:
    """uint8[bytes] -> uint8[ranks, bytes], of all ranks."""
    if not _two_ranks_on_gloo(here):
        return hvd.allgather(message[tf.newaxis], name=name, process_set=process_set)
    others = _swap_by_sum(message, process_set, name)
    return tf.stack([message, others] if here.rank == 0 else [others, message])


def _two_ranks_on_gloo(here: World) -> bool:
    """Whether _swap_by_sum is the faster way; the same on all ranks."""
    return isinstance(here.ranks, int) and here.ranks == 2 and hvd.gloo_enabled() and not hvd.nccl_built()


def _swap_by_sum(message: tf.Tensor, process_set: hvd.ProcessSet, name: str | None) -> tf.Tensor:
    """The message of the other of two ranks, of as many bytes: their sum as integers, less the own.

    In Gloo's alltoall and allgather a rank starts to send, and then says that it is ready to receive, in one queue: the
    other waits until it has all, and two ranks use their link in one direction at a time. Gloo's allreduce goes both
    ways at once and sends as many bytes; Horovod also fuses it, and needs no splits. Sums of int32 wrap around, so they
    are exact; those of uint8 are not everywhere (Open MPI's saturate).
    """
    own = tf.bitcast(tf.reshape(message, [-1, 4]), tf.int32)
    total = hvd.allreduce(own, op=hvd.Sum, name=name, process_set=process_set)
    return tf.reshape(tf.bitcast(total - own, tf.uint8), [-1])


def allreduce(
    tensors: tf.Tensor | Sequence[tf.Tensor],
    op: int | None = None,
    data_type: str | DataType = "dynamic_tree",
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
    process_set: hvd.ProcessSet | None = None,
    name: str | None = None,
) -> tf.Tensor | list[tf.Tensor]:
    """Reduces tensors over all ranks, in 8 bits whatever their size; a list of tensors is one exchange.

    Args:
        tensors: a tensor, or a list of tensors of one dtype (float16, bfloat16, float32 or float64), with the same
            shapes on all ranks.
        op: hvd.Average (default) or hvd.Sum.
        data_type: "dynamic_tree", "linear", "mantissa", "static_tree" or a DataType.
        block_size: consecutive elements that share an absolute maximum; None for a tensor's whole part of a chunk.
        process_set: the ranks that take part (default: all).
        name: of the operation; in a graph, from the first tensor's name by default.

    Returns:
        A tensor, or a list of tensors, like `tensors`.

    Raises:
        TypeError, ValueError: for a dtype, op, data type, block size or process set that will not do.
        tf.errors.InvalidArgumentError: if the ranks' settings differ, on all ranks.
    """
    op = hvd.Average if op is None else op
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"op={op!r}: only hvd.Average and hvd.Sum can be computed from 8-bit codes")
    data_type, block_size = get_data_type(data_type), wire.check_block_size(block_size)
    process_set = hvd.global_process_set if process_set is None else process_set
    is_list = isinstance(tensors, (list, tuple))
    bucket = [tf.convert_to_tensor(t) for t in (tensors if is_list else [tensors])]
    if not bucket:
        return []
    for i, tensor in enumerate(bucket):
        ops.check_dtype(tensor.dtype, f"tensors[{i}]" if is_list else "tensors")
        if tensor.dtype != bucket[0].dtype:
            raise TypeError(f"tensors[{i}] has dtype {tensor.dtype.name}, tensors[0] {bucket[0].dtype.name}: use one")

    here = world(process_set)
    if isinstance(here.ranks, int) and here.ranks == 1:
        return bucket if is_list else bucket[0]
    name = unique_name(bucket, "allreduce") if name is None else _normalize(name)
    mark = zlib.crc32(repr([fingerprint(t, data_type, block_size, name) for t in bucket]).encode())
    reduced = hvd.allreduce(ops.probe(here.rank, mark), op=op, name=name and f"{name}_probe", process_set=process_set)
    scale = ops.agreed_scale(reduced, here.ranks, mark, name or "tensors")
    outputs = scaled_mean(bucket, scale, data_type, block_size, process_set, name)
    return outputs if is_list else outputs[0]


# Model parallelism (paper section 2.2): activations and their gradients, between ranks.


@dataclasses.dataclass(frozen=True)
class Codec:
    """How a tensor crosses a boundary: as a message, one uint8 vector of codes and after them absmax values.

    Args:
        data_type: None for no compression: the message is the tensor's bytes.
        block_size: consecutive elements that share an absmax; None for a whole message.
    """

    data_type: DataType | None
    block_size: int | None

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        """A floating tensor of any shape -> uint8[bytes]."""
        flat = tf.reshape(x, [-1])
        if self.data_type is None:
            return tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
        codes, absmax = ops.quantize(flat, self.data_type, self.block_size)
        return tf.concat([codes, tf.reshape(tf.bitcast(absmax, tf.uint8), [-1])], axis=0)

    def decode(self, message: tf.Tensor, shape: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The tensor of this shape and dtype that was encoded."""
        if self.data_type is None:
            return tf.reshape(tf.bitcast(tf.reshape(message, [-1, dtype.size]), dtype), shape)
        elements = tf.reduce_prod(shape)
        absmax = tf.bitcast(tf.reshape(message[elements:], [-1, wire.ABSMAX_BYTES]), tf.float32)
        x = ops.dequantize(message[:elements], absmax, self.data_type, self.block_size, dtype)
        return tf.reshape(x, shape)

    def message_bytes(self, elements: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Bytes of the messages of so many elements each: int32, any shape."""
        if self.data_type is None:
            return elements * dtype.size
        blocks = tf.minimum(elements, 1) if self.block_size is None else -(-elements // self.block_size)
        return elements + wire.ABSMAX_BYTES * blocks


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What crosses between the ranks of one layer: a codec for activations, one for gradients, and who takes part."""

    forward: Codec
    backward: Codec
    process_set: hvd.ProcessSet

    @property
    def reversed(self) -> Boundary:
        """The boundary as the gradient sees it."""
        return Boundary(self.backward, self.forward, self.process_set)

    @property
    def here(self) -> World:
        return static_world(self.process_set)


def static_world(process_set: hvd.ProcessSet) -> World:
    """The World of a process set, in plain integers.

    Raises:
        ValueError: as `world`, and in elastic jobs: shards belong to a fixed number of ranks.
    """
    here = world(process_set)
    if not isinstance(here.ranks, int):
        raise ValueError("model parallelism in an elastic job: shards of weights belong to a fixed number of ranks")
    return here


def boundary_name(kind: str) -> str | None:
    """A name for a layer's collectives, the same on all ranks that trace the same layers in the same order.

    Not from names of layers or tensors: Keras numbers those as they are made, and a rank may have made more of them.
    To be used in `boundary_scope`. In eager mode None, as in `unique_name`.
    """
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph().unique_name(f"eightbit_{kind}").rpartition("/")[2]


def boundary_scope():
    """A name scope at the root, wherever it is entered: Horovod matches collectives by name, scopes included."""
    return tf.name_scope("model_parallel/")


def agree_on_rows(
    rows: tf.Tensor, sample_shape: tf.Tensor, mark: int, boundary: Boundary, name: str | None
) -> tf.Tensor:
    """The number of rows of each rank: int32[ranks], from a few bytes that the ranks tell each other.

    Args:
        rows: int32 scalar, of this rank.
        sample_shape: int32 vector that must be equal on all ranks.
        mark: a hash of everything else that must be equal.
        boundary: the ranks.
        name: of the collective.

    Raises:
        tf.errors.InvalidArgumentError: on all ranks, if they differ.
    """
    here = boundary.here
    with tf.device("/cpu:0"):  # a handful of integers, wanted on the host
        own = tf.concat([[rows], [mark % 2**31], sample_shape], axis=0)
        table = hvd.allgather(not_constant(own[tf.newaxis]), name=name, process_set=boundary.process_set)
        table = tf.ensure_shape(table, [here.ranks, None])
        check = tf.debugging.assert_equal(
            table[1:, 1:],
            table[:-1, 1:],
            "The ranks disagree about a model-parallel layer: all must use the same arguments (units, sub_batches, "
            "data types, block size), dtype and shape of a sample, and call their layers in the same order. Of each "
            "rank: a hash of the arguments, then the shape of a sample",
            summarize=1000,
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(table[:, 0])


def not_constant(x: tf.Tensor) -> tf.Tensor:
    """x, but no constant to TensorFlow's graph optimizer.

    Horovod's ops are not marked as stateful. The optimizer runs those of constant input once and for all, while it
    optimizes; on ranks with other static shapes it does so for others, and the ranks wait for each other forever.
    """
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=x.shape)


def _swap(parts, shapes, boundary: Boundary, name: str | None) -> list[tf.Tensor]:
    """Sends parts[r] to rank r; returns what the ranks sent, of these shapes. The own part stays, exact.

    The messages, one after the other, are one alltoall.
    """
    here, codec, dtype = boundary.here, boundary.forward, parts[0].dtype
    own = here.rank
    messages = [tf.zeros([0], tf.uint8) if r == own else codec.encode(part) for r, part in enumerate(parts)]
    with tf.device("/cpu:0"):
        elements = [tf.reduce_prod(shape) if r != own else tf.constant(0) for r, shape in enumerate(shapes)]
        sizes = codec.message_bytes(tf.stack(elements), dtype)
        splits = tf.stack([tf.size(message) for message in messages])
    message = tf.concat(messages, axis=0)
    if _two_ranks_on_gloo(here):
        received = _swap_of_unequal(message, sizes[1 - own], boundary.process_set, name)
    else:
        received, _ = hvd.alltoall(not_constant(message), splits, name=name, process_set=boundary.process_set)
    received = tf.split(received, sizes, num=here.ranks)
    return [
        parts[own] if r == own else codec.decode(message, shape, dtype)
        for r, (message, shape) in enumerate(zip(received, shapes))
    ]


def _swap_of_unequal(
    message: tf.Tensor, others_bytes: tf.Tensor, process_set: hvd.ProcessSet, name: str | None
) -> tf.Tensor:
    """The message of the other of two ranks, of so many bytes (int32), for this one: both are sent as the longer."""
    own_bytes = tf.size(message)
    longer = -(-tf.maximum(own_bytes, others_bytes) // 4) * 4
    padded = tf.pad(message, [[0, longer - own_bytes]])
    return _swap_by_sum(not_constant(padded), process_set, name)[:others_bytes]


def _shape(rows: tf.Tensor, like: tf.Tensor, width: int | None = None) -> tf.Tensor:
    """The shape of `like` with other rows (first dimension) and, if given, another width (last dimension)."""
    middle = tf.shape(like)[1:] if width is None else tf.concat([tf.shape(like)[1:-1], [width]], axis=0)
    return tf.concat([[rows], middle], axis=0)


def gather_batch(x: tf.Tensor, rows: tf.Tensor, boundary: Boundary, name: str | None) -> tf.Tensor:
    """The rows of all ranks, in rank order: an allgather of messages. Own rows are exact.

    Its gradient is `sum_rows`: the sum over the ranks of their gradients for the own rows.

    Args:
        x: [rows[rank], ...], the dimensions after the first equal on all ranks.
        rows: int32[ranks], from `agree_on_rows`.
        boundary: codecs and ranks.
        name: of the collective, unique in the graph and the same on all ranks; None in eager mode.

    Returns:
        [sum of rows, ...], of x's dtype.
    """
    here, codec = boundary.here, boundary.forward

    @tf.custom_gradient
    def gather(x: tf.Tensor):
        message, shapes = codec.encode(x), [_shape(rows[r], x) for r in range(here.ranks)]
        with tf.device("/cpu:0"):
            sizes = codec.message_bytes(tf.stack([tf.reduce_prod(shape) for shape in shapes]), x.dtype)
        if _two_ranks_on_gloo(here):
            others = _swap_of_unequal(message, sizes[1 - here.rank], boundary.process_set, name)
            messages = [message, others] if here.rank == 0 else [others, message]
        else:
            gathered = hvd.allgather(not_constant(message), name=name, process_set=boundary.process_set)
            messages = tf.split(gathered, sizes, num=here.ranks)
        parts = [
            x if r == here.rank else codec.decode(message, shape, x.dtype)
            for r, (message, shape) in enumerate(zip(messages, shapes))
        ]
        result = tf.ensure_shape(tf.concat(parts, axis=0), [None, *x.shape[1:]])

        def gradient(upstream: tf.Tensor):
            with boundary_scope():
                return sum_rows(upstream, rows, boundary.reversed, name and f"{name}_gradient")

        return result, gradient

    return gather(x)


def sum_rows(x: tf.Tensor, rows: tf.Tensor, boundary: Boundary, name: str | None) -> tf.Tensor:
    """The sum over ranks of their own tensors' rows for this rank: [sum of rows, ...] -> [rows[rank], ...].

    The adjoint of `gather_batch`, which is its gradient. Added in float32 (float64 for float64).
    """
    here = boundary.here

    @tf.custom_gradient
    def reduce(x: tf.Tensor):
        parts = tf.split(x, rows, num=here.ranks)
        shape = _shape(rows[here.rank], x)
        wide = tf.float64 if x.dtype == tf.float64 else tf.float32
        total = tf.add_n([tf.cast(p, wide) for p in _swap(parts, [shape] * here.ranks, boundary, name)])
        result = tf.ensure_shape(tf.cast(total, x.dtype), [None, *x.shape[1:]])

        def gradient(upstream: tf.Tensor):
            with boundary_scope():
                return gather_batch(upstream, rows, boundary.reversed, name and f"{name}_gradient")

        return result, gradient

    return reduce(x)


def exchange_features(
    x: tf.Tensor, rows: tf.Tensor, widths: Sequence[int], boundary: Boundary, name: str | None
) -> tf.Tensor:
    """Own features of all rows -> all features of the own rows, in rank order: an alltoall. The own part is exact.

    Its gradient is `exchange_rows`, the reverse.

    Args:
        x: [sum of rows, ..., widths[rank]].
        rows: int32[ranks], the rows that go to each rank.
        widths: the features that each rank has.
        boundary: codecs and ranks.
        name: of the collective, as in `gather_batch`.

    Returns:
        [rows[rank], ..., sum of widths], of x's dtype.
    """
    here = boundary.here

    @tf.custom_gradient
    def exchange(x: tf.Tensor):
        parts = tf.split(x, rows, num=here.ranks)
        shapes = [_shape(rows[here.rank], x, width) for width in widths]
        result = tf.concat(_swap(parts, shapes, boundary, name), axis=-1)
        result = tf.ensure_shape(result, [None, *x.shape[1:-1], sum(widths)])

        def gradient(upstream: tf.Tensor):
            with boundary_scope():
                return exchange_rows(upstream, rows, widths, boundary.reversed, name and f"{name}_gradient")

        return result, gradient

    return exchange(x)


def exchange_rows(
    x: tf.Tensor, rows: tf.Tensor, widths: Sequence[int], boundary: Boundary, name: str | None
) -> tf.Tensor:
    """All features of the own rows -> own features of all rows: the inverse and adjoint of `exchange_features`."""
    here = boundary.here

    @tf.custom_gradient
    def exchange(x: tf.Tensor):
        parts = tf.split(x, list(widths), axis=-1)
        shapes = [_shape(rows[r], x, widths[here.rank]) for r in range(here.ranks)]
        result = tf.concat(_swap(parts, shapes, boundary, name), axis=0)
        result = tf.ensure_shape(result, [None, *x.shape[1:-1], widths[here.rank]])

        def gradient(upstream: tf.Tensor):
            with boundary_scope():
                return exchange_features(upstream, rows, widths, boundary.reversed, name and f"{name}_gradient")

        return result, gradient

    return exchange(x)
