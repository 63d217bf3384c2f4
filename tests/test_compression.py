"""What can be said of the compressor with one process (see tests/distributed for the rest)."""

import dataclasses
import subprocess
import sys

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit as eightbit


def test_ready_made_ones():
    for name in ("dynamic_tree", "linear", "mantissa", "static_tree"):
        compressor = getattr(eightbit.Compression, name)
        assert compressor.data_type.name == name and compressor.block_size == 2048
        assert compressor == eightbit.EightBitCompressor(name)


def test_immutable_and_hashable():
    a, b = eightbit.EightBitCompressor("linear", exclude=["x"]), eightbit.EightBitCompressor("linear", exclude=("x",))
    assert a == b and hash(a) == hash(b) and len({a, b, eightbit.EightBitCompressor("linear")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.block_size = 64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data_type": "int8"}, ValueError, "data_type='int8' is not known: use one of dynamic_tree"),
        ({"data_type": 3}, TypeError, "data_type=3"),
        ({"block_size": 0}, ValueError, "block_size=0 must be at least 16"),
        ({"block_size": 1.5}, TypeError, "block_size=1.5"),
        ({"min_elements": -1}, ValueError, "min_elements=-1"),
        ({"min_elements": "16"}, ValueError, "min_elements='16'"),
        ({"exclude": "bias"}, TypeError, r"exclude='bias': expected a sequence"),
        ({"exclude": ("(",)}, ValueError, "is not a regular expression"),
        ({"process_set": [0, 1]}, TypeError, r"process_set=\[0, 1\]"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        eightbit.EightBitCompressor(**arguments)


def test_before_horovod_is_initialized():
    """In a process of its own: others of this session may have called hvd.init()."""
    program = (
        "import tensorflow as tf, hvd_eightbit as eightbit\neightbit.Compression.linear.compress(tf.zeros([100000]))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and "hvd.init()" in run.stderr


def test_one_process_is_left_alone():
    hvd.init()
    x = tf.random.stateless_normal([100_000], [1, 2])
    for op in (hvd.Average, hvd.Sum, hvd.Max):
        np.testing.assert_array_equal(hvd.allreduce(x, op=op, compression=eightbit.Compression.linear), x)
    np.testing.assert_array_equal(eightbit.allreduce(x), x)
    assert eightbit.allreduce([]) == []


def test_unregistered_process_set():
    hvd.init()
    with pytest.raises(ValueError, match="is not registered: give it to hvd.init"):
        eightbit.EightBitCompressor(process_set=hvd.ProcessSet([0])).compress(tf.zeros([100000]))


def test_our_allreduce_refuses():
    hvd.init()
    with pytest.raises(ValueError, match="only hvd.Average and hvd.Sum"):
        eightbit.allreduce(tf.zeros([4]), op=hvd.Min)
    with pytest.raises(TypeError, match="tensors has dtype int32"):
        eightbit.allreduce(tf.zeros([4], tf.int32))
    with pytest.raises(TypeError, match=r"tensors\[1\] has dtype float16, tensors\[0\] float32"):
        eightbit.allreduce([tf.zeros([4]), tf.zeros([4], tf.float16)])
    with pytest.raises(ValueError, match="data_type="):
        eightbit.allreduce(tf.zeros([4]), data_type="x")


def test_package_names():
    assert "Compression" in dir(eightbit)
    with pytest.raises(AttributeError, match="has no attribute 'Compressor'"):
        eightbit.Compressor  # noqa: B018


def test_import_is_light():
    program = (
        "import sys, hvd_eightbit, hvd_eightbit.reference; assert not {'tensorflow', 'horovod'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
