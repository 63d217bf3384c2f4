"""The 8-bit allreduce through stock Horovod's public API, on however many ranks run this file."""

import os

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_eightbit as eightbit
from hvd_eightbit import data_types, ops, reference, wire

DTYPES = [d.as_numpy_dtype for d in ops.DTYPES]
TYPES = list(data_types.DATA_TYPES)
EVERYTHING = eightbit.EightBitCompressor(min_elements=0)
SHAPES = [(), (1,), (0, 3), (17,), (33, 65), (70001,)]


def bucket(seed: int, shapes=SHAPES, dtype=np.float32, scale: float = 1.0) -> list[list[np.ndarray]]:
    """What each rank contributes; the same call on every rank gives the same."""
    rng = np.random.default_rng(seed)
    return [[(scale * rng.normal(size=s)).astype(dtype) for s in shapes] for _ in range(hvd.size())]


def expected(contributions, data_type="dynamic_tree", block_size=wire.DEFAULT_BLOCK_SIZE, scale=1.0):
    return reference.allreduce(contributions, data_types.get(data_type), block_size, scale)


def assert_equal(actual, wanted):
    actual = actual.numpy()
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    np.testing.assert_array_equal(actual.astype(np.float64), wanted.astype(np.float64))


def assert_ranks_equal(tensors):
    """Bit for bit: every rank's bytes against rank 0's."""
    for tensor in tensors:
        own = np.frombuffer(tensor.numpy().tobytes(), np.uint8)
        root = hvd.broadcast(tf.constant(own), root_rank=0).numpy()
        same = hvd.allreduce(tf.constant(float((own == root).all())), op=hvd.Min).numpy()
        assert same == 1.0


def both_modes(function):
    """function as it is, and as a tf.function."""
    return pytest.mark.parametrize("mode", [lambda f: f, tf.function], ids=["eager", "graph"])(function)


@both_modes
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_equals_the_reference_bit_for_bit(mode, dtype):
    for i, shape in enumerate(SHAPES):
        contributions = bucket(i, [shape], dtype)
        mine = tf.constant(contributions[hvd.rank()][0])
        mean = mode(lambda x: hvd.allreduce(x, compression=EVERYTHING))(mine)
        assert_equal(mean, expected(contributions)[0])
        assert_ranks_equal([mean])


@both_modes
@pytest.mark.parametrize("data_type", TYPES)
def test_every_data_type_and_block_size(mode, data_type):
    contributions = bucket(7, [(30011,)])
    for block_size in (64, 5000, None):
        compressor = eightbit.EightBitCompressor(data_type, block_size=block_size, min_elements=0)
        mean = mode(lambda x, c=compressor: hvd.allreduce(x, compression=c))(tf.constant(contributions[hvd.rank()][0]))
        assert_equal(mean, expected(contributions, data_type, block_size)[0])


@both_modes
def test_op_and_factors(mode):
    contributions = bucket(8, [(20000,)])
    mine = tf.constant(contributions[hvd.rank()][0])
    cases = [
        ({}, 1.0),
        ({"op": hvd.Average}, 1.0),
        ({"op": hvd.Sum}, hvd.size()),
        ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 8.0}, 4.0 * hvd.size()),
        ({"op": hvd.Average, "prescale_factor": 0.25}, 0.25),
        ({"op": hvd.Sum, "prescale_factor": 0.0}, 0.0),
    ]
    for arguments, scale in cases:
        f = mode(lambda x, a=arguments: hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree, **a))
        assert_equal(f(mine), expected(contributions, scale=scale)[0])


@both_modes
def test_a_group_is_one_exchange(mode):
    shapes = [(30, 70), (7,), (40000,), (20, 20, 20)]
    contributions = bucket(9, shapes)
    compressor = eightbit.EightBitCompressor(min_elements=1000)
    f = mode(lambda *tensors: hvd.grouped_allreduce(list(tensors), compression=compressor, op=hvd.Sum))
    results = f(*[tf.constant(t) for t in contributions[hvd.rank()]])
    large = [0, 2, 3]
    wanted = expected([[c[i] for i in large] for c in contributions], scale=hvd.size())
    for i, w in zip(large, wanted):
        assert_equal(results[i], w)
    # The small one went through Horovod as it was.
    np.testing.assert_allclose(results[1], np.sum([c[1] for c in contributions], axis=0), rtol=1e-5, atol=1e-6)
    assert_ranks_equal(results)


@both_modes
def test_a_group_of_several_dtypes(mode):
    """Horovod groups one dtype at a time; our probes are float32, so a group may mix float16, bfloat16 and float32."""
    half, single = bucket(10, [(300,)], np.float16), bucket(11, [(500,), (90,)])
    f = mode(lambda a, b, c: hvd.grouped_allreduce([a, b, c], compression=EVERYTHING))
    r = hvd.rank()
    results = f(single[r][0], half[r][0], single[r][1])
    wanted = expected(single)
    assert_equal(results[0], wanted[0])
    assert_equal(results[1], expected(half)[0])
    assert_equal(results[2], wanted[1])


def test_a_constant_is_not_folded_away():
    """TensorFlow's optimizer would run the exchange of a constant while it optimizes, on the rank that has one."""
    own = tf.constant(bucket(17, [(30000,)])[hvd.rank()][0])

    @tf.function
    def mean(x):
        return eightbit.allreduce(own if hvd.rank() == 0 else x, name="constant_on_rank_0")

    for _ in range(2):
        assert_equal(mean(own), expected(bucket(17, [(30000,)]))[0])


@both_modes
def test_our_own_allreduce(mode):
    contributions = bucket(12)
    for op, scale in ((None, 1.0), (hvd.Sum, hvd.size())):
        f = mode(lambda *t, op=op: eightbit.allreduce(list(t), op=op, data_type="linear", block_size=128))
        results = f(*[tf.constant(t) for t in contributions[hvd.rank()]])
        for result, wanted in zip(results, expected(contributions, "linear", 128, scale)):
            assert_equal(result, wanted)
    single = bucket(13, [(5, 5)])
    assert_equal(mode(eightbit.allreduce)(tf.constant(single[hvd.rank()][0])), expected(single)[0])


@pytest.mark.parametrize("data_type", ["dynamic_tree", "linear"])
def test_error_of_a_million_gaussians(data_type):
    contributions = bucket(14, [(1_000_000,)])
    mean = eightbit.allreduce(tf.constant(contributions[hvd.rank()][0]), data_type=data_type).numpy()
    exact = np.mean(np.array([c[0] for c in contributions], np.float64), axis=0)
    error = np.linalg.norm(mean - exact) / np.linalg.norm(exact)
    assert 0.0005 < error < 0.02


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
        for _ in range(3):
            step()
        wait_for_all()
        least = min(least, (transmitted() - before) / 3 / hvd.size())
        wait_for_all()
    return least


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16], ids=lambda d: d.name)
def test_bytes_on_the_wire(dtype):
    elements = 1_000_000
    x = tf.cast(tf.random.stateless_normal([elements], [hvd.rank(), 1]), dtype)
    plain = bytes_sent(lambda: hvd.allreduce(x))
    ours = bytes_sent(lambda: hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree))
    layout = wire.layout([elements], hvd.size(), wire.DEFAULT_BLOCK_SIZE)
    assert layout.bytes_sent == pytest.approx(2 * (hvd.size() - 1) / hvd.size() * elements * (1 + 4 / 2048), rel=1e-3)
    assert plain > 2 * (hvd.size() - 1) / hvd.size() * elements * dtype.size
    assert layout.bytes_sent < ours < 1.02 * layout.bytes_sent
    assert ours <= (0.26 if dtype == tf.float32 else 0.52) * plain


@both_modes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_on_one_rank_is_nan_on_all(mode, bad):
    contributions = bucket(15, [(50000,)])
    where = 12345
    contributions[hvd.size() - 1][0][where] = bad
    mean = mode(lambda x: hvd.allreduce(x, compression=EVERYTHING))(tf.constant(contributions[hvd.rank()][0])).numpy()
    assert np.isnan(mean[where])
    chunk = wire.layout([50000], hvd.size(), wire.DEFAULT_BLOCK_SIZE).chunk_elements
    block = where // chunk * chunk + where % chunk // 2048 * 2048
    nan = np.zeros(50000, bool)
    nan[block : min(block + 2048, (where // chunk + 1) * chunk)] = True
    np.testing.assert_array_equal(np.isnan(mean), nan)


@both_modes
def test_zero_stays_zero(mode):
    mean = mode(lambda x: hvd.allreduce(x, compression=EVERYTHING))(tf.zeros([20000]))
    np.testing.assert_array_equal(mean, np.zeros(20000, np.float32))


@both_modes
def test_what_is_not_compressed_is_exact(mode):
    """Small and integer tensors go to Horovod uncoded; also in bfloat16, which Horovod itself does not have."""
    r, n = hvd.rank(), hvd.size()
    for dtype in ops.DTYPES:
        small = mode(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=eightbit.Compression.linear))(
            tf.fill([100], tf.cast(r + 1.0, dtype))
        )
        assert small.dtype == dtype
        np.testing.assert_array_equal(tf.cast(small, tf.float64), np.full(100, n * (n + 1) / 2))
    mean = mode(lambda x: hvd.allreduce(x, compression=eightbit.Compression.linear))
    np.testing.assert_allclose(mean(tf.fill([100], r + 0.1)), np.full(100, (n - 1) / 2 + 0.1), rtol=1e-6)
    total = mode(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=eightbit.Compression.linear))
    np.testing.assert_array_equal(total(tf.fill([20000], r)), np.full(20000, n * (n - 1) // 2))


def test_exclude_by_name():
    compressor = eightbit.EightBitCompressor(exclude=("keep_me",))
    contributions = bucket(16, [(20000,)])
    mine = tf.constant(contributions[hvd.rank()][0])

    @tf.function
    def f(x):
        kept = hvd.allreduce(tf.identity(x, name="keep_me_whole"), compression=compressor)
        return kept, hvd.allreduce(tf.identity(x, name="compress_me"), compression=compressor)

    kept, compressed = f(mine)
    exact = np.mean([c[0] for c in contributions], axis=0)
    np.testing.assert_allclose(kept, exact, rtol=1e-5, atol=1e-6)
    assert_equal(compressed, expected(contributions)[0])


def test_gradient_is_the_mean_of_the_gradients():
    contributions = bucket(17, [(300,)])
    upstream = bucket(18, [(300,)])
    r = hvd.rank()
    for wrap in (lambda f: f, tf.function):

        @wrap
        def gradient(x, dy):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = hvd.allreduce(x, compression=EVERYTHING, op=hvd.Sum)
            return tape.gradient(y, x, output_gradients=dy)

        result = gradient(tf.constant(contributions[r][0]), tf.constant(upstream[r][0]))
        assert_equal(result, expected(upstream, scale=hvd.size())[0])


def test_shapes_unknown_while_tracing():
    f = tf.function(
        lambda x: hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree),
        input_signature=[tf.TensorSpec([None, None])],
    )
    for shape in [(5, 3), (300, 200)]:
        contributions = bucket(19, [shape])
        assert_equal(f(tf.constant(contributions[hvd.rank()][0])), expected(contributions)[0])


def test_in_a_loop():
    """The same collective again and again within one graph; TensorFlow runs iterations in parallel where it can."""
    contributions = bucket(20, [(20000,)])

    @tf.function
    def f(x):
        for _ in tf.range(4):
            x = hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree)
        return x

    wanted = contributions
    for _ in range(4):
        wanted = [expected(wanted)] * hvd.size()
    assert_equal(f(tf.constant(contributions[hvd.rank()][0])), wanted[0][0])


def test_size_read_in_the_graph(monkeypatch):
    """What an elastic job does: the number of ranks is not frozen into the trace."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    contributions = bucket(21, [(20000,)])
    f = tf.function(lambda x: hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree, op=hvd.Sum))
    assert_equal(f(tf.constant(contributions[hvd.rank()][0])), expected(contributions, scale=hvd.size())[0])


def test_a_process_set(pair):
    contributions = bucket(22, [(20000,)])[:2]
    compressor = eightbit.EightBitCompressor(process_set=pair)
    if pair.included():
        mine = tf.constant(contributions[hvd.rank()][0])
        for mode in (lambda f: f, tf.function):
            mean = mode(lambda x: hvd.allreduce(x, compression=compressor, process_set=pair))(mine)
            assert_equal(mean, expected(contributions)[0])
        assert_equal(eightbit.allreduce(mine, process_set=pair), expected(contributions)[0])
    else:
        with pytest.raises(ValueError, match="does not include this rank"):
            compressor.compress(tf.zeros([20000]))


@both_modes
def test_another_process_set_is_refused(mode, pair):
    """A compressor for all ranks in a collective of two: an error before anything could hang."""
    x = tf.zeros([20000])
    if pair.included():
        f = mode(lambda x: hvd.allreduce(x, compression=eightbit.Compression.linear, process_set=pair))
        with pytest.raises(tf.errors.InvalidArgumentError, match="process set of your own give the same one"):
            f(x)


PROBE_NAME = "of_all_ranks"


@both_modes
def test_a_larger_process_set_is_refused(mode, pair):
    """A compressor for two ranks in a collective of all."""
    x = tf.zeros([20000])
    compressor = eightbit.EightBitCompressor(process_set=pair)
    f = mode(lambda x: hvd.allreduce(x, compression=compressor, name=PROBE_NAME))
    if pair.included():
        with pytest.raises(tf.errors.InvalidArgumentError, match="process set of your own give the same one"):
            f(x)
    else:
        with pytest.raises(ValueError, match="does not include this rank"):
            f(x)
        # Its program would end here, and with it the job. Here it goes on, so it must answer the others' call.
        mode(lambda x: hvd.allreduce(ops.probe(hvd.rank(), 0), name=PROBE_NAME))(x)


@both_modes
@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops_are_refused(mode, op):
    f = mode(lambda x: hvd.allreduce(x, op=getattr(hvd, op), compression=eightbit.Compression.dynamic_tree))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="not a sum or an average.*Use op=hvd.Average or op=hvd.Sum"
    ):
        f(tf.ones([20000]))
    with pytest.raises(ValueError, match="only hvd.Average and hvd.Sum"):
        mode(lambda x: eightbit.allreduce(x, op=getattr(hvd, op)))(tf.ones([20000]))


def test_adasum_is_refused():
    if not hvd.mpi_enabled() or hvd.size() & (hvd.size() - 1):
        pytest.skip("Horovod's Adasum needs MPI and a power of two of ranks")
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a sum or an average"):
        hvd.allreduce(tf.ones([20000]), op=hvd.Adasum, compression=eightbit.Compression.dynamic_tree)


@both_modes
def test_reducescatter_is_refused(mode):
    x = tf.ones([20000])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="hvd.reducescatter"):
        mode(lambda x: hvd.reducescatter(x, compression=eightbit.Compression.dynamic_tree))(x)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="hvd.reducescatter"):
        mode(lambda x: hvd.grouped_reducescatter([x, x], compression=eightbit.Compression.dynamic_tree))(x)
    # The group that was not finished has left nothing behind.
    contributions = bucket(23, [(20000,)])
    mean = mode(lambda x: hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree))
    assert_equal(mean(tf.constant(contributions[hvd.rank()][0])), expected(contributions)[0])


@both_modes
@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": lambda r: 2048 if r else 1024},
        {"data_type": lambda r: "linear" if r else "dynamic_tree"},
    ],
    ids=["block_size", "data_type"],
)
def test_ranks_that_disagree_are_told(mode, settings):
    compressor = eightbit.EightBitCompressor(**{name: value(hvd.rank()) for name, value in settings.items()})
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks disagree on data_type, block_size"):
        mode(lambda x: hvd.allreduce(x, compression=compressor))(tf.ones([20000]))


@both_modes
def test_shapes_that_differ_are_told(mode):
    x = tf.ones([20000 + hvd.rank()])
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks disagree .* shape"):
        mode(lambda x: hvd.allreduce(x, compression=eightbit.Compression.dynamic_tree))(x)


def test_which_transport():
    """The runner says which transport these tests are to go over: that is the one."""
    assert os.environ["EIGHTBIT_TEST_BACKEND"] == ("mpi" if hvd.mpi_enabled() else "gloo")
    assert hvd.size() == int(os.environ["EIGHTBIT_TEST_RANKS"])
