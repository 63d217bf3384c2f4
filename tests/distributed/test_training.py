"""Whole training steps through Horovod's tape and optimizer, with Keras 2 (tf_keras, or TensorFlow 2.15's tf.keras)."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit as eightbit
from hvd_eightbit import data_types, reference

FEATURES, UNITS, BATCH = 150, 128, 8
COMPRESSION = eightbit.Compression.dynamic_tree


def batches(count: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` batches of one rank, in one array each."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(count * BATCH, FEATURES)).astype(np.float32)
    return x, rng.normal(size=(count * BATCH, UNITS)).astype(np.float32)


def make_model() -> tf.keras.Model:
    """One large kernel, which is compressed, and a bias, which is not."""
    tf.keras.utils.set_random_seed(5)
    model = tf.keras.Sequential([tf.keras.layers.Dense(UNITS, input_shape=(FEATURES,), name="dense")])
    assert FEATURES * UNITS > COMPRESSION.min_elements > UNITS
    return model


def loss_of(model, x, y):
    return tf.reduce_mean(tf.square(model(x) - y))


def gradients_of_all_ranks(weights, passes=1):
    """What each rank's local gradients are, summed over its passes: [rank][variable]."""
    result = []
    for rank in range(hvd.size()):
        model = make_model()
        model.set_weights(weights)
        x, y = batches(passes, rank)
        total = [np.zeros_like(w) for w in weights]
        for i in range(passes):
            part = slice(i * BATCH, (i + 1) * BATCH)
            with tf.GradientTape() as tape:
                loss = loss_of(model, x[part], y[part])
            for t, g in zip(total, tape.gradient(loss, model.trainable_variables)):
                t += g.numpy()
        result.append(total)
    return result


def expected_reduction(gradients, scale=1.0):
    kernel = reference.allreduce([[g[0]] for g in gradients], data_types.DYNAMIC_TREE, 2048, scale)[0]
    return kernel, scale * np.mean([g[1] for g in gradients], axis=0)


def assert_reduced(actual, gradients, scale=1.0, tolerance=1e-5):
    kernel, bias = expected_reduction(gradients, scale)
    size = np.abs(kernel).max()
    np.testing.assert_allclose(actual[0], kernel, rtol=tolerance, atol=tolerance * size)
    np.testing.assert_allclose(actual[1], bias, rtol=1e-4, atol=1e-4 * np.abs(bias).max())
    # Nearer to what 8 bits give than to the exact mean: the codec was in the way.
    exact = scale * np.mean([g[0] for g in gradients], axis=0)
    assert np.abs(actual[0] - kernel).max() < 0.05 * np.abs(actual[0] - exact).max()


def assert_ranks_agree(weights):
    for w in weights:
        others = hvd.allgather(tf.constant(w.ravel()[np.newaxis])).numpy()
        for other in others:
            assert other.tobytes() == w.tobytes()


@pytest.mark.parametrize(
    ("arguments", "scale"),
    [({}, 1.0), ({"op": hvd.Sum}, None), ({"gradient_predivide_factor": 4.0}, 1.0), ({"num_groups": 1}, 1.0)],
    ids=["average", "sum", "predivide", "num_groups"],
)
@pytest.mark.parametrize("mode", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_tape(mode, arguments, scale):
    model = make_model()
    x, y = batches(1, hvd.rank())

    @mode
    def gradient(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, compression=COMPRESSION, **arguments)
        return tape.gradient(loss, model.trainable_variables)

    actual = [g.numpy() for g in gradient(tf.constant(x), tf.constant(y))]
    assert_reduced(actual, gradients_of_all_ranks(model.get_weights()), scale or hvd.size())
    assert_ranks_agree(actual)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"num_groups": 1},
        {"backward_passes_per_step": 2},
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_optimizer(arguments, eagerly):
    """One step of SGD at rate 1 moves the weights by the reduced gradient."""
    model = make_model()
    before = model.get_weights()
    passes = arguments.get("backward_passes_per_step", 1)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=COMPRESSION, **arguments)
    model.compile(optimizer, loss="mse", run_eagerly=eagerly)
    x, y = batches(passes, hvd.rank())
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    after = model.get_weights()

    scale = hvd.size() if arguments.get("op") == hvd.Sum else 1.0
    if arguments.get("average_aggregated_gradients"):
        scale /= passes
    step = [b - a for a, b in zip(after, before)]
    assert_reduced(step, gradients_of_all_ranks(before, passes), scale, tolerance=1e-3)
    assert_ranks_agree(after)


def test_several_steps_in_one_call():
    """steps_per_execution puts the step into a loop of the graph; names must not be taken twice at a time."""
    model = make_model()
    hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01), compression=COMPRESSION)
    model.compile(optimizer, loss="mse", steps_per_execution=8)
    x, y = batches(32, hvd.rank())
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert_ranks_agree(model.get_weights())
    assert history.history["loss"][1] < history.history["loss"][0]


def test_one_optimizer_after_another_and_two_compressors():
    """Compressors that are equal share Horovod's cached functions; others must not."""
    results = []
    for compression in (COMPRESSION, eightbit.EightBitCompressor(), eightbit.Compression.linear, hvd.Compression.none):
        model = make_model()
        x, y = batches(1, hvd.rank())
        model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=compression), loss="mse")
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results.append(model.get_weights()[0])
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any() and (results[0] != results[3]).any()
    np.testing.assert_allclose(results[0], results[3], atol=0.05 * np.abs(results[3]).max())


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    """Mixed precision: infinity on one rank is NaN on all: all loss scalers skip the step and halve the scale."""
    model = make_model()
    inner = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=COMPRESSION)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=1024.0)
    model.compile(optimizer, loss="mse")
    x, y = batches(1, hvd.rank())
    before = model.get_weights()
    if hvd.rank() == hvd.size() - 1:
        x = x.copy()
        x[0, 0] = np.inf
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), before):
        np.testing.assert_array_equal(a, b)
    assert float(optimizer.loss_scale) == 512.0
