"""Every CPU kernel equals reference.py bit for bit."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numbers_of_all_kinds import CROWDED, DTYPES, KINDS, TYPES, assert_same, cast, numbers

from hvd_eightbit import data_types, ops, reference, wire


@pytest.mark.parametrize("data_type", [*TYPES, CROWDED], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_and_dequantize(kind, dtype, data_type):
    for n, block_size in [(0, 16), (1, 16), (17, 16), (4096, 2048), (6145, 2048), (20001, 5000), (20001, None)]:
        x = cast(numbers(kind, n, seed=n), dtype)
        codes, absmax = ops.quantize(x, data_type, block_size)
        expected_codes, expected_absmax = reference.quantize(x, data_type, block_size)
        assert_same(codes, expected_codes)
        assert_same(absmax, expected_absmax)
        for out in DTYPES:
            decoded = ops.dequantize(codes, absmax, data_type, block_size, dtype=out)
            expected = reference.dequantize(expected_codes, expected_absmax, data_type, block_size, out)
            assert_same(decoded, expected)


@pytest.mark.parametrize("data_type", [*TYPES, CROWDED], ids=repr)
def test_borders(data_type):
    """Inputs at, just below and just above each midpoint and each value, where a code changes."""
    at = np.concatenate([data_type.midpoints, data_type.values, np.float32([1, -1])])
    x = np.concatenate([at, np.nextafter(at, np.float32(2)), np.nextafter(at, np.float32(-2))]).clip(-1, 1)
    for absmax in np.float32([1, 3, 1e-38, 1e-44, 3e38]):
        scaled = np.concatenate([x * absmax, [absmax]]).astype(np.float32)
        codes, _ = ops.quantize(scaled, data_type, None)
        assert_same(codes, reference.quantize(scaled, data_type, None)[0])


def exchange(buckets, data_type, block_size, scale):
    """The three kernels of an allreduce over simulated ranks, each step checked against the reference."""
    ranks = len(buckets)
    sent = []
    for rank, bucket in enumerate(buckets):
        sent.append(ops.pack(bucket, ranks, rank, data_type, block_size).numpy())
        assert_same(sent[-1], reference.pack(bucket, ranks, rank, data_type, block_size))
    reduced = []
    for rank, bucket in enumerate(buckets):
        received = np.stack([messages[rank] for messages in sent])
        reduced.append(ops.reduce(received, bucket, rank, data_type, block_size).numpy())
        assert_same(reduced[-1], reference.reduce(received, bucket, rank, data_type, block_size))
    outputs = ops.unpack(np.stack(reduced), buckets[0], scale, data_type, block_size)
    expected = reference.unpack(np.stack(reduced), buckets[0], data_type, block_size, scale)
    for output, e in zip(outputs, expected):
        assert_same(output, e)
    return [output.numpy() for output in outputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_exchange(kind, dtype):
    shapes = [(3, 5), (0,), (), (2500,), (7,), (9001,), (41, 31)]
    for ranks, block_size, scale in [(1, 64, 1.0), (2, 2048, 1.0), (3, 16, 3.0), (4, None, 0.25), (7, 5000, 1.0)]:
        buckets = [
            [cast(numbers(kind, int(np.prod(s)), 100 * r + i).reshape(s), dtype) for i, s in enumerate(shapes)]
            for r in range(ranks)
        ]
        exchange(buckets, TYPES[ranks % 4], block_size, scale)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
    block_size=st.sampled_from([None, 16, 17, 64, 2048]),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_exchange_of_any_bucket(sizes, ranks, block_size, seed, kind):
    buckets = [
        [cast(numbers(kind, n, (seed + 31 * r + i) % 2**32), np.float32) for i, n in enumerate(sizes)]
        for r in range(ranks)
    ]
    exchange(buckets, data_types.DYNAMIC_TREE, block_size, 1.0)


@given(
    x=st.lists(st.floats(width=32), max_size=100),
    values=st.lists(st.floats(-1, 1, width=32), min_size=256, max_size=256),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_values_of_any_type(x, values):
    if not any(values):
        values[-1] = 1.0
    data_type = data_types.DataType("generated", np.sort(np.float32(values)))
    x = np.float32(x)
    codes, absmax = ops.quantize(x, data_type, 16)
    expected_codes, expected_absmax = reference.quantize(x, data_type, 16)
    assert_same(codes, expected_codes)
    assert_same(absmax, expected_absmax)
    assert_same(
        ops.dequantize(codes, absmax, data_type, 16),
        reference.dequantize(expected_codes, expected_absmax, data_type, 16),
    )


def test_in_a_function_where_subnormals_are_flushed():
    """TensorFlow's own threads flush subnormals to zero; the kernels must not."""
    x = np.float32([1e-42, -3e-43, 1e-45, 0] * 4096)

    @tf.function
    def round_trip(x):
        codes, absmax = ops.quantize(x)
        return codes, absmax, ops.dequantize(codes, absmax)

    codes, absmax, decoded = round_trip(x)
    expected_codes, expected_absmax = reference.quantize(x, data_types.DYNAMIC_TREE, wire.DEFAULT_BLOCK_SIZE)
    assert_same(codes, expected_codes)
    assert_same(absmax, expected_absmax)
    assert (absmax.numpy() > 0).all()
    assert_same(decoded, reference.dequantize(codes.numpy(), absmax.numpy(), data_types.DYNAMIC_TREE, 2048))


def test_shapes_are_known_in_a_graph():
    @tf.function(input_signature=[tf.TensorSpec([3, None], tf.float16)])
    def f(x):
        codes, absmax = ops.quantize(x, block_size=None)
        assert codes.shape.as_list() == [3, None] and absmax.shape.as_list() == [None]
        (output,) = ops.unpack(tf.zeros([2, 1024], tf.uint8), [x], 1.0, data_types.LINEAR, 64)
        assert output.shape.as_list() == [3, None] and output.dtype == tf.float16
        return ops.dequantize(codes, absmax, block_size=None, dtype="float16")

    assert f(tf.ones([3, 4], tf.float16)).shape == (3, 4)


@pytest.mark.parametrize("bad", [tf.constant([1, 2]), tf.constant(["a"]), tf.constant([True]), tf.constant([1j])])
def test_bad_dtype(bad):
    with pytest.raises(TypeError, match="x has dtype .* use float16, bfloat16, float32, float64"):
        ops.quantize(bad)
    with pytest.raises(TypeError, match="dtype has dtype"):
        ops.dequantize(tf.zeros([1], tf.uint8), tf.zeros([1]), dtype=bad.dtype)


@pytest.mark.parametrize("block_size", [0, 1, 15, -1, 2**31])
def test_bad_block_size(block_size):
    with pytest.raises(ValueError, match=f"block_size={block_size} must be at least 16"):
        ops.quantize(tf.zeros([4]), block_size=block_size)


@pytest.mark.parametrize("block_size", [2.0, "2048", True])
def test_block_size_of_another_type(block_size):
    with pytest.raises(TypeError, match="block_size="):
        ops.quantize(tf.zeros([4]), block_size=block_size)


def test_bad_data_type():
    with pytest.raises(ValueError, match="data_type='int8' is not known: use one of dynamic_tree, linear"):
        ops.quantize(tf.zeros([4]), data_type="int8")
    with pytest.raises(TypeError, match="data_type=8"):
        ops.quantize(tf.zeros([4]), data_type=8)


def test_messages_of_other_settings_are_refused():
    x = tf.zeros([100])
    with pytest.raises(tf.errors.InvalidArgumentError, match="absmax has shape .* have 7 blocks"):
        ops.dequantize(tf.zeros([100], tf.uint8), tf.zeros([6]), block_size=16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="received has 64 bytes a rank"):
        ops.reduce(tf.zeros([2, 64], tf.uint8), [x], 0, data_types.LINEAR, 16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="gathered has 64 bytes a rank"):
        ops.unpack(tf.zeros([2, 64], tf.uint8), [x], 1.0, data_types.LINEAR, 16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="rank=2 must be at least 0 and below 2"):
        ops.pack([x], 2, 2, data_types.LINEAR, 16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks=0 must be at least 1"):
        ops.pack([x], 0, 0, data_types.LINEAR, 16)
