"""hvd_eightbit.keras.DistributedOptimizer under Keras 3, on the ranks that this is started on (two or more):

    horovodrun -np 2 --gloo python -m pytest -x tests/distributed/test_keras_optimizers.py

Every rank trains on its part of a batch; what must come out is what one process gets from the whole batch.
"""

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit as eightbit
import hvd_eightbit.keras as eightbit_keras
from hvd_eightbit import data_types
from hvd_eightbit import reference as codec
from hvd_eightbit.keras.optimizers import is_distributed

hvd.init()
pytestmark = [
    pytest.mark.skipif(hvd.size() < 2, reason="needs two or more ranks"),
    pytest.mark.skipif(not hasattr(tf.keras, "ops"), reason="Keras 3 only"),
]

BATCH, FEATURES, STEPS = 8, 5, 4  # BATCH is a rank's.
WHOLE_BATCH = BATCH * hvd.size()


def data(seed=0, steps=STEPS):
    """The whole data set, (steps, ranks, BATCH, FEATURES) and (steps, ranks, BATCH, 1): the same on every rank."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, hvd.size(), BATCH, FEATURES)).astype(np.float32)
    return x, (x.sum(-1, keepdims=True) + rng.normal(size=(steps, hvd.size(), BATCH, 1))).astype(np.float32)


def mine(array):
    """This rank's part, one row a sample."""
    return array[:, hvd.rank()].reshape(-1, *array.shape[3:])


def whole(array):
    return array.reshape(-1, *array.shape[3:])


def make_model(dtype=None):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(7, activation="tanh", name="hidden", dtype=dtype),
            keras.layers.Dense(1, name="output", dtype=dtype),
        ]
    )


def embedding_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(11, 4, name="embedding"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def fit(model, optimizer, x, y, batch_size, **compile_arguments):
    model.compile(optimizer, "mse", **compile_arguments)
    return model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)


def reference(optimizer, x, y, model=None, batch_size=WHOLE_BATCH, dense=False):
    """The weights that one process gets from the whole batches, in the simplest of loops."""
    model = model or make_model()
    x, y = whole(x), whole(y)
    for i in range(0, len(x), batch_size):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x[i : i + batch_size]), tf.float32) - y[i : i + batch_size]))
            loss = optimizer.scale_loss(loss)
        grads = tape.gradient(loss, model.trainable_variables)
        if dense:
            grads = [tf.convert_to_tensor(grad) for grad in grads]
        optimizer.apply(grads, model.trainable_variables)
    optimizer.finalize_variable_values(model.trainable_variables)
    return model.get_weights()


def assert_ranks_equal(model):
    state = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    for rank, other in enumerate(hvd.allgather_object(state)):
        for variable, a, b in zip([*model.weights, *model.optimizer.variables], state, other):
            np.testing.assert_array_equal(a, b, err_msg=f"{variable.path}, rank {rank}")


def assert_trained_alike(model, expected, rtol=1e-5, atol=1e-6):
    assert_ranks_equal(model)
    for a, b in zip(model.get_weights(), expected):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fit_equals_one_process(kind):
    x, y = data()
    expected = reference(OPTIMIZERS[kind](), x, y)
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(OPTIMIZERS[kind]())
    fit(model, optimizer, mine(x), mine(y), BATCH)
    assert model.optimizer is optimizer
    assert_trained_alike(model, expected)
    assert int(np.asarray(optimizer.iterations)) == (STEPS // 2 if kind == "accumulating" else STEPS)


def test_gradient_is_the_average():
    variable = keras.Variable(np.zeros(3, np.float32), name="w")
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([1.0, 10.0, 100.0]) * (hvd.rank() + 1)], [variable])
    mean = (hvd.size() + 1) / 2
    np.testing.assert_array_equal(variable.numpy(), [-mean, -10 * mean, -100 * mean])


def test_sum_and_predivide():
    variable = keras.Variable(np.zeros(2, np.float32))
    eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum).apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-hvd.size()] * 2)
    variable.assign([0.0, 0.0])
    eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=4.0).apply(
        [tf.ones(2)], [variable]
    )
    np.testing.assert_allclose(variable.numpy(), [-1.0] * 2, rtol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_train_on_batch(eager):
    x, y = data()
    expected = reference(keras.optimizers.SGD(0.1), x, y)
    model = make_model()
    model.compile(eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=eager)
    for step in range(STEPS):
        model.train_on_batch(x[step, hvd.rank()], y[step, hvd.rank()])
    assert_trained_alike(model, expected)


@pytest.mark.parametrize("call", ["apply_gradients", "apply", "apply_by_position"])
@pytest.mark.parametrize("in_graph", [True, False])
def test_custom_loop(call, in_graph):
    x, y = data()
    expected = reference(keras.optimizers.Adam(0.01), x, y)
    model = make_model()
    model.optimizer = optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.Adam(0.01))
    if call == "apply_by_position":
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        grads = tape.gradient(loss, model.trainable_variables)
        if call == "apply_gradients":
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
        elif call == "apply":
            optimizer.apply(grads, model.trainable_variables)
        else:
            optimizer.apply(grads)

    step = tf.function(step) if in_graph else step
    for i in range(STEPS):
        step(tf.constant(x[i, hvd.rank()]), tf.constant(y[i, hvd.rank()]))
    assert_trained_alike(model, expected)


@pytest.mark.parametrize("eager", [False, True])
def test_process_set(pair, eager):
    """Three ranks: the first two average, the third trains by itself."""
    variable = keras.Variable([0.0])
    optimizer = keras.optimizers.LossScaleOptimizer(
        eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair), initial_scale=1.0
    )
    optimizer.build([variable])
    step = optimizer.apply if eager else tf.function(optimizer.apply)
    step([tf.constant([1.0 + hvd.rank()])])
    np.testing.assert_array_equal(variable.numpy(), [-1.5 if hvd.rank() < 2 else -3.0])


def test_variable_without_gradient():
    used, unused = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.constant([1.0 + hvd.rank()]), None], [used, unused])
    np.testing.assert_array_equal(used.numpy(), [1 - (hvd.size() + 1) / 2])
    np.testing.assert_array_equal(unused.numpy(), [1.0])


def loss_scaled(where, **options):
    scaler = {"initial_scale": 16.0, "dynamic_growth_steps": 3}
    inner = keras.optimizers.SGD(0.1)
    if where == "inside":
        return eightbit_keras.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, **scaler), **options)
    return keras.optimizers.LossScaleOptimizer(eightbit_keras.DistributedOptimizer(inner, **options), **scaler)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("eager", [False, True])
def test_overflow_on_one_rank_skips_the_step_on_all(where, eager):
    x, y = data(steps=6)
    bad = 2
    good = [i for i in range(6) if i != bad]
    expected = reference(keras.optimizers.SGD(0.1), x[good], y[good])

    model = make_model()
    optimizer = loss_scaled(where)
    model.compile(optimizer, "mse", run_eagerly=eager)
    scales = []
    for i in range(6):
        before = model.get_weights()
        own = x[i, hvd.rank()].copy()
        if i == bad and hvd.rank() == 1:
            own[0, 0] = np.inf
        model.train_on_batch(own, y[i, hvd.rank()])
        scales.append(float(np.asarray(optimizer.dynamic_scale)))
        if i == bad:
            for a, b in zip(before, model.get_weights()):
                np.testing.assert_array_equal(a, b)
    assert scales == [16.0, 16.0, 8.0, 8.0, 8.0, 16.0]
    assert_trained_alike(model, expected)


def test_mixed_precision_as_compile_sets_it_up():
    x, y = data()
    model = make_model(dtype="mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    fit(model, eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), mine(x), mine(y), BATCH)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_distributed(model.optimizer)
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    expected = reference(scaler, x, y, make_model(dtype="mixed_float16"))
    assert_trained_alike(model, expected, rtol=0.02, atol=0.02)
    assert float(np.asarray(model.optimizer.dynamic_scale)) == float(np.asarray(scaler.dynamic_scale))


def test_pure_bfloat16():
    x, y = data()
    model = make_model(dtype="bfloat16")
    fit(model, eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), mine(x), mine(y), BATCH)
    assert model.weights[0].dtype == "bfloat16"
    assert_ranks_equal(model)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_backward_passes(average, in_graph):
    x, y = data()
    # Without averaging, the sum of two passes' means is twice the mean: as if at twice the rate.
    one_process = keras.optimizers.SGD(0.1 if average else 0.2, momentum=0.9)
    expected = reference(one_process, x, y, batch_size=2 * WHOLE_BATCH)

    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    fit(model, optimizer, mine(x), mine(y), BATCH, run_eagerly=not in_graph)
    assert_trained_alike(model, expected)
    assert int(np.asarray(optimizer.iterations)) == STEPS // 2


def test_backward_passes_change_nothing_in_between():
    x, y = data(steps=5)
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.Adam(0.01), backward_passes_per_step=3, average_aggregated_gradients=True
    )
    model.compile(optimizer, "mse")
    changed, before = [], model.get_weights()
    for i in range(5):
        model.train_on_batch(x[i, hvd.rank()], y[i, hvd.rank()])
        changed.append(not np.array_equal(before[0], model.get_weights()[0]))
        before = model.get_weights()
    assert changed == [False, False, True, False, False]
    assert_trained_alike(model, reference(keras.optimizers.Adam(0.01), x[:3], y[:3], batch_size=3 * WHOLE_BATCH))


def test_backward_passes_inside_a_loss_scaler():
    x, y = data()
    expected = reference(keras.optimizers.SGD(0.1), x, y, batch_size=2 * WHOLE_BATCH)
    model = make_model()
    optimizer = loss_scaled("outside", backward_passes_per_step=2, average_aggregated_gradients=True)
    fit(model, optimizer, mine(x), mine(y), BATCH)
    assert_trained_alike(model, expected)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_embedding(sparse_as_dense, eager):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 11, size=(STEPS, hvd.size(), BATCH, 3)).astype(np.int32)
    y = rng.normal(size=(STEPS, hvd.size(), BATCH, 1)).astype(np.float32)
    # Keras updates sparse and dense gradients differently where an index comes twice.
    expected = reference(keras.optimizers.Adam(0.05), x, y, embedding_model(), dense=sparse_as_dense)
    model = embedding_model()
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.Adam(0.05), sparse_as_dense=sparse_as_dense)
    fit(model, optimizer, mine(x), mine(y), BATCH, run_eagerly=eager)
    assert_trained_alike(model, expected, rtol=1e-4, atol=1e-5)


def test_embedding_needs_dense_gradients_for_several_passes():
    model = embedding_model()
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        fit(model, optimizer, np.zeros((BATCH, 3), np.int32), np.zeros((BATCH, 1), np.float32), BATCH)


@pytest.mark.parametrize("num_groups", [1, 2, 99])
def test_groups(num_groups):
    x, y = data()
    expected = reference(keras.optimizers.SGD(0.1), x, y)
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), num_groups=num_groups)
    fit(model, optimizer, mine(x), mine(y), BATCH)
    assert_trained_alike(model, expected)


def test_group_of_two_dtypes():
    half, single = keras.Variable(np.zeros(2), dtype="float16"), keras.Variable(np.zeros(2), dtype="float32")
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), num_groups=1)
    optimizer.apply([tf.ones(2, tf.float16) * hvd.rank(), tf.ones(2) * hvd.rank()], [half, single])
    np.testing.assert_array_equal(half.numpy(), [-(hvd.size() - 1) / 2] * 2)
    np.testing.assert_array_equal(single.numpy(), [-(hvd.size() - 1) / 2] * 2)


class CountingCompressor:
    """Horovod's contract, and a record of the tensors that pass."""

    def __init__(self):
        self.names = []

    def compress(self, tensor):
        self.names.append(tensor.name)
        return tf.cast(tensor, tf.float16), tensor.dtype

    def decompress(self, tensor, ctx):
        return tf.cast(tensor, ctx)


@pytest.mark.parametrize("num_groups", [None, 1])
def test_any_compressor_is_called_once_for_each_gradient(num_groups):
    x, y = data()
    model, compressor = make_model(), CountingCompressor()
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=compressor, num_groups=num_groups
    )
    fit(model, optimizer, mine(x), mine(y), BATCH)
    assert compressor.names == [f"DistributedSGD/gradient_{i}:0" for i in range(4)]
    assert_trained_alike(model, reference(keras.optimizers.SGD(0.1), x, y), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("num_groups", [None, 2])
def test_horovods_fp16(num_groups):
    x, y = data()
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16, num_groups=num_groups
    )
    fit(model, optimizer, mine(x), mine(y), BATCH)
    assert_trained_alike(model, reference(keras.optimizers.SGD(0.1), x, y), rtol=0.01, atol=1e-3)


def eight_bit(**settings):
    return eightbit.EightBitCompressor(min_elements=16, **settings)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("num_groups", [None, 1])
def test_eight_bits_equal_the_reference(num_groups, in_graph):
    """Bit for bit; what is under min_elements stays exact."""
    shapes = [(40, 30), (2,), (5000,)]
    gradients = [
        [np.random.default_rng(10 * rank + i).normal(size=s).astype(np.float32) for i, s in enumerate(shapes)]
        for rank in range(hvd.size())
    ]
    variables = [keras.Variable(np.zeros(s, np.float32)) for s in shapes]
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=eight_bit(), num_groups=num_groups
    )
    optimizer.build(variables)
    step = tf.function(optimizer.apply) if in_graph else optimizer.apply
    step([tf.constant(g) for g in gradients[hvd.rank()]])

    large = [[g[0], g[2]] for g in gradients]
    if num_groups == 1:  # One exchange, in chunks that go over the borders of tensors.
        expected = codec.allreduce(large, data_types.DYNAMIC_TREE, 2048)
    else:
        expected = [codec.allreduce([[g[i]] for g in large], data_types.DYNAMIC_TREE, 2048)[0] for i in range(2)]
    np.testing.assert_array_equal(variables[0].numpy(), -expected[0])
    np.testing.assert_array_equal(variables[2].numpy(), -expected[1])
    np.testing.assert_allclose(variables[1].numpy(), -np.mean([g[1] for g in gradients], axis=0), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}])
def test_fit_in_eight_bits(options):
    x, y = data()
    rate = 0.1 / hvd.size() if "op" in options else 0.1
    expected = reference(
        keras.optimizers.SGD(0.1),
        x,
        y,
        batch_size=WHOLE_BATCH * options.get("backward_passes_per_step", 1),
    )
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(
        keras.optimizers.SGD(rate), compression=eight_bit(), average_aggregated_gradients=True, **options
    )
    fit(model, optimizer, mine(x), mine(y), BATCH)
    assert_trained_alike(model, expected, rtol=0.05, atol=0.01)
    assert not np.array_equal(model.get_weights()[0], expected[0])  # It did go through 8 bits.


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_overflow_in_eight_bits(where):
    x, y = data(steps=3)
    model = make_model()
    optimizer = loss_scaled(where, compression=eight_bit())
    model.compile(optimizer, "mse")
    scales, changed = [], []
    for i in range(3):
        before = model.get_weights()[0]
        own = x[i, hvd.rank()].copy()
        own[0, 0] = np.inf if i == 1 and hvd.rank() == 0 else own[0, 0]
        model.train_on_batch(own, y[i, hvd.rank()])
        scales.append(float(np.asarray(optimizer.dynamic_scale)))
        changed.append(not np.array_equal(before, model.get_weights()[0]))
    assert scales == [16.0, 8.0, 8.0]
    assert changed == [True, False, True]
    assert_ranks_equal(model)


def test_exclude_goes_by_the_variables_path():
    x, y = data()
    expected = reference(keras.optimizers.SGD(0.1), x, y)
    model = make_model()
    compressor = eightbit.EightBitCompressor(min_elements=0, exclude=("hidden/", "output/"))
    fit(
        model,
        eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor),
        mine(x),
        mine(y),
        BATCH,
    )
    assert_trained_alike(model, expected)


@pytest.mark.parametrize(
    ("kind", "eager"),
    [("none", True), ("eight bits", False), ("sparse", False), ("scaled", False), ("passes", False)],
)
def test_ranks_may_have_made_other_things_before(kind, eager):
    """Keras numbers what it makes, and Horovod matches by name."""
    for _ in range(hvd.rank()):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Embedding(2, 2)])
        keras.optimizers.Adam(0.1).build([keras.Variable([0.0])])
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(40, 4), keras.layers.Flatten()] if kind == "sparse" else []
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(9), keras.layers.Dense(1)])
    options = {"eight bits": {"compression": eight_bit()}, "passes": {"backward_passes_per_step": 2}}.get(kind, {})
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.Adam(0.1), **options)
    if kind == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    x = np.random.default_rng(hvd.rank()).integers(0, 40, size=(2 * BATCH, 3)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    model.compile(optimizer, "mse", run_eagerly=eager)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[eightbit_keras.BroadcastGlobalVariablesCallback(0)])
    assert_ranks_equal(model)


def test_steps_per_execution():
    x, y = data()
    expected = reference(keras.optimizers.SGD(0.1), x, y)
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(model, optimizer, mine(x), mine(y), BATCH, steps_per_execution=2)
    assert_trained_alike(model, expected)


def test_two_optimizers_in_one_step():
    """As adversarial training has them; both are called SGD."""
    first, second = (keras.Variable(np.zeros(3, np.float32), name="same") for _ in range(2))
    optimizers = [eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]

    @tf.function
    def step(scale):
        optimizers[0].apply([tf.ones(3) * scale], [first])
        optimizers[1].apply([tf.ones(3) * scale * 10], [second])

    for _ in range(3):
        step(tf.constant(hvd.rank() + 1.0))
    mean = (hvd.size() + 1) / 2
    np.testing.assert_array_equal(first.numpy(), [-3 * mean] * 3)
    np.testing.assert_array_equal(second.numpy(), [-30 * mean] * 3)


def test_learning_rate_can_be_set():
    variable = keras.Variable([0.0])
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    step = tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]))
    step()
    optimizer.learning_rate = 0.25
    step()
    np.testing.assert_array_equal(variable.numpy(), [-1.25])


@pytest.mark.parametrize("where", ["plain", "inside", "outside"])
def test_save_load_and_train_on(where, tmp_path):
    x, y = data()
    half = STEPS // 2

    def adam():
        return keras.optimizers.Adam(0.01, global_clipnorm=1.0)

    def wrap(optimizer):
        return eightbit_keras.DistributedOptimizer(optimizer)

    make = {
        "plain": lambda wrap: wrap(adam()),
        "inside": lambda wrap: wrap(keras.optimizers.LossScaleOptimizer(adam(), initial_scale=4.0)),
        "outside": lambda wrap: keras.optimizers.LossScaleOptimizer(wrap(adam()), initial_scale=4.0),
    }[where]
    expected = reference(make(lambda optimizer: optimizer), x, y)

    model = make_model()
    fit(model, make(wrap), mine(x[:half]), mine(y[:half]), BATCH)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not is_distributed(loaded.optimizer)
    assert type(loaded.optimizer) is {"plain": keras.optimizers.Adam}.get(where, keras.optimizers.LossScaleOptimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(a.numpy(), b.numpy())

    loaded.optimizer = wrap(loaded.optimizer)
    loaded.fit(mine(x[half:]), mine(y[half:]), batch_size=BATCH, shuffle=False, verbose=0)
    assert_trained_alike(loaded, expected, rtol=1e-4, atol=1e-5)


def test_compiled_by_xla_is_refused():
    x, y = data()
    model = make_model()
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(RuntimeError, match="jit_compile=False"):
        fit(model, optimizer, mine(x), mine(y), BATCH, jit_compile=True)

    variable = keras.Variable([0.0])
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([variable])
    with pytest.raises(RuntimeError, match=r"jit_compile out of your tf\.function"):
        tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]), jit_compile=True)()


def test_compile_without_a_word_about_xla_works():
    x, y = data()
    model = make_model()
    fit(
        model,
        eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        mine(x),
        mine(y),
        BATCH,
        jit_compile="auto",
    )
    assert_trained_alike(model, reference(keras.optimizers.SGD(0.1), x, y))


def test_horovods_wrapper_is_refused():
    import horovod.tensorflow.keras as hvd_keras

    with pytest.raises(ValueError, match="already distributed"):
        eightbit_keras.DistributedOptimizer(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
