"""The Keras layers between ranks, on however many ranks run this file, against one process and against NumPy.

    horovodrun -np 3 --gloo python -m pytest -x tests/distributed/test_layers.py

Every rank knows the data of all, and has its own rows of it; ranks have different numbers of rows, and of columns.
"""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit.keras as eightbit_keras
from hvd_eightbit import data_types, reference

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
ROWS = [5, 3, 8, 4][: hvd.size()]
FEATURES, UNITS = 17, 11
OWN_ROWS = slice(sum(ROWS[: hvd.rank()]), sum(ROWS[: hvd.rank() + 1]))
both_modes = pytest.mark.parametrize("mode", [lambda f: f, tf.function], ids=["eager", "graph"])


@pytest.fixture(autouse=True)
def horovod():
    hvd.init()


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def raw(variable) -> tf.Variable:
    return variable if isinstance(variable, tf.Variable) else variable.value


def cut(array, sizes, axis=0):
    return np.split(array, np.cumsum(sizes)[:-1], axis=axis)


def coded(array, data_type, block_size=2048):
    """What arrives of a message."""
    if data_type is None:
        return array
    data_type = data_types.get(data_type)
    codes, absmax = reference.quantize(array, data_type, block_size)
    return reference.dequantize(codes, absmax, data_type, block_size, array.dtype)


def sent(arrays, receiver, data_type, block_size=2048):
    """What a rank receives if rank s sends it arrays[s]: its own as it is."""
    return [a if s == receiver else coded(a, data_type, block_size) for s, a in enumerate(arrays)]


def output_and_gradients(layer, x, weights, **call):
    """layer(x), and the gradients of the sum of output times weights for x and the layer's own weights."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, **call)
        loss = tf.reduce_sum(y * weights)
    return y, *tape.gradient(loss, [x, *map(raw, layer.trainable_weights)])


@both_modes
@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [
        ("float16", "static_tree", None),
        ("bfloat16", None, "mantissa"),
        ("float32", "dynamic_tree", "linear"),
        ("float64", "linear", "dynamic_tree"),
    ],
)
def test_gather_batch(mode, dtype, forward, backward):
    dtype = tf.as_dtype(dtype).as_numpy_dtype
    x, d = normal(sum(ROWS), 6, 7, dtype=dtype), normal(hvd.size(), sum(ROWS), 6, 7, seed=1, dtype=dtype)
    layer = eightbit_keras.GatherBatch(forward, backward, block_size=64, dtype=tf.as_dtype(dtype).name)
    y, dx = mode(output_and_gradients)(layer, tf.constant(x[OWN_ROWS]), tf.constant(d[hvd.rank()]))
    assert y.dtype == dx.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(y, np.concatenate(sent(cut(x, ROWS), hvd.rank(), forward, 64)))
    parts = sent([d[s][OWN_ROWS] for s in range(hvd.size())], hvd.rank(), backward, 64)
    wanted = sum(p.astype(np.float64) for p in parts)
    tolerance = {2: 1e-2, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(dx.numpy().astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@both_modes
@pytest.mark.parametrize(("forward", "backward"), [("dynamic_tree", "linear"), (None, None)])
def test_exchange_features(mode, forward, backward):
    widths = eightbit_keras.layers.shard_sizes(UNITS, hvd.size())
    x, d = normal(sum(ROWS), 2, UNITS), normal(sum(ROWS), 2, UNITS, seed=1)
    layer = eightbit_keras.ExchangeFeatures(UNITS, forward, backward)
    own = cut(x, widths, axis=-1)[hvd.rank()]
    y, dx = mode(lambda x, d: output_and_gradients(layer, x, d, like=d))(tf.constant(own), tf.constant(d[OWN_ROWS]))
    parts = sent(cut(x[OWN_ROWS], widths, axis=-1), hvd.rank(), forward)
    np.testing.assert_array_equal(y, np.concatenate(parts, axis=-1))
    parts = sent(cut(cut(d, widths, axis=-1)[hvd.rank()], ROWS), hvd.rank(), backward)
    np.testing.assert_array_equal(dx, np.concatenate(parts))


def test_exchange_features_with_as_many_rows_and_features_everywhere():
    x = normal(2 * hvd.size(), 3 * hvd.size())
    own = tf.constant(cut(x, [3] * hvd.size(), axis=1)[hvd.rank()])
    y = eightbit_keras.ExchangeFeatures(forward=None)(own)
    np.testing.assert_array_equal(y, x[2 * hvd.rank() : 2 * hvd.rank() + 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="like="):
        eightbit_keras.ExchangeFeatures()(own[1:])
    with pytest.raises(ValueError, match="units=100"):
        eightbit_keras.ExchangeFeatures(100)(own)


@both_modes
def test_gradients_are_the_exact_adjoint_to_any_order(mode):
    """<y, F x> = <F* y, x>, summed over ranks; and the gradient of the gradient is F again."""
    gather = eightbit_keras.GatherBatch(None, None, dtype="float64")
    x, d = normal(sum(ROWS), 3, dtype=np.float64), normal(hvd.size(), sum(ROWS), 3, seed=1, dtype=np.float64)

    @mode
    def both_orders(x, d):
        with tf.GradientTape() as outer:
            outer.watch(d)
            y, dx = output_and_gradients(gather, x, d)
            inner = tf.reduce_sum(dx * x)
        return tf.reduce_sum(y * d), inner, y, outer.gradient(inner, d)

    one, other, y, again = both_orders(tf.constant(x[OWN_ROWS]), tf.constant(d[hvd.rank()]))
    np.testing.assert_allclose(hvd.allreduce(one, op=hvd.Sum), hvd.allreduce(other, op=hvd.Sum), rtol=1e-12)
    np.testing.assert_allclose(again, y, rtol=1e-12)


def dense_pair(activation="relu", **arguments):
    """An ordinary layer, and ours with the same weights."""
    dense = keras.layers.Dense(UNITS, activation=activation, bias_initializer="random_uniform")
    dense.build((None, FEATURES))
    dense.set_weights([normal(FEATURES, UNITS, seed=2), normal(UNITS, seed=3)])
    layer = eightbit_keras.ModelParallelDense(UNITS, activation=activation, **arguments)
    layer.build((None, FEATURES))
    eightbit_keras.scatter_weights(layer, dense.get_weights())
    return dense, layer


@both_modes
@pytest.mark.parametrize(("activation", "sub_batches"), [("relu", 1), ("softmax", 3), (None, 7)])
def test_dense_without_compression_is_an_ordinary_dense(mode, activation, sub_batches):
    dense, layer = dense_pair(activation, sub_batches=sub_batches, forward=None, backward=None)
    x, d = normal(sum(ROWS), 2, FEATURES), normal(sum(ROWS), 2, UNITS, seed=1)
    y, dx, dk, db = output_and_gradients(dense, tf.constant(x), tf.constant(d))
    own = mode(output_and_gradients)(layer, tf.constant(x[OWN_ROWS]), tf.constant(d[OWN_ROWS]))
    wanted = y[OWN_ROWS], dx[OWN_ROWS], cut(dk, layer.shards, 1)[hvd.rank()], cut(db, layer.shards)[hvd.rank()]
    for a, b in zip(own, wanted):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def simulated(x, d, kernel, bias, shards, sub_batches, forward, backward):
    """Outputs, and gradients for x, kernel and bias, of a layer without activation, all ranks at once, in NumPy."""
    ranks = range(len(ROWS))
    ys, dxs = [[] for _ in ranks], [[] for _ in ranks]
    dks, dbs = [0 for _ in ranks], [0 for _ in ranks]
    kernels, biases = cut(kernel, shards, 1), cut(bias, shards)
    pieces = [[np.array_split(part, sub_batches) for part in cut(a, ROWS)] for a in (x, d)]
    for k in range(sub_batches):
        xs, ds = [[pieces[i][r][k] for r in ranks] for i in (0, 1)]
        rows = [len(a) for a in xs]
        wholes = [np.concatenate(sent(xs, r, forward)) for r in ranks]
        products = [cut(whole @ w + b, rows) for whole, w, b in zip(wholes, kernels, biases)]
        columns = [cut(a, shards, 1) for a in ds]
        backs = [np.concatenate(sent([c[r] for c in columns], r, backward)) for r in ranks]
        gathered = [cut(back @ w.T, rows) for back, w in zip(backs, kernels)]
        for r in ranks:
            ys[r].append(np.concatenate(sent([p[r] for p in products], r, forward), axis=1))
            dks[r] = dks[r] + wholes[r].T @ backs[r]
            dbs[r] = dbs[r] + backs[r].sum(0)
            dxs[r].append(sum(sent([g[r] for g in gathered], r, backward)))
    r = hvd.rank()
    return np.concatenate(ys[r]), np.concatenate(dxs[r]), dks[r], dbs[r]


@both_modes
@pytest.mark.parametrize("sub_batches", [1, 4])
def test_dense_in_8_bits(mode, sub_batches):
    _, layer = dense_pair(None, sub_batches=sub_batches, forward="dynamic_tree", backward="linear")
    kernel, bias = normal(FEATURES, UNITS, seed=2), normal(UNITS, seed=3)
    x, d = normal(sum(ROWS), FEATURES), normal(sum(ROWS), UNITS, seed=1)
    own = mode(output_and_gradients)(layer, tf.constant(x[OWN_ROWS]), tf.constant(d[OWN_ROWS]))
    exact = x[OWN_ROWS] @ kernel + bias, d[OWN_ROWS] @ kernel.T
    wanted = simulated(x, d, kernel, bias, layer.shards, sub_batches, "dynamic_tree", "linear")
    for a, b in zip(own, wanted):
        # Products are rounded otherwise here, and a number between two codes may so get the other one.
        close = np.isclose(a, b, rtol=1e-4, atol=1e-4)
        assert a.shape == b.shape and close.mean() > 0.98
    for a, b in zip(own, exact):
        assert 0 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.05


def test_a_rank_without_rows():
    dense, layer = dense_pair(sub_batches=2, forward=None, backward=None)
    x, d = normal(4, FEATURES), normal(4, UNITS, seed=1)
    own = slice(0, 4) if hvd.rank() == 0 else slice(0, 0)
    y, dx, dk, _ = output_and_gradients(layer, tf.constant(x[own]), tf.constant(d[own]))
    wanted = output_and_gradients(dense, tf.constant(x), tf.constant(d))
    np.testing.assert_allclose(y, wanted[0][own], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, wanted[1][own], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dk, cut(wanted[2], layer.shards, 1)[hvd.rank()], rtol=1e-5, atol=1e-5)


def test_names_in_loops_retraced_functions_and_beside_layers_of_one_rank():
    for _ in range(hvd.rank() * 3):
        keras.layers.Dense(1)  # Keras numbers the layers: names of layers differ between ranks from here on
    layers = [eightbit_keras.ModelParallelDense(FEATURES, sub_batches=2, forward=None, backward=None) for _ in "ab"]
    weights = [normal(FEATURES, FEATURES, seed=i) / 4 for i in (1, 2)]
    for layer, weight in zip(layers, weights):
        layer.build((None, FEATURES))
        eightbit_keras.scatter_weights(layer, [weight, np.zeros(FEATURES, np.float32)])

    @tf.function
    def loop(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = layers[1](layers[0](y))
            y = layers[0](y) + layers[1](y)
            loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, x)

    for more in (0, 2):
        x = np.concatenate([normal(sum(ROWS), FEATURES)] + more * [np.ones((hvd.size(), FEATURES), np.float32)])
        own = np.concatenate([x[OWN_ROWS], x[: more * 1]])
        y, dx = loop(tf.constant(own))
        power = np.linalg.matrix_power(weights[0] @ weights[1], 3) @ (weights[0] + weights[1])
        np.testing.assert_allclose(y, own @ power, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(dx, np.tile(power.sum(1), (len(own), 1)), rtol=1e-3, atol=1e-4)


@both_modes
def test_ranks_that_disagree_all_get_an_error(mode):
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    x = tf.constant(normal(4, 6))
    layer = eightbit_keras.GatherBatch("linear" if hvd.rank() == 0 else "mantissa")
    with pytest.raises(tf.errors.InvalidArgumentError, match="disagree about a model-parallel layer"):
        mode(layer)(x)
    layer = eightbit_keras.GatherBatch()
    with pytest.raises(tf.errors.InvalidArgumentError, match="disagree about a model-parallel layer"):
        mode(layer)(x if hvd.rank() == 0 else x[:, :3])
    assert mode(layer)(x).shape[0] == 4 * hvd.size()  # all can go on


def transmitted() -> int:
    """Bytes that this host's interfaces have sent since it was started."""
    with open("/proc/self/net/dev") as table:
        return sum(int(line.split(":")[1].split()[8]) for line in table if ":" in line)


def bytes_sent(step) -> float:
    """Bytes that a rank sends in a call of step, as the interfaces count them. Others can only add: the least of 3."""

    def wait_for_all():
        hvd.allreduce(tf.constant(0.0))

    least = float("inf")
    for _ in range(3):
        wait_for_all()
        before = transmitted()
        wait_for_all()
        step()
        wait_for_all()
        least = min(least, (transmitted() - before) / hvd.size())
        wait_for_all()
    return least


def test_bytes_on_the_wire():
    if hvd.size() == 1:
        pytest.skip("nothing is sent")
    rows, features, units = 512, 768, 900
    x, d = tf.constant(normal(rows, features)), tf.constant(normal(rows, units, seed=1))
    measured = {}
    for data_type in (None, "dynamic_tree"):
        layer = eightbit_keras.ModelParallelDense(units, sub_batches=2, forward=data_type, backward=data_type)
        layer.build((None, features))
        step = tf.function(output_and_gradients)
        step(layer, x, d)
        measured[data_type] = bytes_sent(lambda step=step, layer=layer: step(layer, x, d))
    # Forward the own rows to each other rank, backward their gradients; and as many products, own columns for all rows.
    elements = 2 * (hvd.size() - 1) * rows * (features + units / hvd.size())
    assert 4 * elements < measured[None] < 4.08 * elements
    assert elements < measured["dynamic_tree"] < 1.04 * elements
    assert measured["dynamic_tree"] <= 0.26 * measured[None]


def make_model(kind=None, units=UNITS, process_set=None, **arguments):
    """Data-parallel, then model-parallel, then data-parallel; with kind=None ordinary layers."""
    keras.utils.set_random_seed(4)
    if kind is None:
        hidden = keras.layers.Dense(units, activation="tanh", name="hidden")
    else:
        hidden = eightbit_keras.ModelParallelDense(
            units, activation="tanh", name="hidden", process_set=process_set, **{**kind, **arguments}
        )
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(FEATURES, activation="tanh", name="first"),
            hidden,
            keras.layers.Dense(3, name="last"),
        ]
    )


EXACT = {"forward": None, "backward": None}


def batch_of(rank, steps):
    return normal(steps, 4, FEATURES, seed=10 + rank), normal(steps, 4, 3, seed=20 + rank)


def trained_by_one_process(steps, optimizer):
    """The weights that one process gets with the whole batches."""
    model = make_model()
    model.compile(optimizer, loss="mse")
    x, y = (np.concatenate(parts, axis=1) for parts in zip(*[batch_of(r, steps) for r in range(hvd.size())]))
    for a, b in zip(x, y):
        model.train_on_batch(a, b)
    return model.get_weights()


def assert_same_weights(model, wanted, tolerance=1e-5):
    for a, b in zip(eightbit_keras.gather_weights(model), wanted):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def optimizer():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize(("loop", "op"), [("fit", hvd.Average), ("tape", hvd.Average), ("fit", hvd.Sum)])
def test_training_equals_one_process_with_the_whole_batch(loop, op):
    steps = 3
    model = make_model(EXACT, sub_batches=2)
    local = eightbit_keras.local_layers(model)
    assert [layer.name for layer in local] == ["hidden"]
    wanted = trained_by_one_process(steps, optimizer())
    x, y = batch_of(hvd.rank(), steps)
    factor = 1.0 if op == hvd.Average else 1 / hvd.size()  # of the loss

    def loss_of(y, prediction):
        return factor * tf.reduce_mean(tf.square(y - prediction))

    if loop == "fit":
        distributed = eightbit_keras.PartialDistributedOptimizer(optimizer(), local, op=op)
        model.compile(distributed, loss=loss_of)
        model.fit(x.reshape(-1, FEATURES), y.reshape(-1, 3), batch_size=4, shuffle=False, verbose=0)
    else:
        plain = optimizer()
        variables = model.trainable_variables

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            tape = eightbit_keras.PartialDistributedGradientTape(tape, local, op=op)
            plain.apply_gradients(zip(tape.gradient(loss, variables), variables))

        for a, b in zip(x, y):
            step(a, b)
    assert_same_weights(model, wanted)


def test_training_with_accumulation():
    model = make_model(EXACT)
    distributed = eightbit_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1),
        eightbit_keras.local_layers(model),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    model.compile(distributed, loss="mse")
    x, y = batch_of(hvd.rank(), 2)
    for a, b in zip(x, y):
        model.train_on_batch(a, b)
    whole = make_model()
    whole.compile(keras.optimizers.SGD(0.1), loss="mse")
    batches = [batch_of(rank, 2) for rank in range(hvd.size())]
    x, y = (np.concatenate([a.reshape(8, -1) for a in parts]) for parts in zip(*batches))
    whole.train_on_batch(x, y)
    assert_same_weights(model, whole.get_weights())


@pytest.mark.parametrize("name", ["SGD", "Adam", "scaled", "legacy"])
def test_training_with_callbacks_leaves_local_weights_alone(name):
    """Neither the columns of this rank nor the optimizer's momentums for them are sent or compared; the others are."""
    if name == "legacy" and KERAS_3:
        pytest.skip("Keras 2 only")
    model = make_model(EXACT, units=5 * hvd.size())  # 5 columns on each rank, which no other layer has
    make = {"SGD": optimizer, "legacy": lambda: keras.optimizers.legacy.Adam()}.get(name, keras.optimizers.Adam)
    chosen, scaled = make(), keras.mixed_precision.LossScaleOptimizer
    if name == "scaled" and KERAS_3:
        chosen = scaled(chosen)
    chosen = eightbit_keras.PartialDistributedOptimizer(chosen, eightbit_keras.local_layers(model))
    if name == "scaled" and not KERAS_3:  # Horovod's wrapper goes inside
        chosen = scaled(chosen)
    model.compile(chosen, loss="mse")
    agree = eightbit_keras.RankAgreement(every=1)
    x, y = (np.concatenate(part) for part in batch_of(hvd.rank(), 3))
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[eightbit_keras.BroadcastGlobalVariablesCallback(), agree])

    variables = model.optimizer.variables
    everything = [raw(v) for v in [*model.weights, *(variables() if callable(variables) else variables)]]
    everything = [v for v in everything if v.dtype.is_floating and v.shape.rank]  # neither steps nor rates
    columns = model.get_layer("hidden").weights[0].shape[-1]
    local = [v for v in everything if v.shape[-1] == columns]
    shared = [v for v in everything if v.shape[-1] != columns]
    assert len(local) == {"SGD": 4, "Adam": 6, "scaled": 6, "legacy": 6}[name]
    assert len(shared) == 2 * len(local)
    for v in everything:
        v.assign(tf.fill(v.shape, tf.cast(hvd.rank() + 1, v.dtype)))
    with pytest.raises(RuntimeError, match="first/kernel|dense|first"):
        agree._check("now")
    broadcast = eightbit_keras.BroadcastGlobalVariablesCallback()
    broadcast.set_model(model)
    broadcast.on_train_batch_end(0)
    assert all(np.all(v.numpy() == hvd.rank() + 1) for v in local)
    assert all(np.all(v.numpy() == 1) for v in shared)
    agree._check("now")


def test_checkpoints_for_another_number_of_ranks(pair):
    """From all ranks to an ordinary model, from there to ranks 0 and 1, and back."""
    of_all = make_model(EXACT)
    whole = eightbit_keras.gather_weights(of_all)
    ordinary = make_model()
    ordinary.set_weights(whole)
    if pair.included():
        of_two = make_model(EXACT, process_set=pair)
        eightbit_keras.scatter_weights(of_two, ordinary.get_weights())
        assert of_two.get_layer("hidden").get_weights()[0].shape == (FEATURES, [6, 5][pair.rank()])
        x = normal(4, FEATURES, seed=hvd.rank())
        np.testing.assert_allclose(of_two(x), ordinary(x), rtol=1e-5, atol=1e-5)
        for a, b in zip(eightbit_keras.gather_weights(of_two), whole):
            np.testing.assert_array_equal(a, b)
        config = of_two.get_layer("hidden").get_config()
        assert config["process_set"] == [0, 1]
        again = eightbit_keras.ModelParallelDense.from_config(config)
        again.build((None, FEATURES))
        assert again.shards == (6, 5)


def test_saving_and_loading(tmp_path):
    model = make_model({"forward": "linear", "backward": "static_tree"}, sub_batches=2)
    x = normal(4, FEATURES, seed=hvd.rank())
    before = model.predict(x, verbose=0)
    path = str(tmp_path / f"rank{hvd.rank()}.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    layer = loaded.get_layer("hidden")
    assert isinstance(layer, eightbit_keras.ModelParallelDense) and layer.sub_batches == 2
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), before)
    np.testing.assert_array_equal(eightbit_keras.gather_weights(loaded)[2], eightbit_keras.gather_weights(model)[2])


def test_the_same_seed_gives_an_ordinary_layers_weights():
    for a, b in zip(eightbit_keras.gather_weights(make_model(EXACT)), make_model().get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    _, exact = dense_pair(forward=None, backward=None)
    _, layer = dense_pair(dtype=keras.mixed_precision.Policy(policy) if not KERAS_3 else policy)
    x = tf.constant(normal(ROWS[hvd.rank()], FEATURES, seed=hvd.rank()))
    y, dx, dk, _ = output_and_gradients(layer, x, tf.ones([ROWS[hvd.rank()], UNITS], policy[6:]))
    assert y.dtype == policy[6:] and dk.dtype == tf.float32 and raw(layer.kernel).dtype == tf.float32
    wanted = exact(x)
    assert np.linalg.norm(tf.cast(y, tf.float32) - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_of_one_rank_is_nan_in_the_kernel_gradients_of_all(bad):
    """And in the outputs of that rank alone: the others' rows do not depend on it."""
    _, layer = dense_pair(None)
    x = normal(4, FEATURES)
    last = hvd.rank() == hvd.size() - 1
    x[0, 0] = bad if last else 1
    y, dx, dk, db = output_and_gradients(layer, tf.constant(x), tf.ones([4, UNITS]))
    assert np.isfinite(y).all() != last
    assert not np.isfinite(dk).any(axis=1).all()
    assert np.isfinite(dx).all() and np.isfinite(db).all()


@pytest.mark.parametrize("loop", ["fit", "tape"])
def test_an_overflow_in_the_columns_of_one_rank_is_seen_by_all(loop):
    model = make_model(EXACT)
    local = eightbit_keras.local_layers(model)
    variables = model.trainable_variables
    before = model.get_weights()
    bad = np.inf if hvd.rank() == hvd.size() - 1 else 1.0  # in the gradient of the kernel of the last rank only
    hidden = [id(v) for v in model.get_layer("hidden").trainable_variables]
    if loop == "tape":
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(raw(v)) * (bad if id(v) == hidden[0] else 1.0) for v in variables])
        tape = eightbit_keras.PartialDistributedGradientTape(tape, local)
        gradients = tape.gradient(loss, variables)
        assert [bool(np.isfinite(g).all()) for g in gradients] == [id(v) not in hidden for v in variables]
    elif KERAS_3:
        gradients = [tf.ones(v.shape) * (bad if id(v) == hidden[0] else 1.0) for v in variables]
        for order in ("scaler outside", "scaler inside"):
            optimizer = keras.optimizers.SGD(1.0)
            if order == "scaler inside":
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
            optimizer = eightbit_keras.PartialDistributedOptimizer(optimizer, local)
            if order == "scaler outside":
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
            optimizer.apply(gradients, variables)
            assert float(optimizer.dynamic_scale) == 1.0
        for a, b in zip(model.get_weights(), before):
            np.testing.assert_array_equal(a, b)
    else:
        sgd = eightbit_keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local)
        gradients = [tf.ones(v.shape) * (bad if id(v) == hidden[0] else 1.0) for v in variables]
        reduced = sgd._allreduce(gradients, variables)
        assert [bool(np.isfinite(g).all()) for g in reduced] == [id(v) not in hidden for v in variables]


def test_learning_in_8_bits_is_as_good():
    """A problem that is not linear: the error of 8 bits against float32's, over the same data."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(2, FEATURES, 64)), rng.normal(size=(64, 3))

    def data(count, seed):
        x = np.random.default_rng(seed).normal(size=(count, FEATURES))
        return x.astype(np.float32), np.argmax(np.tanh(x @ teacher[0][0]) @ teacher[1], axis=1)

    test_x, test_y = data(2000, 1)
    errors = {}
    for name, kind in (("float32", EXACT), ("8 bits", {})):
        model = make_model(kind, units=64)
        local = eightbit_keras.local_layers(model)
        adam = eightbit_keras.PartialDistributedOptimizer(keras.optimizers.Adam(0.005), local)
        model.compile(adam, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = data(2048, 100 + hvd.rank())
        model.fit(x, y, batch_size=64, epochs=4, shuffle=False, verbose=0)
        logits = model.predict(test_x, batch_size=1000, verbose=0)
        errors[name] = np.mean(np.argmax(logits, axis=1) != test_y)
    assert errors["float32"] < 0.3
    assert abs(errors["8 bits"] - errors["float32"]) < 0.02, errors
