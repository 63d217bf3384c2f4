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
            received = hvd.alltoall(messages, name=named("alltoall"), process_set=process_set)
        mean = ops.reduce(received, tensors, here.rank, data_type, block_size)
        gathered = hvd.allgather(mean[tf.newaxis], name=named("allgather"), process_set=process_set)
        outputs = ops.unpack(gathered, tensors, scale, data_type, block_size)

        def gradient(*upstream: tf.Tensor):
            return scaled_mean(upstream, scale, data_type, block_size, process_set, named("gradient"))

        return outputs, gradient

    return list(exchange(*tensors))


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
