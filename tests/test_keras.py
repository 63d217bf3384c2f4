"""hvd_eightbit.keras with one process; starts those of its tests that need several ranks."""

import pathlib
import subprocess
import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from launcher import keras_2, launch

import hvd_eightbit.keras as eightbit_keras
from hvd_eightbit.keras import callbacks, optimizers

FILES = pathlib.Path(__file__).parent / "distributed"
keras_3_only = pytest.mark.skipif(not hasattr(tf.keras, "ops"), reason="Keras 3 only")


@pytest.fixture(autouse=True)
def horovod():
    hvd.init()


@pytest.mark.parametrize(
    ("ranks", "files", "choice", "environment"),
    [
        pytest.param(
            2, ["test_keras_optimizers.py", "test_keras_callbacks.py"], "test", {}, marks=keras_3_only, id="keras-3"
        ),
        pytest.param(3, ["test_keras_optimizers.py"], "process_set", {}, marks=keras_3_only, id="process-set"),
        pytest.param(2, ["test_keras_callbacks.py"], "test", keras_2(), id="keras-2"),
    ],
)
def test_on_ranks(ranks, files, choice, environment):
    paths = [str(FILES / file) for file in files]
    command = ["-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "-k", choice, "--rootdir", str(FILES), *paths]
    job = launch(ranks, command, timeout=600, env={"PYTHONUNBUFFERED": "1", **environment})
    assert job.returncode == 0, job.stdout
    assert job.stdout.count(" passed") == ranks, job.stdout


def sgd(**arguments):
    return keras.optimizers.SGD(0.1, **arguments)


@keras_3_only
def test_stays_what_it_is():
    plain = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0, name="mine")
    plain.exclude_from_weight_decay(var_names=["bias"])
    config = plain.get_config()
    optimizer = eightbit_keras.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, keras.optimizers.AdamW)
    assert optimizer.name == "mine" and optimizer.get_config() == config
    saved = keras.optimizers.serialize(optimizer)
    assert saved["module"] == "keras.optimizers" and saved["class_name"] == "AdamW"
    assert type(keras.optimizers.deserialize(saved)) is keras.optimizers.AdamW
    assert optimizer._exclude_from_weight_decay_pattern.pattern == "bias"


@keras_3_only
def test_a_class_of_the_users_own_is_saved_as_such():
    @keras.saving.register_keras_serializable(package="users")
    class Own(keras.optimizers.SGD):
        pass

    saved = keras.optimizers.serialize(eightbit_keras.DistributedOptimizer(Own(0.1)))
    assert saved["registered_name"] == "users>Own"
    assert type(keras.optimizers.deserialize(saved)) is Own


@keras_3_only
def test_saved_models_do_not_need_this_package(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(eightbit_keras.DistributedOptimizer(keras.optimizers.Adam(0.25)), "mse")
    model.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), verbose=0)
    model.save(tmp_path / "model.keras")
    program = (
        "import sys, keras\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "assert not {'hvd_eightbit', 'horovod'} & set(sys.modules)\n"
        "assert type(model.optimizer) is keras.optimizers.Adam and int(model.optimizer.iterations) == 1\n"
        "assert float(model.optimizer.learning_rate) == 0.25\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@keras_3_only
def test_one_process_needs_no_collective(monkeypatch):
    for name in ("allreduce", "grouped_allreduce"):
        monkeypatch.setattr(hvd, name, None)
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(eightbit_keras.DistributedOptimizer(sgd()), initial_scale=1.0)
    tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]), jit_compile=False)()
    np.testing.assert_allclose(variable.numpy(), [0.9], rtol=1e-6)


@keras_3_only
def test_one_process_may_be_compiled_by_xla():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(eightbit_keras.DistributedOptimizer(sgd()), "mse", jit_compile=True)
    model.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], [[0.2], [0.2]], rtol=1e-6)


@keras_3_only
@pytest.mark.parametrize("average", [False, True])
def test_one_process_accumulates_too(average):
    variable = keras.Variable([1.0])
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    seen = []
    for gradient in (1.0, 3.0, 5.0, 7.0):
        optimizer.apply([tf.constant([gradient])], [variable])
        seen.append(float(np.asarray(variable)[0]))
    assert seen == ([1.0, -1.0, -1.0, -7.0] if average else [1.0, -3.0, -3.0, -15.0])


@keras_3_only
def test_accumulation_counts_updates_and_its_schedule_passes():
    variable = keras.Variable([0.0])
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [1.0, 10.0, 100.0])
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(schedule), backward_passes_per_step=2)
    for _ in range(6):
        optimizer.apply([tf.ones(1)], [variable])
    # Updates at passes 1, 3 and 5 (from 0), with their rates: 1, 10 and 100, for a sum of two gradients each.
    np.testing.assert_array_equal(variable.numpy(), [-222.0])
    assert int(np.asarray(optimizer.iterations)) == 3


@keras_3_only
def test_gradients_and_variables_must_match():
    optimizer = eightbit_keras.DistributedOptimizer(sgd())
    with pytest.raises(ValueError, match="got 1 gradients for 0 variables"):
        optimizer.apply([tf.ones(1)])
    with pytest.raises(ValueError, match="got 2 gradients for 1 variables"):
        optimizer.apply([tf.ones(1), tf.ones(1)], [keras.Variable([1.0])])


@keras_3_only
def test_several_optimizers_in_one():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras has no MultiOptimizer")
    choice = keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0), {"slow": keras.optimizers.SGD(0.5)})
    multi = keras.optimizers.MultiOptimizer(choice)
    fast, slow = keras.Variable([0.0], name="fast"), keras.Variable([0.0], name="slow")
    eightbit_keras.DistributedOptimizer(multi).apply([tf.ones(1), tf.ones(1)], [fast, slow])
    np.testing.assert_array_equal([fast.numpy()[0], slow.numpy()[0]], [-1.0, -0.5])


@keras_3_only
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"compression": "fp16"}, TypeError, "compression='fp16'"),
        ({"op": hvd.Adasum}, ValueError, r"op=hvd\.Adasum"),
        ({"op": hvd.Min}, ValueError, r"op=hvd\.Min"),
        ({"op": hvd.Max}, ValueError, r"op=hvd\.Max"),
        ({"op": hvd.Product}, ValueError, r"op=hvd\.Product"),
        ({"num_groups": -1}, ValueError, "num_groups=-1"),
        ({"num_groups": 1.5}, ValueError, r"num_groups=1\.5"),
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step=0"),
        ({"gradient_predivide_factor": 0.0}, ValueError, r"gradient_predivide_factor=0\.0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, r"with op=hvd\.Average only"),
        ({"process_set": [0]}, TypeError, r"process_set=\[0\]"),
        ({"process_set": hvd.ProcessSet([0])}, ValueError, "is not registered"),
    ],
)
def test_arguments_that_will_not_do(arguments, error, message):
    optimizer = sgd()
    with pytest.raises(error, match=message):
        eightbit_keras.DistributedOptimizer(optimizer, **arguments)
    assert not optimizers.is_distributed(optimizer)


@keras_3_only
@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda: "sgd", TypeError, "optimizer='sgd'"),
        (lambda: keras.optimizers.SGD, TypeError, "expected an instance"),
        (lambda: tf.compat.v1.train.AdamOptimizer(), TypeError, r"tf\.compat\.v1 optimizer"),
        (lambda: eightbit_keras.DistributedOptimizer(sgd()), ValueError, "already distributed"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(eightbit_keras.DistributedOptimizer(sgd())),
            ValueError,
            "already distributed",
        ),
    ],
)
def test_optimizers_that_will_not_do(optimizer, error, message):
    with pytest.raises(error, match=message):
        eightbit_keras.DistributedOptimizer(optimizer())


@keras_3_only
def test_accumulation_that_will_not_do():
    with pytest.raises(ValueError, match=r"LossScaleOptimizer\(DistributedOptimizer"):
        eightbit_keras.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd()), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3: use one of them"):
        eightbit_keras.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2)


@keras_3_only
def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=tensorflow"):
        eightbit_keras.DistributedOptimizer(sgd())


def test_groups_are_consecutive_and_nearly_equal():
    assert optimizers._split(range(5), None) == [range(i, i + 1) for i in range(5)]
    assert optimizers._split([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert optimizers._split([1, 2], 9) == [[1], [2]]
    assert optimizers._split([], 3) == []


@pytest.mark.parametrize("path", ["model/dense/kernel", "w:0", "9 lives/ü", "_private", "/odd"])
def test_any_variable_name_becomes_a_name_in_the_graph(path):
    class Variable:
        pass

    variable = Variable()
    variable.path = path
    with tf.Graph().as_default():
        tf.constant(0, name=optimizers._name_of(variable))


@pytest.mark.parametrize("every", ["batch", 0, -1, 1.5])
def test_agreement_every(every):
    with pytest.raises(ValueError, match="every="):
        callbacks.RankAgreement(every=every)


@pytest.mark.parametrize("make", [callbacks.LearningRateScheduleCallback, callbacks.LearningRateWarmupCallback])
def test_schedules_need_a_rate(make):
    with pytest.raises(ValueError, match="initial_lr=None"):
        make(None, 1)


def fit(callback, rate=0.1, **arguments):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(rate), "mse")
    model.fit(**arguments, callbacks=[callback], verbose=0)


def test_schedule_refuses_an_optimizer_with_a_schedule():
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    with pytest.raises(ValueError, match="give the optimizer a number"):
        fit(callbacks.LearningRateScheduleCallback(0.1, 0.5), rate=schedule, x=x, y=y)


def test_warmup_needs_the_number_of_batches():
    def batches():
        yield np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)

    data = tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec((4, 2), tf.float32), tf.TensorSpec((4, 1), tf.float32))
    )
    with pytest.raises(ValueError, match="steps_per_epoch=None"):
        fit(callbacks.LearningRateWarmupCallback(0.1), x=data)
    fit(callbacks.LearningRateWarmupCallback(0.1, steps_per_epoch=1), x=data)
