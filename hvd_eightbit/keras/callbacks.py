"""Callbacks for data-parallel training with Keras 3 or 2: Horovod's in meaning, and a check that ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_eightbit.keras.local import shared_variables
from hvd_eightbit.keras.optimizers import is_distributed, is_keras_3, is_wrapped_by_horovod

# What hvd.broadcast takes; other types travel in a wider one.
_BROADCAST_DTYPES = (
    tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64,
)  # fmt: skip


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Starts every rank from the root's state: model weights and optimizer variables, not metrics or random seeds.

    Weights that are local to their rank (ModelParallelDense) stay as they are, and so do the optimizer's for them.

    Under Keras 3 that happens before the first step, unless the model is built by its first batch; in that case, and
    under Keras 2, after the first step, as in Horovod: there are no variables to send before.

    Args:
        root_rank: the rank that sends.

    Raises:
        ValueError: if `root_rank` is not a rank.
        RuntimeError: for Horovod's own DistributedOptimizer around a Keras 3 optimizer, as in RankAgreement.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank
        self._done = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not 0 <= self.root_rank < hvd.size():
            raise ValueError(f"root_rank={self.root_rank!r}: the ranks are 0 to {hvd.size() - 1}")
        _refuse_horovods_wrapper(self.model.optimizer)
        if self._done:
            return
        optimizer = self.model.optimizer
        ready = self.model.built and is_keras_3(optimizer)
        if ready and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        # All at the same time: a rank that loaded a checkpoint may have variables that the others lack.
        if hvd.allreduce(tf.constant(float(ready)), op=hvd.Min, name="broadcast_ready").numpy() > 0:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        variables = [*self.model.weights, *_optimizer_variables(self.model.optimizer)]
        variables = [_tf_variable(v) for v in shared_variables(variables, self.model)]

        # In a graph they overlap. By position: hvd.broadcast_variables goes by variables' names, which Keras numbers as
        # they are made, and a rank that loaded a checkpoint may have made more of them.
        @tf.function(autograph=False)
        def broadcast():
            for i, variable in enumerate(variables):
                value = variable.read_value()
                if variable.dtype not in _BROADCAST_DTYPES:
                    value = tf.cast(value, tf.float32 if variable.dtype.is_floating else tf.int64)
                value = hvd.broadcast(value, self.root_rank, name=f"broadcast_variable_{i}")
                variable.assign(tf.cast(value, variable.dtype))

        broadcast()


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Replaces each epoch's logs by their means over the ranks, for the callbacks that come after it in the list.

    Put it before EarlyStopping, ReduceLROnPlateau, TensorBoard and the like. A plain mean: ranks that saw fewer samples
    count as much as others. All ranks must log the same metrics.
    """

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        means = hvd.allreduce(values, op=hvd.Average, name="metric_average").numpy()
        logs.update(zip(names, means.tolist()))


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` in the epochs from `start_epoch` on.

    Logs the learning rate as "lr" at the end of each epoch.

    Args:
        initial_lr: the learning rate that the multiplier refers to.
        multiplier: a function of the epoch, or a number that stands for `number ** (epoch - start_epoch)`.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the first epoch in which it is no longer set (default: never).
        staircase: set it at the first batch of an epoch, with that epoch's number; otherwise at every batch, with
            `epoch + batch / steps_per_epoch`.
        momentum_correction: for optimizers with `momentum` (SGD, RMSprop), whose velocity has past learning rates in
            it: scale the velocity by new rate / old rate whenever the rate changes (Goyal et al. 2017, arXiv
            1706.02677, section 3, "momentum correction").
        steps_per_epoch: batches in an epoch (default: as Keras tells).

    Raises:
        ValueError: if `initial_lr` is None, the optimizer's learning rate is a schedule, or the number of batches in an
            epoch is needed and unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None: expected the learning rate that the multiplier refers to")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        rate = getattr(_innermost(self.model.optimizer), "_learning_rate", None)
        if callable(rate) and not isinstance(rate, tf.Variable) and not hasattr(rate, "assign"):
            raise ValueError(
                f"{type(self).__name__}: the optimizer's learning rate is {rate!r}; give the optimizer a number"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"steps_per_epoch={self.steps_per_epoch!r}: {type(self).__name__} needs it, since Keras does not "
                    "know it either"
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set_rate(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def _set_rate(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        # To scale the velocity once is to scale the momentum during one batch, as Horovod does; Keras compiles the
        # momentum into the training step, where a callback cannot change it.
        if self.momentum_correction and old > 0 and new != old:
            optimizer = _innermost(self.model.optimizer)
            if getattr(optimizer, "momentum", None):
                for velocity in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", ()):
                    velocity.assign(velocity * tf.cast(new / old, velocity.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr` over the first epochs, batch by batch.

    `lr = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)`: "gradual warmup" of Goyal et al. 2017 (arXiv
    1706.02677), section 2.2.

    Args:
        initial_lr: the learning rate to arrive at.
        warmup_epochs: the number of epochs until then.
        momentum_correction, steps_per_epoch: as in LearningRateScheduleCallback.
        verbose: above 0, rank 0 prints a line at the end.

    Raises:
        ValueError: as LearningRateScheduleCallback.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # One batch ahead, as Horovod has it: the last batch of the warm-up then runs at `initial_lr`.
            epoch += 1.0 / self.steps_per_epoch
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: learning rate warm-up ended at {self._rate():g}")


class RankAgreement(tf.keras.callbacks.Callback):
    """Stops training, on every rank, when the ranks' variables are no longer equal bit for bit.

    Compares a hash of each trainable weight and each optimizer variable: a few bytes a variable cross the network. The
    message names the first variable that differs and says what is likely wrong. Horovod's own DistributedOptimizer
    around a Keras 3 optimizer is refused before the first step: it never averages there.

    Weights that are local to their rank (ModelParallelDense) and the optimizer's variables for them are left out.
    Non-trainable weights are left out by default because ranks rightly differ in them: batch normalization keeps its
    rank's moving averages.

    Args:
        every: "epoch", or a number of batches.
        non_trainable: compare non-trainable weights too.

    Raises:
        ValueError: if `every` is neither.
        RuntimeError: while training, when ranks disagree.
    """

    def __init__(self, every: str | int = "epoch", non_trainable: bool = False):
        super().__init__()
        if every != "epoch" and not (isinstance(every, int) and every >= 1):
            raise ValueError(f'every={every!r}: expected "epoch" or a number of batches, 1 or more')
        self.every = every
        self.non_trainable = non_trainable
        self._next = 0
        self._batches = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        _refuse_horovods_wrapper(self.model.optimizer)
        self._batches = self._next = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.every == "epoch":
            return
        # Under steps_per_execution Keras calls this once for several batches.
        self._batches += batch + 1 - self._next
        self._next = batch + 1
        if self._batches >= self.every:
            self._batches = 0
            self._check(f"after batch {batch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._next = 0
        if self.every == "epoch":
            self._check(f"after epoch {epoch + 1}")

    def _check(self, when: str) -> None:
        if hvd.size() == 1:
            return
        weights = self.model.weights if self.non_trainable else self.model.trainable_weights
        variables = shared_variables([*weights, *_optimizer_variables(self.model.optimizer)], self.model)
        mine = [(_label(v), _digest(v)) for v in variables]
        theirs = hvd.allgather_object(mine, name="rank_agreement")
        difference = _first_difference(theirs)
        if difference is not None:
            raise RuntimeError(f"RankAgreement: {when}, {difference}. {_likely_cause(self.model.optimizer)}")


def _refuse_horovods_wrapper(optimizer: Any) -> None:
    if hvd.size() > 1 and is_keras_3(optimizer) and is_wrapped_by_horovod(optimizer):
        raise RuntimeError(
            "The optimizer was wrapped by Horovod's own DistributedOptimizer, which does not average gradients under "
            "Keras 3: use hvd_eightbit.keras.DistributedOptimizer"
        )


def _likely_cause(optimizer: Any) -> str:
    if is_distributed(optimizer) or is_wrapped_by_horovod(optimizer):
        return (
            "Gradients are averaged; look for what is not: initial weights (BroadcastGlobalVariablesCallback), ranks "
            "with different numbers of batches, weights or learning rates that were set on one rank"
        )
    return (
        "The optimizer is not distributed, so nobody averages gradients unless the training step does so itself: wrap "
        "it in hvd_eightbit.keras.DistributedOptimizer"
    )


def _first_difference(of_ranks: Sequence[Sequence[tuple[str, bytes]]]) -> str | None:
    """Says which is the first of the variables that is not the same on all ranks, given (label, digest) of each."""
    own = of_ranks[hvd.rank()]
    if len({len(variables) for variables in of_ranks}) > 1:
        counts = ", ".join(f"{len(variables)} on rank {rank}" for rank, variables in enumerate(of_ranks))
        return f"the ranks have different numbers of variables ({counts})"
    for i, (label, _) in enumerate(own):
        holders: dict[bytes, list[int]] = {}
        for rank, variables in enumerate(of_ranks):
            holders.setdefault(variables[i][1], []).append(rank)
        if len(holders) > 1:
            differing = sum(len({variables[j][1] for variables in of_ranks}) > 1 for j in range(len(own)))
            groups = " and ".join(f"rank {', '.join(map(str, ranks))}" for ranks in holders.values())
            return f"{label} differs between {groups} ({differing} of {len(own)} variables differ)"
    return None


def _label(variable: Any) -> str:
    return f"{getattr(variable, 'path', None) or variable.name} {tuple(variable.shape)}"


def _digest(variable: Any) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(variable.numpy()).tobytes(), digest_size=16).digest()


def _tf_variable(variable: Any) -> tf.Variable:
    """TensorFlow's variable: Keras 3 has its own around it."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer: a method in old Keras versions, a property in new ones."""
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def _innermost(optimizer: Any) -> Any:
    """The optimizer that a LossScaleOptimizer works for, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
