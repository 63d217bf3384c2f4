"""The general model: costs by hand, limits, and the settings for which the literature says no."""

import dataclasses
import itertools
import subprocess
import sys

import pytest

from hvd_eightbit import wire
from hvd_eightbit.speedup import model, models
from hvd_eightbit.speedup.model import Cluster, Efficiency, Kernels, Link, Setting

GBIT = 1e9 / 8
FREE = Kernels(1e30, 1e30, 1e30, 1e30, 1e30, 0.0)  # nothing but the network costs
FAST = Link(1e30, 0.0)
ONE_EACH = Cluster(8, 1, Link(1e9), FAST, call=0.0)
RESNET = Setting(models.resnet50(), ONE_EACH, flops=10e12, batch=64)


def seconds(cluster, method, elements=8_000_000, kernels=FREE):
    return model.allreduce_seconds(cluster, kernels, elements, method)


def on(nodes, per_node, gbit, within_gbit=800.0, latency=20e-6):
    return Cluster(nodes, per_node, Link(gbit * GBIT, latency), Link(within_gbit * GBIT, 5e-6))


def answer(setting, algorithm="flat"):
    return model.verdict(model.predict_all(setting), algorithm)


def test_bytes_of_a_rank_alone_on_its_host():
    # 8 M elements, 8 ranks, block 2048: float ring 2 x 7/8 x 4 bytes an element; messages of 10^6 codes and 489 absmax
    by_method = {m: model.exchange(ONE_EACH, FREE, 8_000_000, m) for m in model.METHODS}
    assert by_method["float32"].rank_bytes == 56_000_000
    assert by_method["fp16"].rank_bytes == 28_000_000
    assert by_method["flat"].rank_bytes == 14 * (1_000_000 + 1968)  # 1956, up to a multiple of 16
    assert by_method["allgather"].rank_bytes == 7 * (8_000_000 + 4 * 3907 + 4)
    for e in by_method.values():
        assert e.host_bytes == e.rank_bytes
        assert e.network == pytest.approx(e.rank_bytes / 1e9)


@pytest.mark.parametrize(
    ("elements", "ranks", "block_size"),
    list(itertools.product((1, 17, 2049, 1_000_003), (1, 2, 7, 64), (64, 2048, None))),
)
def test_message_sizes_are_the_wires(elements, ranks, block_size):
    layout = wire.layout([elements], ranks, block_size)
    assert model._chunk_bytes(elements, ranks, block_size) == layout.chunk_bytes
    if ranks > 1:
        cluster = dataclasses.replace(ONE_EACH, nodes=ranks)
        assert model.exchange(cluster, FREE, elements, "flat", block_size).rank_bytes == layout.bytes_sent


def test_bytes_of_a_hosts_card():
    """4 hosts of 8 ranks, bytes an element: a ring crosses a card once, every rank's alltoall goes through it."""
    n = 32_000_000
    cluster = Cluster(4, 8)
    by_method = {m: model.exchange(cluster, FREE, n, m).host_bytes / n for m in model.METHODS}
    assert by_method["float32"] == pytest.approx(8 * 31 / 32)
    assert by_method["flat"] == pytest.approx(8 * 24 / 32 + 31 / 32, rel=0.003)
    assert by_method["two_level"] == pytest.approx(2 * 3 / 4, rel=0.003)
    assert by_method["two_level"] < by_method["fp16"] < by_method["flat"]


def test_nothing_crosses_a_card_within_one_host():
    assert all(model.exchange(Cluster(1, 4), FREE, 1000, m).host_bytes == 0 for m in model.METHODS)


def test_latencies_by_hand():
    slow = Cluster(16, 1, Link(1e30, 1e-3), FAST, call=0.0, allreduce="ring")
    assert seconds(slow, "float32") == pytest.approx(30e-3)
    assert seconds(slow, "flat") == pytest.approx(30e-3)
    assert seconds(dataclasses.replace(slow, allreduce="tree"), "float32") == pytest.approx(8e-3)
    assert seconds(dataclasses.replace(slow, allreduce="fastest"), "float32") == pytest.approx(8e-3)
    calls = Cluster(2, 2, FAST, FAST, call=1e-3)
    assert [seconds(calls, m) for m in model.METHODS] == pytest.approx([1e-3, 1e-3, 2e-3, 4e-3, 1e-3])


def test_kernels_by_hand():
    cluster = Cluster(4, 1, FAST, FAST, call=0.0)
    kernels = Kernels(quantize=1e9, dequantize=2e9, cast=4e9, add=8e9, add_fp16=5e9, launch=1e-3)
    e = model.exchange(cluster, kernels, 4_000_000, "flat")
    assert e.before == pytest.approx(1e-3 + 3e6 / 1e9)
    assert e.after == pytest.approx(1e-3 + 3e6 / 2e9 + 1e6 / 1e9 + 1e-3 + 4e6 / 2e9)
    e = model.exchange(cluster, kernels, 4_000_000, "fp16")
    assert (e.before, e.after) == (pytest.approx(1e-3 + 4e6 / 4e9),) * 2
    assert e.network == pytest.approx(3e6 / 5e9)


def test_efficiency_divides_the_bandwidth_of_its_collective():
    half = dataclasses.replace(ONE_EACH, efficiency=Efficiency(alltoall=0.5))
    assert seconds(half, "flat") == pytest.approx(1.5 * seconds(ONE_EACH, "flat"))
    assert seconds(half, "float32") == seconds(ONE_EACH, "float32")


def test_one_rank_exchanges_nothing():
    setting = dataclasses.replace(RESNET, cluster=Cluster(1, 1))
    for p in model.predict_all(setting):
        assert (p.exposed, p.rank_bytes, p.network) == (0, 0, 0) and p.step == p.compute
    assert answer(setting).text.startswith("no: one rank alone")


def test_step_without_overlap_is_computation_then_exchange():
    network = models.Network("one", (models.Layer("a", (8_000_000,), 1e9),))
    setting = Setting(network, ONE_EACH, FREE, compute_seconds=0.3, overlap=False)
    for method in model.METHODS:
        p = model.predict(setting, method)
        assert p.step == pytest.approx(0.3 + seconds(ONE_EACH, method))
        assert p.exposed == pytest.approx(seconds(ONE_EACH, method))


def test_all_but_the_first_layers_exchange_hides_behind_long_computation():
    layers = tuple(models.Layer(str(i), (1_000_000,), 1e9) for i in range(10))
    setting = Setting(models.Network("ten", layers), ONE_EACH, FREE, compute_seconds=30.0)
    for method in model.METHODS:
        assert model.predict(setting, method).exposed == pytest.approx(seconds(ONE_EACH, method, 1_000_000))


def test_gradients_are_ready_from_the_last_layer_on():
    small, large = models.Layer("small", (1000,), 1e9), models.Layer("large", (80_000_000,), 1e9)
    early, late = (
        model.predict(Setting(models.Network("n", layers), ONE_EACH, FREE, compute_seconds=0.9), "float32").exposed
        for layers in ((small, large), (large, small))
    )
    assert early == pytest.approx(
        0.56 - 0.3 + 7000e-9, rel=0.01
    )  # 0.56 s, of which one layer's backward pass hides 0.3
    assert late == pytest.approx(0.56, rel=0.01)


def test_floats_are_added_while_they_travel():
    slow = dataclasses.replace(FREE, add=1e6)
    assert seconds(ONE_EACH, "float32", 1_000_000, slow) == pytest.approx(0.875)
    assert seconds(ONE_EACH, "float32", 1_000_000) == pytest.approx(0.007)


def test_kernels_delay_the_backward_pass_unless_they_overlap():
    slow = dataclasses.replace(model.KERNELS["gpu"], quantize=1e9)
    serial = model.predict(dataclasses.replace(RESNET, kernels=slow), "flat")
    beside = model.predict(dataclasses.replace(RESNET, kernels=slow, kernels_overlap=True), "flat")
    assert serial.step - beside.step > 0.015


def test_small_tensors_stay_float32():
    network = models.Network("two", (models.Layer("a", (100, 1_000_000), 1e9),))
    few = model.predict(Setting(network, ONE_EACH, min_elements=101), "flat").rank_bytes
    all_ = model.predict(Setting(network, ONE_EACH, min_elements=0), "flat").rank_bytes
    chunk = wire.layout([100], 8, 2048)
    assert few - all_ == pytest.approx(2 * 7 / 8 * 400 - chunk.bytes_sent)


def test_groups_save_calls_and_messages():
    many = dataclasses.replace(RESNET, cluster=on(512, 1, 10), overlap=False)
    grouped = dataclasses.replace(many, groups=2)
    assert model.predict(grouped, "flat").step < 0.5 * model.predict(many, "flat").step
    assert model.predict(grouped, "flat").rank_bytes == pytest.approx(model.predict(many, "flat").rank_bytes, rel=0.02)


# Settings for which the literature finds that compression does not pay.
@pytest.mark.parametrize(
    ("what", "network", "cluster", "flops", "batch"),
    [
        ("ResNet-50 in a data centre (Agarwal et al. 2022)", "resnet50", on(16, 4, 10), 10e12, 64),
        ("ResNet-50, one GPU a host, 25 Gbit/s", "resnet50", on(8, 1, 25), 10e12, 64),
        ("ResNet-50, 100 Gbit/s", "resnet50", on(32, 8, 100), 10e12, 64),
        ("ResNet-50 over NVLink", "resnet50", on(1, 8, 1, 1200), 10e12, 64),
        ("BERT-large over NVLink", "bert_large", on(1, 8, 1, 2400), 50e12, 32),
        ("VGG-16 over NVLink", "vgg16", on(1, 8, 1, 1200), 10e12, 32),
        ("compute-bound: a batch of 1024", "vgg16", on(8, 1, 10), 10e12, 1024),
    ],
)
def test_says_no(what, network, cluster, flops, batch):
    setting = Setting(models.preset(network), cluster, flops=flops, batch=batch)
    result = answer(setting)
    assert not result.pays and result.text.startswith("no: "), what
    assert result.speedup < model.WORTHWHILE


@pytest.mark.parametrize(
    ("network", "cluster", "flops", "batch", "algorithm"),
    [
        ("resnet50", on(8, 1, 1), 10e12, 64, "flat"),
        ("bert_large", on(16, 1, 10), 50e12, 32, "flat"),
        ("vgg16", on(8, 8, 10), 10e12, 32, "two_level"),
    ],
)
def test_says_yes_where_the_network_is_slow(network, cluster, flops, batch, algorithm):
    result = answer(Setting(models.preset(network), cluster, flops=flops, batch=batch), algorithm)
    assert result.pays and result.text.startswith("yes: ") and result.speedup > 1.2
    assert result.speedup < 2.0  # what fp16 leaves to gain


def test_flat_loses_to_two_levels_where_ranks_share_a_card():
    setting = Setting(models.vgg16(), on(8, 8, 10), flops=10e12, batch=32)
    assert not answer(setting).pays
    assert "host's card" in answer(setting).text


def test_break_even_of_resnet50_is_below_8_gbit():
    """Agarwal et al. 2022 find that compression pays below about 8 Gbit/s."""
    setting = dataclasses.replace(RESNET, cluster=on(8, 1, 10))
    bandwidth = model.break_even_bandwidth(setting)
    assert 2 < bandwidth / GBIT < 10
    assert answer(model.with_bandwidth(setting, 0.99 * bandwidth)).pays
    assert not answer(model.with_bandwidth(setting, 1.01 * bandwidth)).pays


def test_break_even_nodes():
    setting = dataclasses.replace(RESNET, cluster=on(8, 1, 1))
    first, last = model.break_even_nodes(setting)
    assert first == 2 and 50 < last < 1000
    assert answer(model.with_nodes(setting, last)).pays and not answer(model.with_nodes(setting, last + 1)).pays
    assert model.break_even_nodes(dataclasses.replace(setting, cluster=on(8, 1, 100))) is None


def test_allgather_of_codes_saves_no_bytes_from_8_ranks():
    for ranks, fewer in ((4, True), (7, True), (8, False), (9, False), (16, False)):
        cluster = dataclasses.replace(ONE_EACH, nodes=ranks)
        sent = {m: model.exchange(cluster, FREE, 1 << 24, m).rank_bytes for m in ("float32", "allgather")}
        assert (sent["allgather"] < sent["float32"]) is fewer


MP = Setting(models.alexnet(), Cluster(32, 3, Link(6e9, 5e-6), Link(5e9, 5e-6)), flops=5e12, batch=128)


def test_model_parallel_sends_activations_and_not_weights():
    p = {m: model.predict_model_parallel(MP, m, 2048) for m in ("float32", "fp16", "flat")}
    features = 9216 + 4096 + 4096
    trunk = 2 * 95 / 96 * 4 * sum(sum(layer.parameters) for layer in models.alexnet().layers[:5])
    logits = 2 * 95 / 96 * 4 * 12288 * 1000
    expected = trunk + logits + 2 * 95 / 96 * 4 * 12288 * features
    assert p["float32"].rank_bytes == pytest.approx(expected, rel=0.01)
    assert p["flat"].step < p["fp16"].step < p["float32"].step


def test_model_parallel_head_is_shared_by_the_ranks():
    free = Cluster(8, 1, FAST, FAST, call=0.0)
    alone = Setting(models.alexnet(), Cluster(1, 1), FREE, flops=5e12, batch=128)
    shared = dataclasses.replace(alone, cluster=free)
    assert model.predict_model_parallel(shared, "flat", 128).compute == pytest.approx(
        model.predict(alone, "flat").compute
    )


def test_model_parallel_with_more_passes_pays_more_latency():
    small, large = (model.predict_model_parallel(MP, "flat", s).network for s in (96, 12288))
    assert small > large


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cluster(0, 1), "nodes=0 must be an integer of at least 1"),
        (lambda: Cluster(1, 0), "ranks_per_node=0"),
        (lambda: Cluster(2.5, 1), "nodes=2.5"),
        (lambda: Cluster(True, 1), "nodes=True"),
        (lambda: Cluster(2, 1, allreduce="star"), "allreduce='star' must be one of fastest, ring, tree"),
        (lambda: Cluster(2, 1, call=-1), "call=-1"),
        (lambda: Link(-1), "bandwidth=-1 must be a positive"),
        (lambda: Link(0), "bandwidth=0"),
        (lambda: Link(float("nan")), "bandwidth=nan"),
        (lambda: Link(1, -1), "latency=-1"),
        (lambda: Efficiency(alltoall=0), "alltoall=0"),
        (lambda: Kernels(0, 1, 1, 1, 1, 1), "quantize=0"),
        (lambda: Kernels.from_memory_bandwidth(-1), "bandwidth=-1"),
        (lambda: dataclasses.replace(RESNET, flops=0), "flops=0"),
        (lambda: dataclasses.replace(RESNET, batch=0), "batch=0"),
        (lambda: dataclasses.replace(RESNET, groups=0), "groups=0"),
        (lambda: dataclasses.replace(RESNET, compute_seconds=-2), "compute_seconds=-2"),
        (lambda: dataclasses.replace(RESNET, block_size=3), "block_size=3"),
        (lambda: model.exchange(ONE_EACH, FREE, 0, "flat"), "elements=0"),
        (lambda: model.exchange(ONE_EACH, FREE, 1, "int8"), "method='int8' must be one of float32"),
        (lambda: model.predict(RESNET, "int8"), "method='int8'"),
        (lambda: model.predict_model_parallel(MP, "flat", 10), "sub_batch=10 must be between 96"),
        (lambda: model.predict_model_parallel(MP, "two_level"), "method='two_level'"),
        (
            lambda: model.predict_model_parallel(dataclasses.replace(MP, network=models.bert_large()), "flat"),
            "bert_large",
        ),
        (lambda: model.verdict(model.predict_all(RESNET), "two_level"), "algorithm='two_level'"),
    ],
)
def test_impossible_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_needs_neither_tensorflow_nor_horovod():
    code = "import sys, hvd_eightbit.speedup.model; assert not {'tensorflow', 'horovod'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
