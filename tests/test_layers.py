"""The Keras layers with one process, and between two devices of it; starts their tests on several ranks."""

import pathlib
import subprocess
import sys

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from launcher import backends, keras_2, launch

import hvd_eightbit.keras as eightbit_keras
from hvd_eightbit import data_types

FILES = pathlib.Path(__file__).parent / "distributed"


@pytest.fixture(autouse=True)
def horovod():
    hvd.init()


@pytest.mark.parametrize(
    ("ranks", "backend", "choice", "environment"),
    [
        (2, "gloo", "training or learning or bytes or saving or names or disagree or number or overflow", {}),
        (3, "gloo", "not (learning or names or bytes or eager)", keras_2()),
        (4, "gloo", "without_compression or 8_bits and 4-graph or rows", {}),
        (2, "mpi", "bytes or 8_bits and 4-graph or saving or disagree", {}),
    ],
    ids=["2-ranks", "3-ranks-keras-2", "4-ranks", "2-ranks-mpi"],
)
def test_on_ranks(ranks, backend, choice, environment):
    if backend not in backends():
        pytest.skip("Horovod is built without MPI, or there is no mpirun")
    command = ["-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "-k", choice, "--rootdir", str(FILES)]
    command.append(str(FILES / "test_layers.py"))
    job = launch(ranks, command, backend=backend, timeout=300, env={"PYTHONUNBUFFERED": "1", **environment})
    assert job.returncode == 0, job.stdout
    assert job.stdout.count(" passed") == ranks, job.stdout


TWO_DEVICES = """
import tensorflow as tf
import hvd_eightbit.keras as eightbit_keras
from tensorflow.python.eager import context

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
x = tf.random.stateless_normal([32, 64], [1, 2])
forward, backward = FORWARD, BACKWARD
with tf.device("/CPU:0"):
    v = tf.Variable(x)
with tf.device("/CPU:1"):
    w = tf.Variable(tf.ones([32, 64]))

@tf.function
def step():
    with tf.device("/CPU:0"):
        h = 2 * v
    y = eightbit_keras.EightBitBoundary("/CPU:1", forward, backward)(h)
    with tf.device("/CPU:1"):
        loss = tf.reduce_sum(tf.sin(y))
        w.assign(y)
    gradient, = tf.compat.v1.gradients(loss, [h], colocate_gradients_with_ops=True)
    with tf.device("/CPU:0"):
        v.assign(gradient)

context.context().enable_run_metadata()
step()
metadata = context.context().export_run_metadata()
for functions in metadata.function_graphs:
    for graph in functions.partition_graphs:
        for node in graph.node:
            if node.op in ("_Send", "_HostSend"):
                route = node.attr["send_device"].s.decode()[-5:] + ">" + node.attr["recv_device"].s.decode()[-5:]
                print("sent", tf.as_dtype(node.attr["T"].type).name, route)
coded = lambda a, t: a if t is None else tf.reshape(
    eightbit.dequantize(*eightbit.quantize(a, t), data_type=t), a.shape)
import hvd_eightbit as eightbit
y = coded(2 * x, forward)
tf.debugging.assert_equal(w.read_value(), y)
tf.debugging.assert_near(v.read_value(), coded(tf.cos(y), backward), rtol=1e-2, atol=1e-2)
"""


@pytest.mark.parametrize(
    ("forward", "backward"), [("dynamic_tree", "linear"), ("dynamic_tree", None), (None, "linear"), (None, None)]
)
def test_bytes_cross_between_devices(forward, backward):
    """The partitioned graph: one tensor each way, of bytes; float32 where there is no data type."""
    script = TWO_DEVICES.replace("FORWARD", repr(forward)).replace("BACKWARD", repr(backward))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    sent = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("sent")]
    sent = [(dtype, route) for dtype, route in sent if dtype not in ("int32",)]  # shapes
    there, back = ("float32" if t is None else "uint8" for t in (forward, backward))
    assert sorted(sent) == sorted([(there, "CPU:0>CPU:1"), (back, "CPU:1>CPU:0")]), run.stdout


@pytest.mark.parametrize("mode", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_boundary_and_its_gradient(mode):
    layer = eightbit_keras.EightBitBoundary(forward="dynamic_tree", backward=None)
    x, d = tf.random.stateless_normal([40, 100], [1, 2]), tf.random.stateless_normal([40, 100], [1, 3])

    @mode
    def both(x, d):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y * d)
        return y, tape.gradient(loss, x)

    y, dx = both(x, d)
    error = np.linalg.norm(y - x) / np.linalg.norm(x)
    assert 0.001 < error < 0.05
    np.testing.assert_array_equal(dx, d)


def test_boundary_in_a_nested_function_and_a_model():
    inputs = tf.keras.layers.Input((6,))
    outputs = eightbit_keras.EightBitBoundary()(tf.keras.layers.Dense(5)(inputs))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(outputs))
    model.compile("sgd", loss="mse")
    model.fit(np.ones((8, 6)), np.ones((8, 1)), verbose=0)
    inner = tf.function(eightbit_keras.EightBitBoundary(backward=None))
    x = tf.random.stateless_normal([7, 3], [1, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(inner(x))
    np.testing.assert_array_equal(tape.gradient(loss, x), np.ones((7, 3)))


def test_one_rank_is_an_ordinary_layer():
    if hvd.size() > 1:
        pytest.skip("one process")
    x = tf.random.stateless_normal([4, 3], [1, 2])
    assert eightbit_keras.GatherBatch()(x).shape == (4, 3)
    np.testing.assert_array_equal(eightbit_keras.ExchangeFeatures(3)(x), x)
    dense, layer = tf.keras.layers.Dense(5, "relu"), eightbit_keras.ModelParallelDense(5, "relu")
    dense.build((None, 3)), layer.build((None, 3))
    eightbit_keras.scatter_weights(layer, dense.get_weights())
    np.testing.assert_array_equal(layer(x), dense(x))


def custom_type():
    return data_types.DataType("mine", np.linspace(-1, 1, 256))


@pytest.mark.parametrize(
    "make",
    [
        lambda: eightbit_keras.EightBitBoundary("/CPU:0", "linear", None, 64),
        lambda: eightbit_keras.GatherBatch(custom_type(), "mantissa", None),
        lambda: eightbit_keras.ExchangeFeatures(10, None, None),
        lambda: eightbit_keras.ModelParallelDense(7, "relu", False, "he_normal", sub_batches=3, forward="static_tree"),
    ],
    ids=["boundary", "gather", "exchange", "dense"],
)
def test_configuration_there_and_back(make):
    layer = make()
    again = tf.keras.layers.deserialize(tf.keras.layers.serialize(layer))
    assert type(again) is type(layer) and again.get_config() == layer.get_config()


def test_summary(capsys):
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), eightbit_keras.ModelParallelDense(6)])
    model.summary()
    assert "ModelParallelDense" in capsys.readouterr().out and model.count_params() == 30


def test_shards_are_as_equal_as_can_be():
    assert eightbit_keras.layers.shard_sizes(11, 4) == (3, 3, 3, 2)
    with pytest.raises(ValueError, match="units=3 cannot be spread over 4 ranks"):
        eightbit_keras.layers.shard_sizes(3, 4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: eightbit_keras.ModelParallelDense(0), ValueError, "units=0"),
        (lambda: eightbit_keras.ModelParallelDense(4, sub_batches=1.5), ValueError, "sub_batches=1.5"),
        (lambda: eightbit_keras.GatherBatch("int8"), ValueError, "forward='int8'"),
        (lambda: eightbit_keras.EightBitBoundary(backward=8), TypeError, "backward=8"),
        (lambda: eightbit_keras.GatherBatch(block_size=3), ValueError, "block_size=3"),
        (lambda: eightbit_keras.GatherBatch(process_set=[0, 99]), ValueError, "not registered"),
        (lambda: eightbit_keras.GatherBatch(dtype="int32")(tf.constant([1, 2])), TypeError, "inputs has dtype int32"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(tf.keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=tensorflow"):
        eightbit_keras.GatherBatch()


def test_weights_that_do_not_fit():
    layer = eightbit_keras.ModelParallelDense(5)
    layer.build((None, 3))
    with pytest.raises(ValueError, match="has 1 arrays"):
        eightbit_keras.scatter_weights(layer, [np.zeros((3, 5))])
    with pytest.raises(ValueError, match=r"weights\[0\] has shape \(3, 4\)"):
        eightbit_keras.scatter_weights(layer, [np.zeros((3, 4)), np.zeros(5)])
