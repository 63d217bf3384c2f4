"""Training and checkpoints where the weights of some layers are local to their rank, as in ModelParallelDense.

The gradient of a local weight is that of the sum of the ranks' losses: the batch of all ranks went through it. Where
other gradients are averaged, and so are those of the mean of the losses, it has to be divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_eightbit import collectives
from hvd_eightbit.keras import optimizers
from hvd_eightbit.keras.layers import ModelParallelDense


def local_layers(model: Any) -> list[Any]:
    """The layers of a model (or a layer) whose weights are local to this rank."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, ModelParallelDense)]


def PartialDistributedOptimizer(optimizer: Any, local_layers: Sequence[Any], **options: Any) -> Any:
    """DistributedOptimizer for a model with local layers: their gradients are not reduced.

    They are divided by the number of ranks where the others are averaged, and left as they are with op=hvd.Sum, so that
    a step is that of one process on the whole batch. If ranks have different numbers of rows, this holds for a loss
    that is a sum over samples, divided by the same number on each rank. Where one rank's local gradients are not
    finite, all ranks' become NaN, so that a loss scaler skips the step on all (not with backward_passes_per_step > 1
    under Keras 2).

    Args:
        optimizer: as for DistributedOptimizer.
        local_layers: the layers with weights that are local, as from `local_layers(model)`.
        **options: as for DistributedOptimizer.

    Returns:
        The optimizer.

    Raises:
        As DistributedOptimizer, and
        ValueError: under Keras 2, if a layer is not built.
    """
    optimizer = optimizers.DistributedOptimizer(optimizer, **options)
    layers = list(local_layers)
    if optimizers.is_keras_3(optimizer):
        optimizer._horovod = _PartialReducer(optimizer._horovod.options, layers)
        return optimizer
    optimizer.scale_local_gradients = options.get("op", hvd.Average) == hvd.Average
    if optimizer._agg_helper is not None:
        optimizer._agg_helper.scale_local_gradients = optimizer.scale_local_gradients
    local = _variables_of(layers, must_be_built=True)
    for variable in local:
        optimizer.register_local_var(variable)
    process_set = options.get("process_set") or hvd.global_process_set
    if optimizer._agg_helper is None and process_set.size() > 1:
        refs, reduce = {variable.ref() for variable in local}, optimizer._allreduce

        def reduce_and_agree(grads, variables):
            is_local = [variable.ref() in refs for variable in variables]
            return _all_or_none_finite(reduce(grads, variables), is_local, process_set, optimizer._name)

        optimizer._allreduce = reduce_and_agree
    return optimizer


class _PartialReducer(optimizers._Reducer):
    """Reduces all gradients but those of the local layers."""

    def __init__(self, options: Any, layers: list[Any]):
        super().__init__(options)
        self._layers = layers

    def reduce(self, grads, variables):
        refs = {variable.ref() for variable in _variables_of(self._layers)}
        is_local = [_tf_variable(variable).ref() in refs for variable in variables]
        reduced = super().reduce([None if local else g for local, g in zip(is_local, grads)], variables)
        gradients = [grad if local else other for local, grad, other in zip(is_local, grads, reduced)]
        if not self._ranks_exchange():
            return gradients
        average = self.options.op == hvd.Average
        factor = 1.0 / self.options.process_set.size() if average else 1.0
        return _all_or_none_finite(gradients, is_local, self.options.process_set, self.options.name, factor)


def _all_or_none_finite(gradients, is_local, process_set: hvd.ProcessSet, name: str, factor: float = 1.0) -> list[Any]:
    """The gradients, the local ones times factor; if one of any rank's local gradients is not finite, times NaN.

    A loss scaler that sees an overflow in the columns of one rank must skip the step on all of them, as it does for
    gradients that are reduced.
    """
    own = [grad for local, grad in zip(is_local, gradients) if local and grad is not None]
    if not own:
        return list(gradients)
    not_finite = tf.add_n([tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.float32)) for grad in own])
    worst = hvd.allreduce(
        collectives.not_constant(not_finite), op=hvd.Max, name=f"{name}_not_finite", process_set=process_set
    )
    factor = tf.where(worst > 0, float("nan"), factor)
    return [
        grad * tf.cast(factor, grad.dtype) if local and grad is not None else grad
        for local, grad in zip(is_local, gradients)
    ]


def PartialDistributedGradientTape(tape: tf.GradientTape, local_layers: Sequence[Any], **options: Any) -> Any:
    """A tf.GradientTape that reduces gradients over the ranks, but not those of local layers.

    As PartialDistributedOptimizer, for a training loop of your own; Horovod's, for Keras 3's variables too.

    Args:
        tape: the recorded tape.
        local_layers: as for PartialDistributedOptimizer.
        **options: as for hvd.DistributedGradientTape, such as compression=.

    Returns:
        An object with `gradient(target, sources)`; sources are variables.
    """
    options.setdefault("scale_local_gradients", options.get("op", hvd.Average) == hvd.Average)
    process_set = options.get("process_set", hvd.global_process_set)
    return _Tape(hvd.DistributedGradientTape(tape, **options), list(local_layers), process_set)


class _Tape:
    def __init__(self, tape: Any, layers: list[Any], process_set: hvd.ProcessSet):
        self._tape = tape
        self._process_set = process_set
        self._local = _variables_of(layers, must_be_built=True)
        for variable in self._local:
            tape.register_local_source(variable)

    def gradient(self, target: tf.Tensor, sources: Sequence[Any], output_gradients: Any = None) -> list[Any]:
        sources = [_tf_variable(v) for v in sources]
        gradients = self._tape.gradient(target, sources, output_gradients)
        if self._process_set.size() == 1:
            return gradients
        local = {variable.ref() for variable in self._local}
        return _all_or_none_finite(gradients, [v.ref() in local for v in sources], self._process_set, "eightbit_local")


def gather_weights(model: Any) -> list[np.ndarray]:
    """The weights of a model (or a layer), whole: those of the same model with Dense instead of ModelParallelDense.

    All ranks must call it, and all get all; in the order of `model.get_weights()`. One float32 matrix at a time is
    gathered, uncompressed.
    """
    whole = []
    for variable, layer in _weights_and_their_layer(model):
        value = np.asarray(_tf_variable(variable))
        if layer is not None:
            value = _gather_columns(value, layer)
        whole.append(value)
    return whole


def scatter_weights(model: Any, weights: Sequence[np.ndarray]) -> None:
    """The reverse of gather_weights, also with another number of ranks: each takes its columns. Nothing is sent.

    Args:
        model: built.
        weights: as from gather_weights, or the `get_weights()` of a model with Dense; equal on all ranks.

    Raises:
        ValueError: if the number of weights or a shape does not fit.
    """
    pairs = _weights_and_their_layer(model)
    if len(pairs) != len(weights):
        raise ValueError(f"weights has {len(weights)} arrays, the model {len(pairs)} weights (is it built?)")
    parts = []
    for i, ((variable, layer), value) in enumerate(zip(pairs, weights)):
        value, shape = np.asarray(value), tuple(variable.shape)
        if layer is not None:
            rank = layer._boundary.here.rank
            first, last = sum(layer.shards[:rank]), sum(layer.shards[: rank + 1])
            shape = (*shape[:-1], layer.units)
        if value.shape != shape:
            raise ValueError(f"weights[{i}] has shape {value.shape}, the model's {variable.name} as a whole {shape}")
        parts.append(value if layer is None else value[..., first:last])
    for (variable, _), part in zip(pairs, parts):
        variable.assign(part)


def shared_variables(variables: Sequence[Any], model: Any) -> list[Any]:
    """Those of the variables that all ranks share: neither local weights nor what the optimizer keeps for them.

    Args:
        variables: weights of the model and variables of its optimizer.
        model: compiled; its optimizer may not be built yet.
    """
    local = [_tf_variable(v) for layer in local_layers(model) for v in layer.weights]
    own = {v.ref() for v in local}
    if local:
        own |= {
            _tf_variable(v).ref() for v in _slots(getattr(model.optimizer, "inner_optimizer", model.optimizer), own)
        }
    return [v for v in variables if _tf_variable(v).ref() not in own]


def _slots(optimizer: Any, refs: set[Any]) -> list[Any]:
    """The momentums and the like that an optimizer keeps for variables with these references."""
    if hasattr(optimizer, "_slots"):  # tf.keras.optimizers.legacy: {key of a variable: {name: slot}}
        keys = {(v.deref()._shared_name if v.deref()._in_graph_mode else v.deref()._unique_id) for v in refs}
        return [slot for key, slots in optimizer._slots.items() if key in keys for slot in slots.values()]
    # The others have lists of them, in the order of the variables that they were built for.
    if hasattr(optimizer, "_index_dict"):
        positions = optimizer._index_dict
        mine = {positions[key] for v in refs if (key := optimizer._var_key(v.deref())) in positions}
        count = len(positions)
    else:
        built_for = [_tf_variable(v).ref() for v in getattr(optimizer, "_trainable_variables", ())]
        mine = {i for i, ref in enumerate(built_for) if ref in refs}
        count = len(built_for)
    lists = [v for v in vars(optimizer).values() if isinstance(v, (list, tuple)) and len(v) == count]
    return [values[i] for values in lists for i in mine if isinstance(values[i], tf.Variable) or _is_keras(values[i])]


def _is_keras(value: Any) -> bool:
    return isinstance(getattr(value, "value", None), tf.Variable)


def _weights_and_their_layer(model: Any) -> list[tuple[Any, Any]]:
    """Each weight, in the order of `model.weights`, with the local layer that it is of, or None."""
    owner = {_tf_variable(v).ref(): layer for layer in local_layers(model) for v in layer.weights}
    return [(variable, owner.get(_tf_variable(variable).ref())) for variable in model.weights]


def _gather_columns(value: np.ndarray, layer: Any) -> np.ndarray:
    boundary = layer._boundary
    if boundary.here.ranks == 1:
        return value
    wide = value if value.dtype in (np.float16, np.float32, np.float64) else value.astype(np.float32)
    columns = hvd.allgather(tf.constant(wide.T), process_set=boundary.process_set).numpy()
    return np.ascontiguousarray(columns.T).astype(value.dtype)


def _variables_of(layers: Sequence[Any], must_be_built: bool = False) -> list[tf.Variable]:
    for layer in layers:
        if must_be_built and not layer.built:
            raise ValueError(f"layer {layer.name!r} is not built, its weights are not known: build the model before")
    return [_tf_variable(variable) for layer in layers for variable in layer.trainable_weights]


def _tf_variable(variable: Any) -> tf.Variable:
    """TensorFlow's variable: Keras 3 has its own around it."""
    return variable if isinstance(variable, tf.Variable) else variable.value
