"""Keras layers that send activations and error gradients in 8 bits where a model is split (paper section 2.2).

Between devices of one process: `EightBitBoundary`. Between ranks: `GatherBatch`, `ExchangeFeatures`, and
`ModelParallelDense`, which is made of these two. For Keras 3 on TensorFlow, and Keras 2.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_eightbit import collectives, data_types, ops, wire
from hvd_eightbit.data_types import DataType

_register = tf.keras.utils.register_keras_serializable(package="hvd_eightbit")


class _Layer(tf.keras.layers.Layer):
    """What the layers share: a data type for each direction and a block size."""

    def __init__(
        self,
        forward: str | DataType | None = "dynamic_tree",
        backward: str | DataType | None = "dynamic_tree",
        block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
        **kwargs: Any,
    ):
        backend = tf.keras.backend.backend()
        if backend != "tensorflow":
            raise RuntimeError(
                f"Keras runs on {backend!r}, and {type(self).__name__} needs TensorFlow: set "
                "KERAS_BACKEND=tensorflow before Keras is imported"
            )
        super().__init__(**kwargs)
        wire.check_block_size(block_size)
        self._forward = collectives.Codec(_data_type(forward, "forward"), block_size)
        self._backward = collectives.Codec(_data_type(backward, "backward"), block_size)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "forward": _serialized(self._forward.data_type),
            "backward": _serialized(self._backward.data_type),
            "block_size": self._forward.block_size,
        }


def _data_type(data_type: Any, argument: str) -> DataType | None:
    if data_type is None:
        return None
    if isinstance(data_type, dict):  # as in a configuration
        return DataType(data_type["name"], data_type["values"])
    try:
        return data_types.get(data_type)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}={data_type!r}: {error}") from None


def _serialized(data_type: DataType | None) -> Any:
    if data_type is None or data_types.DATA_TYPES.get(data_type.name) == data_type:
        return data_type and data_type.name
    return {"name": data_type.name, "values": data_type.values.tolist()}


@_register
class EightBitBoundary(_Layer):
    """The identity, between two devices of one process: what crosses is one uint8 vector, in each direction.

    Activations are quantized on the device that they are on and decoded on the target; error gradients are quantized on
    the target and decoded where the activations came from.

        with tf.device("/GPU:0"):
            x = first_half(x)
        x = EightBitBoundary("/GPU:1")(x)
        with tf.device("/GPU:1"):
            x = second_half(x)

    Input and output: float16, bfloat16, float32 or float64, any shape.

    Args:
        device: the target, as tf.device takes it; None: the device scope that the layer is called in.
        forward: data type of activations: "dynamic_tree", "linear", "mantissa", "static_tree", a DataType, or None for
            no compression.
        backward: the same for error gradients.
        block_size: consecutive elements that share an absolute maximum; None for the whole tensor, as in the paper.

    Raises:
        TypeError, ValueError: for a data type, block size or dtype that is not known.
        RuntimeError: if Keras runs on another backend than TensorFlow.
    """

    def __init__(
        self,
        device: str | None = None,
        forward: str | DataType | None = "dynamic_tree",
        backward: str | DataType | None = "dynamic_tree",
        block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
        **kwargs: Any,
    ):
        super().__init__(forward, backward, block_size, **kwargs)
        self.device = device

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        ops.check_dtype(inputs.dtype, "inputs")
        source = _device_of(inputs)
        target = tf.device(self.device) if self.device else contextlib.nullcontext()
        message_back = []

        # Two functions, since TensorFlow keeps inputs and outputs of a custom gradient together, on one device. `link`
        # is a number without meaning, by which it knows that the one depends on the other: gradients follow floating
        # tensors only, and what crosses here are bytes.
        @tf.custom_gradient
        def leave(x: tf.Tensor):
            def gradient(_):
                with source():
                    return tf.ensure_shape(self._backward.decode(message_back.pop(), shape, inputs.dtype), inputs.shape)

            return tf.zeros([]), gradient

        @tf.custom_gradient
        def arrive(link: tf.Tensor):
            y = tf.ensure_shape(self._forward.decode(message, shape, inputs.dtype), inputs.shape)
            there = _device_of(y)

            def gradient(upstream: tf.Tensor):
                with there():
                    message_back.append(self._backward.encode(upstream))
                    return tf.zeros([])

            return y, gradient

        with source():
            message, shape = self._forward.encode(tf.stop_gradient(inputs)), tf.shape(inputs)
            link = leave(inputs)
        with target:
            return arrive(link)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "device": self.device}


def _device_of(tensor: tf.Tensor):
    """Makes contexts for ops that go where a tensor is: known in eager mode, for TensorFlow to find out in a graph."""
    if tf.executing_eagerly():
        return lambda: tf.device(tensor.device)
    return lambda: tensor.graph.colocate_with(tensor.op, ignore_existing=True)


class _RanksLayer(_Layer):
    """What the layers between ranks share: the process set."""

    def __init__(self, forward, backward, block_size, process_set, **kwargs):
        super().__init__(forward, backward, block_size, **kwargs)
        self._process_set = _process_set(process_set)

    @property
    def _boundary(self) -> collectives.Boundary:
        return collectives.Boundary(self._forward, self._backward, self._process_set)

    def _mark(self, inputs: tf.Tensor, *more: Any) -> int:
        """A hash of all that must be equal on all ranks."""
        types = [t and t.values.tobytes() for t in (self._forward.data_type, self._backward.data_type)]
        facts = (type(self).__name__, *types, self._forward.block_size, inputs.dtype.name, *more)
        return zlib.crc32(repr(facts).encode())

    def get_config(self) -> dict[str, Any]:
        of_all = self._process_set is hvd.global_process_set
        return {**super().get_config(), "process_set": None if of_all else list(self._process_set.ranks)}


def _process_set(process_set: hvd.ProcessSet | Sequence[int] | None) -> hvd.ProcessSet:
    """The process set of these ranks, as a configuration has them; None for all."""
    if process_set is None or isinstance(process_set, hvd.ProcessSet):
        return process_set or hvd.global_process_set
    from horovod.common.process_sets import _basics

    found = hvd.ProcessSet(list(process_set))
    for process_set_id, ranks in _basics._get_process_set_ids_and_ranks().items():
        if list(ranks) == found.ranks:
            found.process_set_id = process_set_id
    collectives.world(found)  # refuses one that was not found
    return found


@_register
class GatherBatch(_RanksLayer):
    """The batch of all ranks: [rows of this rank, ...] -> [rows of all ranks, ...], in rank order.

    Backward: the sum of the ranks' gradients for the own rows. Own rows, and the own part of that sum, are exact. Ranks
    may have different numbers of rows. On one rank the identity.

    Args:
        forward: data type of activations: "dynamic_tree", "linear", "mantissa", "static_tree", a DataType, or None for
            no compression.
        backward: the same for error gradients.
        block_size: consecutive elements, of what one rank sends to another, that share an absolute maximum.
        process_set: the ranks that take part, a registered hvd.ProcessSet or its ranks; None for all.

    Raises:
        TypeError, ValueError: for a data type, block size, dtype or process set that will not do; in elastic jobs.
        RuntimeError: if Keras runs on another backend than TensorFlow.
        tf.errors.InvalidArgumentError: on all ranks, if their arguments or shapes of a sample differ.
    """

    def __init__(
        self,
        forward: str | DataType | None = "dynamic_tree",
        backward: str | DataType | None = "dynamic_tree",
        block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
        process_set: hvd.ProcessSet | Sequence[int] | None = None,
        **kwargs: Any,
    ):
        super().__init__(forward, backward, block_size, process_set, **kwargs)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        ops.check_dtype(inputs.dtype, "inputs")
        boundary = self._boundary
        if boundary.here.ranks == 1:
            return inputs
        with collectives.boundary_scope():
            name = collectives.boundary_name("gather_batch")
            shape = tf.shape(inputs)
            rows = collectives.agree_on_rows(shape[0], shape[1:], self._mark(inputs), boundary, name and f"{name}_rows")
            return collectives.gather_batch(inputs, rows, boundary, name and f"{name}_activations")

    def compute_output_shape(self, input_shape):
        rows = input_shape[0] if self._boundary.here.ranks == 1 else None
        return (rows, *input_shape[1:])


@_register
class ExchangeFeatures(_RanksLayer):
    """Feature shards of the whole batch -> all features of the own rows.

    [rows of all ranks, ..., features of this rank] -> [rows of this rank, ..., features of all ranks], in rank order.
    Backward: the reverse. The own part is exact. On one rank the identity.

    Called with `like=`, a tensor with this rank's rows, such as what was given to GatherBatch; without it, all ranks
    have the same number of rows.

    Args:
        units: the features of all ranks, of which each has `shard_sizes(units, ranks)`; None: all have as many as this.
        forward, backward, block_size, process_set: as for GatherBatch.

    Raises:
        As GatherBatch, and
        ValueError: if this rank's number of features is not its part of `units`.
        tf.errors.InvalidArgumentError: on all ranks, if the numbers of rows do not add up.
    """

    def __init__(
        self,
        units: int | None = None,
        forward: str | DataType | None = "dynamic_tree",
        backward: str | DataType | None = "dynamic_tree",
        block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
        process_set: hvd.ProcessSet | Sequence[int] | None = None,
        **kwargs: Any,
    ):
        super().__init__(forward, backward, block_size, process_set, **kwargs)
        self.units = _check_positive(units, "units", or_none=True)

    def call(self, inputs: tf.Tensor, like: tf.Tensor | None = None) -> tf.Tensor:
        ops.check_dtype(inputs.dtype, "inputs")
        boundary = self._boundary
        here = boundary.here
        width = inputs.shape[-1]
        if width is None:
            raise ValueError(f"inputs have shape {inputs.shape}: the last dimension must be known")
        widths = shard_sizes(self.units, here.ranks) if self.units else (width,) * here.ranks
        if widths[here.rank] != width:
            raise ValueError(
                f"units={self.units}: rank {here.rank} of {here.ranks} has {widths[here.rank]} of them, but inputs "
                f"have shape {inputs.shape}"
            )
        if here.ranks == 1:
            return inputs
        with collectives.boundary_scope():
            name = collectives.boundary_name("exchange_features")
            shape = tf.shape(inputs)
            own = shape[0] // here.ranks if like is None else tf.shape(like)[0]
            rows = collectives.agree_on_rows(
                own, shape[:-1], self._mark(inputs, widths), boundary, name and f"{name}_rows"
            )
            check = tf.debugging.assert_equal(
                tf.reduce_sum(rows),
                shape[0],
                "ExchangeFeatures: the rows of the ranks do not add up to those of inputs; where ranks have different "
                "numbers of rows, give it like=, a tensor with as many rows as this rank has",
            )
            with tf.control_dependencies([] if check is None else [check]):
                rows = tf.identity(rows)
            return collectives.exchange_features(inputs, rows, widths, boundary, name and f"{name}_activations")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@_register
class ModelParallelDense(_RanksLayer):
    """A Dense layer whose columns are spread over the ranks, while each rank has its own rows of the batch.

    [rows of this rank, ..., inputs] -> [rows of this rank, ..., units]. Each rank gathers the batch of all ranks,
    multiplies it with its columns of the kernel, and sends each rank the results for its rows; in the backward pass the
    reverse. The activation is applied after that, so it may be a softmax.

    Its weights, `kernel` [inputs, own columns] and `bias` [own columns], differ between ranks: they must be neither
    averaged nor broadcast. See PartialDistributedOptimizer, PartialDistributedGradientTape, gather_weights and
    scatter_weights. They are cut from the initializers' whole matrix, so that with the same seed on all ranks they are
    an ordinary Dense layer's.

    Args:
        units: of all ranks together, at least one a rank; rank r has `shard_sizes(units, ranks)[r]` of them.
        activation, use_bias, kernel_initializer, bias_initializer: as for Dense.
        sub_batches: the batch is sent in so many parts, so that one is on its way while another is multiplied; in a
            tf.function (model.fit has one).
        forward, backward, block_size, process_set: as for GatherBatch.

    Raises:
        As GatherBatch, and
        ValueError: if `units` or `sub_batches` is not a positive integer, or there are more ranks than units.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        sub_batches: int = 1,
        forward: str | DataType | None = "dynamic_tree",
        backward: str | DataType | None = "dynamic_tree",
        block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
        process_set: hvd.ProcessSet | Sequence[int] | None = None,
        **kwargs: Any,
    ):
        super().__init__(forward, backward, block_size, process_set, **kwargs)
        self.units = _check_positive(units, "units")
        self.activation = tf.keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = tf.keras.initializers.get(kernel_initializer)
        self.bias_initializer = tf.keras.initializers.get(bias_initializer)
        self.sub_batches = _check_positive(sub_batches, "sub_batches")

    @property
    def shards(self) -> tuple[int, ...]:
        """The number of columns that each rank holds."""
        return shard_sizes(self.units, self._boundary.here.ranks)

    def build(self, input_shape) -> None:
        inputs = input_shape[-1]
        if inputs is None:
            raise ValueError(f"inputs have shape {tuple(input_shape)}: the last dimension must be known")
        rank, shards = self._boundary.here.rank, self.shards
        first, last = sum(shards[:rank]), sum(shards[: rank + 1])

        def own_columns(initializer, *whole: int):
            return lambda shape, dtype=None, **kwargs: initializer(whole, dtype=dtype)[..., first:last]

        self.kernel = self.add_weight(
            name="kernel",
            shape=(inputs, last - first),
            initializer=own_columns(self.kernel_initializer, inputs, self.units),
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias", shape=(last - first,), initializer=own_columns(self.bias_initializer, self.units)
            )
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        ops.check_dtype(inputs.dtype, "inputs")
        boundary, shards = self._boundary, self.shards
        here = boundary.here
        if here.ranks == 1:
            return self.activation(self._product(inputs))
        with collectives.boundary_scope():
            name = collectives.boundary_name("dense")
            shape = tf.shape(inputs)
            rows = collectives.agree_on_rows(
                shape[0],
                shape[1:],
                self._mark(inputs, self.units, self.sub_batches),
                boundary,
                name and f"{name}_rows",
            )
            parts = [(rows + self.sub_batches - 1 - k) // self.sub_batches for k in range(self.sub_batches)]
            own = tf.split(inputs, tf.stack([part[here.rank] for part in parts]), num=self.sub_batches)
            outputs = []
            for k, (x, part) in enumerate(zip(own, parts)):
                x = tf.ensure_shape(x, [None, *inputs.shape[1:]])
                whole = collectives.gather_batch(x, part, boundary, name and f"{name}_gather_{k}")
                y = self._product(whole)
                outputs.append(
                    collectives.exchange_features(y, part, shards, boundary, name and f"{name}_exchange_{k}")
                )
            result = tf.ensure_shape(tf.concat(outputs, axis=0), [*inputs.shape[:-1], self.units])
        return self.activation(result)

    def _product(self, x: tf.Tensor) -> tf.Tensor:
        """With this rank's columns."""
        y = tf.tensordot(x, tf.convert_to_tensor(self.kernel), axes=1)
        return y if self.bias is None else y + tf.convert_to_tensor(self.bias)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "activation": tf.keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": tf.keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": tf.keras.initializers.serialize(self.bias_initializer),
            "sub_batches": self.sub_batches,
        }


def shard_sizes(units: int, ranks: int) -> tuple[int, ...]:
    """How many of so many units each rank holds: as equal as can be, the first ranks one more.

    Raises:
        ValueError: if there are more ranks than units.
    """
    if units < ranks:
        raise ValueError(f"units={units} cannot be spread over {ranks} ranks: at least one is needed for each")
    return tuple(units // ranks + (rank < units % ranks) for rank in range(ranks))


def _check_positive(number: int | None, argument: str, or_none: bool = False) -> int | None:
    if number is None and or_none:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{argument}={number!r}: expected an integer of 1 or more")
    return number
