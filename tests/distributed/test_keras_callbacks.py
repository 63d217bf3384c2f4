"""The callbacks of hvd_eightbit.keras on two or more ranks, under Keras 3 and, with TF_USE_LEGACY_KERAS=1, Keras 2:

horovodrun -np 2 --gloo python -m pytest -x tests/distributed/test_keras_callbacks.py
"""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit.keras as eightbit_keras

hvd.init()
keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
BATCH, STEPS = 4, 3

pytestmark = pytest.mark.skipif(hvd.size() < 2, reason="needs two or more ranks")
keras_3_only = pytest.mark.skipif(not KERAS_3, reason="Keras 3 only")


def data():
    """A data set for each rank."""
    rng = np.random.default_rng(hvd.rank())
    return rng.normal(size=(STEPS * BATCH, 3)).astype(np.float32), rng.normal(size=(STEPS * BATCH, 1)).astype(
        np.float32
    )


def make_model(seed=None, dtype=None, metrics=(), optimizer=None, extra=()):
    """A model with initial weights of this rank, unless there is a seed."""
    keras.utils.set_random_seed(100 + hvd.rank() if seed is None else seed)
    model = keras.Sequential(
        [
            keras.layers.Dense(4, activation="tanh", name="hidden", dtype=dtype, input_shape=(3,)),
            *extra,
            keras.layers.Dense(1, name="output", dtype=dtype),
        ]
    )
    optimizer = optimizer or eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse", metrics=list(metrics))
    return model


def fit(model, callbacks, epochs=1, **arguments):
    return model.fit(*data(), batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks, **arguments).history


def optimizer_variables(model):
    variables = model.optimizer.variables
    return list(variables() if callable(variables) else variables)


def assert_ranks_equal(variables):
    values = [np.asarray(v.numpy()) for v in variables]
    for other in hvd.allgather_object(values):
        for a, b in zip(values, other):
            np.testing.assert_array_equal(a, b)


class Spy(keras.callbacks.Callback):
    """Keeps what `read(model)` gives before and after each batch."""

    def __init__(self, read):
        super().__init__()
        self.read, self.before, self.after = read, [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.before.append(self.read(self.model))

    def on_train_batch_end(self, batch, logs=None):
        self.after.append(self.read(self.model))


@pytest.mark.parametrize("root_rank", [0, 1])
def test_broadcast(root_rank):
    model = make_model()
    own = model.get_weights()[0]
    spy = Spy(lambda model: model.get_weights()[0])
    fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(root_rank), spy])
    assert_ranks_equal([*model.weights, *optimizer_variables(model)])
    roots = hvd.allgather_object(own)[root_rank]
    if KERAS_3:  # Before the first step; under Keras 2 after it, as Horovod does.
        np.testing.assert_array_equal(spy.before[0], roots)


def test_broadcast_of_a_model_that_is_built_by_its_first_batch():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    keras.utils.set_random_seed(hvd.rank())
    model = Subclassed()
    model.compile(eightbit_keras.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(0)])
    assert_ranks_equal([*model.weights, *optimizer_variables(model)])


def test_broadcast_of_optimizer_state_that_one_rank_has():
    """Rank 0 goes on from a former training, the others begin."""
    model = make_model()
    if hvd.rank() == 0:
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        plain.build(model.trainable_variables)
        for variable in plain.variables() if callable(plain.variables) else plain.variables:
            if "learning_rate" not in variable.name:
                variable.assign(tf.ones_like(variable))
        model.compile(eightbit_keras.DistributedOptimizer(plain), "mse")
    fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(0)])
    assert_ranks_equal([*model.weights, *optimizer_variables(model)])
    if KERAS_3:
        assert int(np.asarray(model.optimizer.iterations)) == 1 + STEPS


@keras_3_only
def test_broadcast_of_bfloat16():
    model = make_model(dtype="bfloat16")
    roots = hvd.allgather_object(model.get_weights()[0].astype(np.float32))[0]
    spy = Spy(lambda model: model.get_weights()[0].astype(np.float32))
    fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(0), spy])
    np.testing.assert_array_equal(spy.before[0], roots)


def test_broadcast_refuses_a_root_that_is_not_there():
    with pytest.raises(ValueError, match=r"root_rank=99: the ranks are 0 to"):
        fit(make_model(), [eightbit_keras.BroadcastGlobalVariablesCallback(99)])


def test_metric_average():
    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mine"] = float(hvd.rank() + epoch)

    own, x, y = [], *data()

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            own.append(dict(logs))

    model = make_model(metrics=["mae"])
    callbacks = [Log(), Own(), eightbit_keras.MetricAverageCallback()]
    history = fit(model, callbacks, epochs=2, validation_data=(x[:5], y[:5]))
    assert history["mine"] == [(hvd.size() - 1) / 2, (hvd.size() - 1) / 2 + 1]
    assert len([name for name in history if name.startswith("val_")]) == 2
    for epoch in range(2):
        of_ranks = hvd.allgather_object(own[epoch])
        for name in own[epoch]:
            np.testing.assert_allclose(history[name][epoch], np.mean([logs[name] for logs in of_ranks]), rtol=1e-12)
        assert of_ranks[0]["loss"] != of_ranks[1]["loss"]


def rate(model):
    return float(np.asarray(model.optimizer.learning_rate))


def test_warmup():
    model, spy = make_model(), Spy(rate)
    warmup = eightbit_keras.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=1)
    history = fit(model, [warmup, spy], epochs=3)
    n = hvd.size()
    # Horovod's formula with epoch + (batch + 1) / steps, for two epochs of three batches; then the rate stays.
    expected = [0.8 / n * (k / 3 * (n - 1) / 2 + 1) for k in (1, 2, 3, 4, 5, 6)] + [0.8] * 3
    np.testing.assert_allclose(spy.before, expected, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [expected[2], expected[5], 0.8], rtol=1e-6)


def test_schedule_in_steps():
    model, spy = make_model(), Spy(rate)
    schedule = eightbit_keras.LearningRateScheduleCallback(
        0.5, lambda epoch: 1 / (epoch + 1), start_epoch=1, end_epoch=3
    )
    fit(model, [schedule, spy], epochs=4)
    np.testing.assert_allclose(spy.before[::STEPS], [0.1, 0.25, 0.5 / 3, 0.5 / 3], rtol=1e-6)


def test_schedule_exponential():
    model, spy = make_model(), Spy(rate)
    fit(model, [eightbit_keras.LearningRateScheduleCallback(0.5, 0.1, start_epoch=1), spy], epochs=3)
    np.testing.assert_allclose(spy.before[::STEPS], [0.1, 0.5, 0.05], rtol=1e-6)


def test_momentum_correction():
    """With half the rate goes half of the velocity."""
    model = make_model()
    velocity = Spy(lambda model: [v.numpy() for v in getattr(model.optimizer, "momentums", ())])
    halve = eightbit_keras.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
    before = Spy(lambda model: [v.numpy() for v in getattr(model.optimizer, "momentums", ())])
    fit(model, [before, halve, velocity], epochs=2)
    for a, b in zip(before.before[STEPS], velocity.before[STEPS]):
        np.testing.assert_array_equal(a / 2, b)

    model = make_model()
    off = eightbit_keras.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, momentum_correction=False)
    before, after = (
        Spy(lambda model: [v.numpy() for v in getattr(model.optimizer, "momentums", ())]) for _ in range(2)
    )
    fit(model, [before, off, after], epochs=2)
    np.testing.assert_array_equal(before.before[STEPS][0], after.before[STEPS][0])


def test_ranks_agree():
    model = make_model(seed=1)
    agreement = eightbit_keras.RankAgreement()
    fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(0), agreement], epochs=2)


def test_batch_normalization_may_differ_unless_asked():
    def normalized():
        return make_model(seed=1, extra=[keras.layers.BatchNormalization(name="norm")])

    broadcast = eightbit_keras.BroadcastGlobalVariablesCallback
    fit(normalized(), [broadcast(0), eightbit_keras.RankAgreement()])
    with pytest.raises(RuntimeError, match="moving_mean"):
        fit(normalized(), [broadcast(0), eightbit_keras.RankAgreement(non_trainable=True)])


def test_agreement_names_an_optimizer_that_nobody_wrapped():
    model = make_model(seed=1, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(
        RuntimeError, match=r"after epoch 1, .*hidden/kernel.* differs between rank 0 and rank 1"
    ) as error:
        fit(model, [eightbit_keras.RankAgreement()], epochs=2)
    assert "The optimizer is not distributed" in str(error.value)


def test_agreement_after_some_batches():
    model = make_model(seed=1, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(RuntimeError, match="after batch 2, "):
        fit(model, [eightbit_keras.RankAgreement(every=2)])
    model = make_model(seed=1, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(RuntimeError, match="after batch 1, "):  # The fourth of all, in the second epoch.
        fit(model, [eightbit_keras.RankAgreement(every=4)], epochs=2)


def test_agreement_finds_one_weight_changed_on_one_rank():
    class Meddle(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            bias = self.model.get_layer("output").bias
            if epoch == 1 and hvd.rank() == 1:
                bias.assign(bias + 1e-7)

    model = make_model(seed=1)
    agreement = eightbit_keras.RankAgreement()
    with pytest.raises(RuntimeError, match=r"after epoch 2, .*output/bias.*\(1 of \d+ variables differ\)") as error:
        fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(0), Meddle(), agreement], epochs=3)
    assert "are averaged" in str(error.value)


def test_agreement_without_broadcast():
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        fit(make_model(), [eightbit_keras.RankAgreement()])


@keras_3_only
def test_agreement_refuses_horovods_own_optimizer():
    model = make_model(seed=1, optimizer=hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(RuntimeError, match="does not average gradients under Keras 3"):
        fit(model, [eightbit_keras.RankAgreement()])


@keras_3_only
def test_horovods_own_optimizer_really_does_not_average():
    """What this module is for. Should it fail one day, Horovod has learnt Keras 3."""
    model = make_model(seed=1, optimizer=hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, [])
    kernels = hvd.allgather_object(model.get_weights()[0])
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3


@pytest.mark.skipif(KERAS_3, reason="Keras 2 only")
def test_keras_2_is_handed_over_to_horovod():
    """With each of the arguments; averaging is seen in the weights."""
    model = make_model(
        seed=1,
        optimizer=eightbit_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16, num_groups=2, sparse_as_dense=True
        ),
    )
    fit(model, [eightbit_keras.BroadcastGlobalVariablesCallback(0), eightbit_keras.RankAgreement()])
    assert hasattr(model.optimizer, "_allreduce_grads")
    assert_ranks_equal(model.weights)
