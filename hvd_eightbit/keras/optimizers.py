"""DistributedOptimizer for Keras 3: gradients are reduced over the ranks in `apply`, which all training loops call."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import Any, Union

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

Gradient = Union["tf.Tensor", "tf.IndexedSlices"]


def DistributedOptimizer(
    optimizer: Any,
    compression: Any = None,
    op: int = hvd.Average,
    num_groups: int | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: hvd.ProcessSet | None = None,
    sparse_as_dense: bool = False,
    name: str | None = None,
) -> Any:
    """Makes a Keras optimizer reduce its gradients over all ranks before it applies them.

    Keras 3: `optimizer` itself is changed and returned. It keeps all it has, such as state, learning rate and variables
    excluded from weight decay, and stays an instance of its class. Gradients are reduced once for each call of `apply`
    or `apply_gradients`, in `model.fit`, `train_on_batch` and custom loops alike; unscaling of the loss, clipping,
    weight decay, EMA and Keras's own `gradient_accumulation_steps` come after that, on the reduced gradients. Saved
    models hold the plain optimizer: they load without this package, and the loaded `model.optimizer` can be given to
    this function again.

    Mixed precision: give it a `LossScaleOptimizer`, or give it to one (as `model.compile` does under "mixed_float16").
    Either way an overflow on one rank skips the step on all of them, and the dynamic scale stays equal. In the first
    case scaled gradients are reduced, which suits hvd.Compression.fp16; in the second unscaled ones, after the ranks
    have told each other in one scalar allreduce whether all gradients are finite.

    Keras 2 (`tf_keras`, or tf.keras of TensorFlow 2.15): hands over to horovod.tensorflow.keras.DistributedOptimizer.

    Embedding gradients (tf.IndexedSlices) are gathered by Horovod, indices and values exact and uncompressed;
    `sparse_as_dense=True` makes them dense, so that they go through `compression`. Gradients in bfloat16, which Horovod
    does not reduce, travel as float32.

    Args:
        optimizer: an instance of keras.optimizers.Optimizer, not wrapped yet.
        compression: an object with Horovod's compress and decompress: `eightbit.Compression.dynamic_tree`,
            `hvd.Compression.fp16`, or None for none.
        op: hvd.Average (default) or hvd.Sum.
        num_groups: gradients are reduced in that many groups (hvd.grouped_allreduce), each when all of its gradients
            are there; None: each gradient by itself, as soon as it is there.
        backward_passes_per_step: calls of `apply` whose gradients are added up locally before they are reduced and
            applied. Weights change, and bytes cross the wire, in one call of so many. As with Keras's own accumulation,
            learning-rate schedules count calls and `optimizer.iterations` counts updates.
        average_aggregated_gradients: divide that local sum by backward_passes_per_step.
        gradient_predivide_factor: with Average, divide by this before the sum and multiply with it afterwards. Sparse
            gradients are not affected.
        process_set: the hvd.ProcessSet to reduce over (default: all ranks). Ranks outside it train by themselves.
        sparse_as_dense: see above.
        name: prefix of the collectives' names, equal on all ranks (default: "Distributed" and the class's name).

    Returns:
        The optimizer.

    Raises:
        TypeError: if `optimizer` is not a Keras optimizer, or `compression` cannot compress.
        ValueError: if the optimizer is already distributed, or an argument's value will not do.
        RuntimeError: if Keras runs on another backend than TensorFlow; while training, if the step is compiled by XLA.
    """
    _check_optimizer(optimizer)
    options = _Options(
        compression=compression,
        op=op,
        num_groups=num_groups,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        name=name or f"Distributed{type(optimizer).__name__}",
    )
    if options.error_feedback:
        _check_error_feedback(optimizer, options)
    if not is_keras_3(optimizer):
        return _horovods_own(optimizer, options, name)

    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()!r}; Horovod's collectives need TensorFlow: set "
            "KERAS_BACKEND=tensorflow before Keras is imported"
        )
    if options.passes > 1:
        _check_accumulation(optimizer, options.passes)
    _let_loss_scaling_agree()
    optimizer.__class__ = _distributed_class(type(optimizer), options.passes > 1)
    optimizer._horovod = _Reducer(options)
    return optimizer


def error_feedback_state(optimizer: Any, variables: Sequence[Any]) -> tf.train.Checkpoint:
    """The errors that a distributed optimizer keeps with error_feedback=True, to be saved and restored.

    They differ from rank to rank, and are not among `optimizer.variables`: neither broadcast nor in saved models. Each
    rank writes its own, `state.write(f"errors-{hvd.rank()}")`, and reads it, `state.read(f"errors-{hvd.rank()}")`,
    before or after the first step. Without them training goes on from errors of zero: one step's rounding is lost.

    Args:
        optimizer: from DistributedOptimizer.
        variables: those that are trained, in the same order each time, as `model.trainable_variables`.

    Raises:
        ValueError: if the optimizer does not keep errors.
    """
    reducer = getattr(optimizer, "_horovod", None)
    if reducer is None or not reducer.options.error_feedback:
        raise ValueError(f"optimizer={optimizer!r} keeps no errors: it is not distributed with error_feedback=True")
    return tf.train.Checkpoint(errors=[reducer._compressor_of(None, variable) for variable in variables])


def is_keras_3(optimizer: Any) -> bool:
    """Whether this is an optimizer of Keras 3."""
    return keras.__version__.startswith("3.") and isinstance(optimizer, keras.optimizers.Optimizer)


def is_keras_2(optimizer: Any) -> bool:
    """Whether this is an optimizer of Keras 2, be it tf.keras or tf_keras, new or legacy."""
    return not is_keras_3(optimizer) and any(
        base.__module__.split(".")[0] in ("keras", "tf_keras") and base.__name__ in ("Optimizer", "OptimizerV2")
        for base in type(optimizer).__mro__
    )


def is_distributed(optimizer: Any) -> bool:
    """Whether DistributedOptimizer changed this Keras 3 optimizer, or one that it delegates to."""
    return isinstance(optimizer, _Distributed) or any(map(is_distributed, _inner_optimizers(optimizer)))


def is_wrapped_by_horovod(optimizer: Any) -> bool:
    """Whether Horovod's own DistributedOptimizer made this Keras optimizer."""
    return hasattr(optimizer, "_allreduce_grads") or any(map(is_wrapped_by_horovod, _inner_optimizers(optimizer)))


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that this one delegates to: of a LossScaleOptimizer or a MultiOptimizer."""
    if not is_keras_3(optimizer):
        return []
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "optimizers", ()))


class _Options:
    """The checked arguments of DistributedOptimizer."""

    def __init__(
        self, *, compression, op, num_groups, passes, average_passes, predivide, process_set, sparse_as_dense, name
    ):
        if compression is not None and not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
            raise TypeError(
                f"compression={compression!r}: expected an object with compress and decompress, such as "
                "eightbit.Compression.dynamic_tree or hvd.Compression.fp16, or None"
            )
        if op not in (hvd.Average, hvd.Sum):
            names = {getattr(hvd, n): f"hvd.{n}" for n in ("Adasum", "Min", "Max", "Product")}
            raise ValueError(f"op={names.get(op, op)}: gradients can be reduced with hvd.Average or hvd.Sum")
        if num_groups is not None and (not isinstance(num_groups, int) or num_groups < 0):
            raise ValueError(f"num_groups={num_groups!r}: expected an integer of 1 or more, or None for no groups")
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step={passes!r}: expected an integer of 1 or more")
        if not predivide > 0:
            raise ValueError(f"gradient_predivide_factor={predivide!r}: expected a number above 0")
        if predivide != 1.0 and op != hvd.Average:
            raise ValueError(f"gradient_predivide_factor={predivide!r} has a meaning with op=hvd.Average only")
        if process_set is not None and not isinstance(process_set, hvd.ProcessSet):
            raise TypeError(f"process_set={process_set!r}: expected a hvd.ProcessSet, or None for all ranks")
        if process_set is not None and process_set.process_set_id is None:
            raise ValueError(
                f"process_set={process_set} is not registered: give it to hvd.init(process_sets=[...]), or call "
                "hvd.add_process_set(...)"
            )
        self.compression = hvd.Compression.none if compression is None else compression
        self.error_feedback = bool(getattr(compression, "error_feedback", False))
        self.op = op
        self.num_groups = num_groups or None
        self.passes = passes
        self.average_passes = average_passes
        self.predivide = predivide
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self.sparse_as_dense = sparse_as_dense
        self.name = re.sub(r"[^A-Za-z0-9_.]", "_", name)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is a tf.compat.v1 optimizer: give it to horovod.tensorflow.DistributedOptimizer"
        )
    if not (is_keras_3(optimizer) or is_keras_2(optimizer)):
        raise TypeError(f"optimizer={optimizer!r}: expected an instance of keras.optimizers.Optimizer")
    if is_distributed(optimizer) or is_wrapped_by_horovod(optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} is already distributed: its gradients would be reduced twice. Give the plain "
            "optimizer, once"
        )


def _check_error_feedback(optimizer: Any, options: _Options) -> None:
    if not is_keras_3(optimizer):
        raise ValueError(
            "compression with error_feedback=True needs Keras 3: under Keras 2 gradients are reduced by Horovod, which "
            "does not tell a compressor which variable they are of"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "compression with error_feedback=True around a LossScaleOptimizer: the errors would be of gradients at "
            "another scale. Give LossScaleOptimizer the distributed optimizer instead, as in "
            "LossScaleOptimizer(DistributedOptimizer(optimizer, ...))"
        )
    if options.num_groups is not None:
        raise ValueError(
            f"num_groups={options.num_groups} with error_feedback=True: each gradient has an error and an exchange of "
            "its own; leave num_groups out"
        )


def _check_accumulation(optimizer: Any, passes: int) -> None:
    if _inner_optimizers(optimizer):
        raise ValueError(
            f"backward_passes_per_step={passes} with {type(optimizer).__name__}, which delegates to another optimizer: "
            "wrap that one, as in LossScaleOptimizer(DistributedOptimizer(optimizer, backward_passes_per_step=...))"
        )
    if not hasattr(optimizer, "_iterations"):
        raise ValueError(f"backward_passes_per_step={passes} needs Keras 3.5 or later; this is {keras.__version__}")
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"backward_passes_per_step={passes} with an optimizer that has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}: use one of them; the first reduces once an update, the second "
            "every time"
        )


def _horovods_own(optimizer: Any, options: _Options, name: str | None) -> Any:
    import horovod.tensorflow.keras as hvd_keras

    return hvd_keras.DistributedOptimizer(
        optimizer,
        name=name,
        compression=options.compression,
        sparse_as_dense=options.sparse_as_dense,
        gradient_predivide_factor=options.predivide,
        op=options.op,
        backward_passes_per_step=options.passes,
        average_aggregated_gradients=options.average_passes,
        groups=options.num_groups,
        process_set=options.process_set,
    )


class _Reducer:
    """What one optimizer's ranks do together, and the local sums where they do it only every few passes.

    Not a Keras object, and its variables are not the optimizer's: nothing of it is saved.
    """

    def __init__(self, options: _Options):
        self.options = options
        self._sums: dict[Any, tf.Variable] = {}
        self._passes_done: tf.Variable | None = None
        self._with_error: dict[Any, Any] = {}  # the compressor of each variable, where one keeps an error
        # Horovod matches collectives by name, and overlaps them, only in a graph.
        self._reduce_in_graph = tf.function(self._reduce, reduce_retracing=True, autograph=False)

    def reduce(self, grads: Sequence[Gradient | None], variables: Sequence[Any]) -> list[Gradient | None]:
        """The gradients reduced over the ranks; None stays None (and must be None on all ranks)."""
        present = [i for i, grad in enumerate(grads) if grad is not None]
        result = list(grads)
        if present and self._ranks_exchange():
            reduce = self._reduce_in_graph if tf.executing_eagerly() else self._reduce
            names = tuple(self._name(i, variables[i]) for i in present)
            compressors = tuple(self._compressor_of(grads[i], variables[i]) for i in present)
            reduced = reduce([grads[i] for i in present], names, compressors)
            for i, grad in zip(present, reduced):
                result[i] = grad
        return result

    def true_on_all_ranks(self, flag: tf.Tensor) -> tf.Tensor:
        """Whether a boolean scalar is true on every rank."""
        if not self._ranks_exchange():
            return flag
        name = f"{self.options.name}_all_finite"
        lowest = hvd.allreduce(tf.cast(flag, tf.float32), op=hvd.Min, name=name, process_set=self.options.process_set)
        return lowest > 0

    def accumulate(self, grads: Sequence[Gradient | None], variables: Sequence[Any]) -> tf.Tensor:
        """Adds gradients to the local sums; whether it is time to reduce and apply them."""
        with tf.init_scope():
            if self._passes_done is None:
                self._passes_done = tf.Variable(0, dtype=tf.int64, trainable=False)
            for grad, variable in zip(grads, variables):
                if grad is not None and _key(variable) not in self._sums:
                    self._sums[_key(variable)] = tf.Variable(tf.zeros(variable.shape, grad.dtype), trainable=False)
        for grad, variable in zip(grads, variables):
            if isinstance(grad, tf.IndexedSlices) and not self.options.sparse_as_dense:
                raise ValueError(
                    f"backward_passes_per_step={self.options.passes}: the gradient of {_name_of(variable)} is sparse "
                    "and cannot be added up so; pass sparse_as_dense=True"
                )
            if grad is not None:
                self._sums[_key(variable)].assign_add(tf.convert_to_tensor(grad))
        return tf.equal(self._passes_done.assign_add(1) % self.options.passes, 0)

    def take_sums(self, variables: Sequence[Any]) -> list[tf.Tensor | None]:
        """The local sums, which start again at zero."""
        taken: list[tf.Tensor | None] = []
        for variable in variables:
            total = self._sums.get(_key(variable))
            if total is None:
                taken.append(None)
                continue
            value = total.read_value()
            taken.append(value / self.options.passes if self.options.average_passes else value)
            total.assign(tf.zeros_like(value))
        return taken

    def _compressor_of(self, grad: Gradient | None, variable: Any) -> Any:
        """The compressor for a variable's gradient, the same one each time that the step is traced."""
        sparse = isinstance(grad, tf.IndexedSlices) and not self.options.sparse_as_dense
        if not self.options.error_feedback or sparse:
            return self.options.compression
        key = _key(variable)
        if key not in self._with_error:
            with tf.init_scope():
                dtype = tf.as_dtype(variable.dtype)
                self._with_error[key] = self.options.compression.for_variable(variable.shape, dtype)
        return self._with_error[key]

    def _name(self, position: int, variable: Any) -> str:
        """Of a gradient in the graph. Horovod matches collectives by name, and so does this module.

        Keras numbers layers and models as they are made, and a rank may have made more of them. So gradients go by
        their position; the variable's path is added only for a compressor that has patterns to match it with.
        """
        by_name = getattr(self.options.compression, "exclude", ())
        return f"gradient_{position}" + (f"/{_name_of(variable)}" if by_name else "")

    def _ranks_exchange(self) -> bool:
        """Whether there are other ranks to exchange with. Elastic jobs may get some while the program runs."""
        process_set = self.options.process_set
        elastic = os.environ.get("HOROVOD_ELASTIC", "0") != "0"
        if not process_set.included() or (process_set.size() == 1 and not elastic):
            return False
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise RuntimeError(
                "XLA cannot compile Horovod's collectives: pass jit_compile=False to model.compile (Keras 3 turns XLA "
                "on by itself where it sees a GPU), or leave jit_compile out of your tf.function"
            )
        return True

    def _reduce(self, grads: Sequence[Gradient], names: Sequence[str], compressors: Sequence[Any]) -> list[Gradient]:
        options = self.options
        reduced: list[Any] = list(grads)
        dense = []
        with tf.name_scope(options.name):
            for i, grad in enumerate(grads):
                if isinstance(grad, tf.IndexedSlices) and not options.sparse_as_dense:
                    reduced[i] = self._reduce_sparse(grad, names[i])
                else:
                    dense.append(i)
            for number, group in enumerate(_split(dense, options.num_groups)):
                # Compressors go by the names of the tensors that they get.
                tensors = [tf.identity(_widened(grads[i]), name=names[i]) for i in group]
                name = f"allreduce_{number}"
                for i, tensor in zip(group, self._reduce_group(tensors, name, compressors[group[0]])):
                    reduced[i] = tf.cast(tensor, grads[i].dtype)
        return reduced

    def _reduce_group(self, tensors: Sequence[tf.Tensor], name: str, compression: Any) -> list[tf.Tensor]:
        settings = {
            "compression": compression,
            "op": self.options.op,
            "prescale_factor": 1.0 / self.options.predivide,
            "postscale_factor": self.options.predivide,
            "process_set": self.options.process_set,
        }
        if len(tensors) == 1:
            return [hvd.allreduce(tensors[0], name=name, **settings)]
        reduced: list[Any] = [None] * len(tensors)
        dtypes = list(dict.fromkeys(t.dtype for t in tensors))  # Horovod wants one dtype in a group.
        for dtype in dtypes:
            members = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            results = hvd.grouped_allreduce(
                [tensors[i] for i in members], name=name if len(dtypes) == 1 else f"{name}_{dtype.name}", **settings
            )
            for i, result in zip(members, results):
                reduced[i] = result
        return reduced

    def _reduce_sparse(self, grad: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        # Horovod names its allgathers after these.
        values = tf.identity(_widened(grad.values), name=f"{name}_values")
        indices = tf.identity(grad.indices, name=f"{name}_indices")
        wide = tf.IndexedSlices(values, indices, grad.dense_shape)
        reduced = hvd.allreduce(wide, op=self.options.op, process_set=self.options.process_set)
        return tf.IndexedSlices(tf.cast(reduced.values, grad.dtype), reduced.indices, grad.dense_shape)


class _Distributed:
    """What DistributedOptimizer puts in front of an optimizer's class."""

    _horovod: _Reducer

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Gradient | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces the gradients over the ranks, then applies them as the optimizer's class does."""
        grads, variables = self._matched(grads, trainable_variables)
        super().apply(self._horovod.reduce(grads, variables), variables)

    def _matched(self, grads, variables):
        grads = list(grads)
        if variables is None:
            variables = self._trainable_variables if self.built else ()
        variables = list(variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"got {len(grads)} gradients for {len(variables)} variables: pass trainable_variables, one a gradient"
            )
        return grads, variables


class _Accumulating(_Distributed):
    """The same with backward_passes_per_step above 1."""

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Gradient | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Adds the gradients to those of earlier passes; in the last pass, reduces and applies the sums."""
        grads, variables = self._matched(grads, trainable_variables)
        if not self.built:
            with tf.name_scope(self.name):
                self.build(variables)
        reduce_and_apply = super().apply

        def update():
            reduce_and_apply(self._horovod.take_sums(variables), variables)

        def wait():
            self._iterations.assign_add(1)

        tf.cond(self._horovod.accumulate(grads, variables), update, wait)

    @property
    def iterations(self):
        """The number of updates, as Keras has it under gradient_accumulation_steps."""
        return self._iterations // self._horovod.options.passes


@functools.cache
def _distributed_class(base: type, accumulating: bool) -> type:
    mixin = _Accumulating if accumulating else _Distributed
    # Keras saves an object by its __class__: the wrapped class, so that the file needs nothing of ours.
    return type(f"Distributed{base.__name__}", (mixin, base), {"__class__": property(lambda self: base)})


@functools.cache
def _let_loss_scaling_agree() -> None:
    """Lets LossScaleOptimizer ask all ranks before it skips or takes the step of a distributed optimizer inside it.

    It decides before the inner optimizer is called: without this a rank with an overflow would skip the collective that
    the others wait in.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    check_finite = scaler.check_finite

    @functools.wraps(check_finite)
    def check_finite_on_all_ranks(self, grads):
        finite = check_finite(self, grads)
        inner = self.inner_optimizer
        return inner._horovod.true_on_all_ranks(finite) if isinstance(inner, _Distributed) else finite

    scaler.check_finite = check_finite_on_all_ranks


def _key(variable: Any) -> Any:
    """What identifies a variable: Keras 3 has its own around TensorFlow's."""
    return variable.ref() if isinstance(variable, tf.Variable) else variable.value.ref()


def _name_of(variable: Any) -> str:
    """The variable's path, as a name that TensorFlow accepts."""
    name = getattr(variable, "path", None) or variable.name
    return re.sub(r"^[^A-Za-z0-9.]", ".", re.sub(r"[^A-Za-z0-9_./-]", "_", name.removesuffix(":0")))


def _widened(tensor: Gradient) -> tf.Tensor:
    """Dense, and float32 for bfloat16, which Horovod does not know."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _split(items: Sequence[int], groups: int | None) -> list[Sequence[int]]:
    """Cuts a sequence into so many consecutive parts of nearly equal length; None: into single items."""
    groups = len(items) if groups is None else min(groups, len(items))
    bounds = [len(items) * i // groups for i in range(groups + 1)] if groups else []
    return [items[a:b] for a, b in zip(bounds, bounds[1:])]
