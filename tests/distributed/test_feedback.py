"""Error feedback on the ranks that this is started on, against a NumPy simulation of all of them."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit as eightbit
import hvd_eightbit.keras as eightbit_keras
from hvd_eightbit import data_types, reference, wire

hvd.init()
pytestmark = [
    pytest.mark.skipif(hvd.size() < 2, reason="needs two or more ranks"),
    pytest.mark.skipif(not hasattr(tf.keras, "ops"), reason="Keras 3 only"),
]
SHAPE, STEPS, BLOCK = (37, 101), 6, 64
LINEAR = data_types.get("linear")
COMPRESSOR = eightbit.EightBitCompressor("linear", block_size=BLOCK, min_elements=100, error_feedback=True)


def gradients(seed=0, shape=SHAPE):
    """(steps, ranks, *shape): the same on every rank."""
    return np.random.default_rng(seed).normal(size=(STEPS, hvd.size(), *shape)).astype(np.float32)


def simulate(grads):
    """(results of each step, errors of each rank after each step)."""
    ranks = hvd.size()
    errors, results, history = [np.zeros(SHAPE, np.float32) for _ in range(ranks)], [], []
    size = int(np.prod(SHAPE))
    layout = wire.layout([size], ranks, BLOCK)
    for step in grads:
        corrected = [g + e for g, e in zip(step, errors)]
        mean = reference.allreduce([[c] for c in corrected], LINEAR, BLOCK)[0]
        results.append(mean)
        sent = [reference.pack([c], ranks, r, LINEAR, BLOCK) for r, c in enumerate(corrected)]
        sent = [reference.unpack(m, [c], LINEAR, BLOCK)[0].ravel() for m, c in zip(sent, corrected)]
        if np.isfinite(mean).all():
            errors = []
            for r, c in enumerate(corrected):
                error = c.ravel() - sent[r]
                for s in layout.chunks[r]:
                    own = slice(s.begin, s.begin + s.elements)
                    total = sum(corrected[q].ravel()[own] if q == r else sent[q][own] for q in range(ranks))
                    error[own] = total - ranks * mean.ravel()[own]
                errors.append(error.reshape(SHAPE))
        history.append(errors)
    return results, history


def test_equals_the_simulation_and_loses_nothing_in_the_long_run():
    grads = gradients()
    bound = COMPRESSOR.for_variable(SHAPE)
    reduce = tf.function(lambda g: hvd.allreduce(g, compression=bound))
    results, history = simulate(grads)
    total = np.zeros(SHAPE)
    for step, wanted, errors in zip(grads, results, history):
        got = reduce(tf.constant(step[hvd.rank()])).numpy()
        np.testing.assert_allclose(got, wanted, atol=1e-5)
        np.testing.assert_allclose(bound.error.numpy(), errors[hvd.rank()], atol=1e-4)
        total += got
    left = hvd.allreduce(bound.error).numpy()
    np.testing.assert_allclose(total + left, grads.mean(1).sum(0), atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_does_not_poison_the_error(bad):
    grads = gradients(1)
    grads[2, hvd.size() - 1, 3, 4] = bad
    bound = COMPRESSOR.for_variable(SHAPE)
    _, history = simulate(grads)
    for number, step in enumerate(grads):
        got = hvd.allreduce(tf.constant(step[hvd.rank()]), compression=bound).numpy()
        assert np.isfinite(got).all() == (number != 2)
        np.testing.assert_allclose(bound.error.numpy(), history[number][hvd.rank()], atol=1e-4)


def make(compressor=COMPRESSOR, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50, activation="tanh"), keras.layers.Dense(1)])
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor, **options)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def fit(model, optimizer, batches, **options):
    rng = np.random.default_rng(hvd.rank())
    x = rng.normal(size=(8 * batches, 40)).astype(np.float32)
    model.compile(optimizer, "mse")
    model.fit(x, x[:, :1], batch_size=8, epochs=1, shuffle=False, verbose=0, **options)


def errors_of(optimizer, model):
    state = eightbit_keras.error_feedback_state(optimizer, model.trainable_variables)
    return [bound.error for bound in state.errors]


@pytest.mark.parametrize("passes", [1, 2])
def test_keras_keeps_one_error_a_variable_through_retracing(passes, tmp_path):
    model, optimizer = make(backward_passes_per_step=passes)
    fit(model, optimizer, 4, callbacks=[eightbit_keras.RankAgreement()])
    errors = errors_of(optimizer, model)
    assert np.abs(errors[0].numpy()).max() > 0 and not errors[1].numpy().any()  # the bias is small, and not coded
    fit(model, optimizer, 4, callbacks=[eightbit_keras.RankAgreement()])  # traced again
    again = errors_of(optimizer, model)
    assert all(a is b for a, b in zip(errors, again))

    path = str(tmp_path / f"errors-{hvd.rank()}")
    eightbit_keras.error_feedback_state(optimizer, model.trainable_variables).write(path)
    other, restored = make(backward_passes_per_step=passes)
    eightbit_keras.error_feedback_state(restored, other.trainable_variables).read(path).assert_consumed()
    for a, b in zip(errors, errors_of(restored, other)):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_two_variables_of_one_shape_have_two_errors():
    first, second = (keras.Variable(np.zeros(SHAPE, np.float32)) for _ in range(2))
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=COMPRESSOR)
    optimizer.build([first, second])
    grads = gradients(2)
    for step in grads:  # eager
        optimizer.apply([tf.constant(step[hvd.rank()]), tf.constant(2 * step[hvd.rank()])], [first, second])
    _, history = simulate(grads)
    _, doubled = simulate(2 * grads)
    state = eightbit_keras.error_feedback_state(optimizer, [first, second])
    np.testing.assert_allclose(state.errors[0].error.numpy(), history[-1][hvd.rank()], atol=1e-4)
    np.testing.assert_allclose(state.errors[1].error.numpy(), doubled[-1][hvd.rank()], atol=2e-4)


def test_clear_errors_where_it_cannot_work():
    with pytest.raises(RuntimeError, match="Horovod does not tell a compressor which variable"):
        hvd.allreduce(tf.zeros([1000]), compression=COMPRESSOR)
    with pytest.raises(ValueError, match="leave num_groups out"):
        make(num_groups=1)
    with pytest.raises(ValueError, match="around a LossScaleOptimizer"):
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        eightbit_keras.DistributedOptimizer(scaled, compression=COMPRESSOR)
    with pytest.raises(ValueError, match="make one compressor for each variable"):
        hvd.allreduce(tf.zeros([1000]), compression=COMPRESSOR.for_variable([2000]))
    with pytest.raises(ValueError, match="keeps no errors"):
        eightbit_keras.error_feedback_state(keras.optimizers.SGD(), [])
    with pytest.raises(TypeError, match="error_feedback='yes'"):
        eightbit.EightBitCompressor(error_feedback="yes")
