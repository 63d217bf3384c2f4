"""A model of training steps on given hardware: what 8-bit communication is worth there, and whether it is.

Data parallelism: gradients become ready layer by layer in the backward pass and are exchanged while it goes on; the
step ends when both have. Model parallelism: convolutions data-parallel, the fully connected layers at the end split
over all ranks, the batch passing through them in sub-batches (paper section 2.2). Float exchanges are Horovod's own.

Bandwidths are bytes a second in each direction, times seconds, sizes bytes unless a name says elements. The bandwidth
between nodes is that of a host's network card, which its ranks share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from hvd_eightbit import wire
from hvd_eightbit.speedup.models import Network

FLOATS = ("float32", "fp16")
ALGORITHMS = ("flat", "two_level", "allgather")
METHODS = (*FLOATS, *ALGORITHMS)
ALLREDUCES = ("fastest", "ring", "tree")
DEFAULT_MIN_ELEMENTS = 16384  # as EightBitCompressor's: smaller tensors stay with Horovod
FUSION_BYTES = 64 * 2**20  # Horovod's fusion buffer
WORTHWHILE = 1.05  # a step has to become this many times faster for the answer to be yes


def _require(owner: str, conditions: dict[str, tuple[object, bool, str]]) -> None:
    for name, (value, holds, wanted) in conditions.items():
        if not holds:
            raise ValueError(f"{owner}: {name}={value!r} must be {wanted}")


def _positive(value: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _not_negative(value: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _count(value: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection: bandwidth in bytes a second and direction, latency of a message in seconds."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self):
        _require(
            "Link",
            {
                "bandwidth": (self.bandwidth, _positive(self.bandwidth), "a positive number of bytes a second"),
                "latency": (self.latency, _not_negative(self.latency), "0 or more seconds"),
            },
        )


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Share of a link's bandwidth that each collective reaches; 1 until measured (`measure`)."""

    allreduce_float32: float = 1.0
    allreduce_fp16: float = 1.0
    alltoall: float = 1.0
    allgather: float = 1.0
    reducescatter: float = 1.0

    def __post_init__(self):
        fields = dataclasses.asdict(self)
        _require("Efficiency", {k: (v, _positive(v), "positive") for k, v in fields.items()})


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks and what connects them.

    Args:
        nodes: hosts.
        ranks_per_node: ranks on each of them, placed host by host.
        between: a host's network card.
        within: a rank's connection to the others of its host.
        call: seconds that a collective costs whatever its size (Horovod's negotiation and cycle).
        efficiency: share of the bandwidth that each collective reaches.
        allreduce: what Horovod's backend does with floats: "ring" (Gloo, MPI), "tree", or "fastest" of both (NCCL).
    """

    nodes: int
    ranks_per_node: int = 1
    between: Link = Link(1.25e9, 20e-6)
    within: Link = Link(12e9, 5e-6)
    call: float = 0.5e-3
    efficiency: Efficiency = Efficiency()
    allreduce: str = "fastest"

    def __post_init__(self):
        _require(
            "Cluster",
            {
                "nodes": (self.nodes, _count(self.nodes), "an integer of at least 1"),
                "ranks_per_node": (self.ranks_per_node, _count(self.ranks_per_node), "an integer of at least 1"),
                "call": (self.call, _not_negative(self.call), "0 or more seconds"),
                "allreduce": (self.allreduce, self.allreduce in ALLREDUCES, f"one of {', '.join(ALLREDUCES)}"),
            },
        )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def ring(self) -> Link:
        """The slowest link that a ring through all ranks crosses; it enters and leaves each host once."""
        if self.nodes == 1:
            return self.within
        if self.ranks_per_node == 1:
            return self.between
        return Link(min(self.between.bandwidth, self.within.bandwidth), max(self.between.latency, self.within.latency))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How fast a rank codes and adds: elements a second, and seconds to start a kernel.

    Args:
        quantize: float to 8 bits.
        dequantize: 8 bits to float, also where it is added to something.
        cast: float32 to fp16 or back.
        add: float32 numbers in an allreduce.
        add_fp16: fp16 numbers in an allreduce.
        launch: seconds a kernel costs whatever its size.
    """

    quantize: float
    dequantize: float
    cast: float
    add: float
    add_fp16: float
    launch: float

    def __post_init__(self):
        fields = dataclasses.asdict(self)
        launch = fields.pop("launch")
        checks = {k: (v, _positive(v), "a positive number of elements a second") for k, v in fields.items()}
        _require("Kernels", checks | {"launch": (launch, _not_negative(launch), "0 or more seconds")})

    @classmethod
    def from_memory_bandwidth(cls, bandwidth: float, launch: float = 10e-6) -> Kernels:
        """Kernels of a GPU that are bound by its memory, given in bytes a second: bytes read and written an element."""
        _require("Kernels", {"bandwidth": (bandwidth, _positive(bandwidth), "a positive number of bytes a second")})
        return cls(bandwidth / 5, bandwidth / 9, bandwidth / 6, bandwidth / 12, bandwidth / 6, launch)


# GPU: assumed, kernels at 70% of a memory of 1.5 TB/s; not measured. CPU: a core of a busy server, with our ops; the
# sums are those of Horovod's Gloo, which is slow at fp16. `measure` replaces both.
KERNELS = {
    "gpu": Kernels.from_memory_bandwidth(0.7 * 1.5e12),
    "cpu": Kernels(quantize=0.45e9, dequantize=1e9, cast=1.3e9, add=0.25e9, add_fp16=0.04e9, launch=60e-6),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training job.

    Args:
        network: layers.
        cluster: ranks and links.
        kernels: coding rates of a rank.
        flops: floating-point operations a second that a rank reaches in training; not its peak.
        batch: samples of a rank in a step.
        compute_seconds: forward and backward pass of a rank, if measured; otherwise from `flops`, the backward pass
            taking twice the forward pass.
        block_size: of the 8-bit codec.
        min_elements: smaller tensors are not compressed.
        groups: Horovod's num_groups: exchanges that the gradients are collected in; None for one a tensor.
        overlap: gradients are exchanged while the backward pass goes on.
        kernels_overlap: coding does not delay the backward pass (cores of its own). On a GPU it does.
    """

    network: Network
    cluster: Cluster
    kernels: Kernels = KERNELS["gpu"]
    flops: float = 20e12
    batch: int = 32
    compute_seconds: float | None = None
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE
    min_elements: int = DEFAULT_MIN_ELEMENTS
    groups: int | None = None
    overlap: bool = True
    kernels_overlap: bool = False

    def __post_init__(self):
        wire.check_block_size(self.block_size)
        seconds, groups = self.compute_seconds, self.groups
        _require(
            "Setting",
            {
                "flops": (self.flops, _positive(self.flops), "a positive number of operations a second"),
                "batch": (self.batch, _count(self.batch), "an integer of at least 1"),
                "compute_seconds": (seconds, seconds is None or _positive(seconds), "positive, or None"),
                "min_elements": (self.min_elements, _not_negative(self.min_elements), "0 or more"),
                "groups": (groups, groups is None or _count(groups), "an integer of at least 1, or None"),
            },
        )

    @property
    def forward_seconds(self) -> float:
        """Forward pass of a rank."""
        if self.compute_seconds is not None:
            return self.compute_seconds / 3
        return self.network.flops * self.batch / self.flops


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One reduction of gradients over all ranks.

    Args:
        network: seconds on the links, or of adding floats where that takes longer.
        before, after: seconds of kernels before and after them.
        rank_bytes: sent by a rank.
        host_bytes: sent through a host's network card.
        calls: collectives one after another.
    """

    network: float
    before: float
    after: float
    rank_bytes: float
    host_bytes: float
    calls: int

    @property
    def seconds(self) -> float:
        """All but the calls' fixed cost."""
        return self.network + self.before + self.after


@functools.lru_cache(maxsize=65536)
def _chunk_bytes(elements: int, ranks: int, block_size: int | None) -> int:
    """Bytes of one chunk's message, the bucket seen as one tensor (several need a few absmax values more).

    As `wire.layout([elements], ranks, block_size).chunk_bytes`, but the first chunk alone is laid out: none is larger.
    """
    first = min(elements, wire.layout([elements], ranks, block_size).chunk_elements)
    return wire.layout([first], 1, block_size).chunk_bytes


def _ring_allreduce(cluster: Cluster, size: float, efficiency: float) -> float:
    """Seconds to sum `size` bytes over all ranks, adding not counted."""
    ranks, link = cluster.ranks, cluster.ring
    transfer = 2 * (ranks - 1) / ranks * size / (link.bandwidth * efficiency)
    ring = transfer + 2 * (ranks - 1) * link.latency
    tree = transfer + 2 * math.ceil(math.log2(ranks)) * link.latency
    return {"ring": ring, "tree": tree, "fastest": min(ring, tree)}[cluster.allreduce]


def _float_exchange(cluster: Cluster, kernels: Kernels, elements: int, method: str) -> Exchange:
    """Horovod's own allreduce; fp16 is Compression.fp16: a cast before and after."""
    half = method == "fp16"
    size = elements * (2 if half else 4)
    share = (cluster.ranks - 1) / cluster.ranks
    efficiency = cluster.efficiency.allreduce_fp16 if half else cluster.efficiency.allreduce_float32
    adding = share * elements / (kernels.add_fp16 if half else kernels.add)
    cast = kernels.launch + elements / kernels.cast if half else 0.0
    sent = 2 * share * size
    return Exchange(
        network=max(_ring_allreduce(cluster, size, efficiency), adding),  # a part is added while the next is on its way
        before=cast,
        after=cast,
        rank_bytes=sent,
        host_bytes=sent if cluster.nodes > 1 else 0.0,
        calls=1,
    )


def _alltoall(nodes: int, per_node: int, cluster: Cluster, message: float) -> float:
    """Seconds until each rank has sent a message to every other; those of a host share its card.

    Args:
        nodes, per_node: the ranks that take part: hosts, and on each of them.
    """
    efficiency = cluster.efficiency.alltoall
    off_host, on_host = (nodes - 1) * per_node, per_node - 1
    through_card = per_node * off_host * message / (cluster.between.bandwidth * efficiency)
    by_rank = (on_host + off_host) * message / (cluster.within.bandwidth * efficiency) if per_node > 1 else 0.0
    return max(through_card, by_rank) + off_host * cluster.between.latency + on_host * cluster.within.latency


def _flat_exchange(cluster: Cluster, kernels: Kernels, elements: int, block_size: int | None) -> Exchange:
    """Ours (collectives.scaled_mean): pack, alltoall, reduce, allgather around a ring, unpack."""
    n, g = cluster.ranks, cluster.ranks_per_node
    message = _chunk_bytes(elements, n, block_size)
    gather = (n - 1) * (message / (cluster.ring.bandwidth * cluster.efficiency.allgather) + cluster.ring.latency)
    chunk = elements / n
    reduce = kernels.launch + (n - 1) * chunk / kernels.dequantize + chunk / kernels.quantize
    return Exchange(
        network=_alltoall(cluster.nodes, g, cluster, message) + gather,
        before=kernels.launch + (n - 1) * chunk / kernels.quantize,
        after=reduce + kernels.launch + elements / kernels.dequantize,
        rank_bytes=2 * (n - 1) * message,
        host_bytes=(g * (n - g) + (n - 1)) * message if cluster.nodes > 1 else 0.0,
        calls=2,
    )


def _two_level_exchange(cluster: Cluster, kernels: Kernels, elements: int, block_size: int | None) -> Exchange:
    """Sum within each host in float32, exchange each rank's share in 8 bits between hosts, gather codes within."""
    m, g = cluster.nodes, cluster.ranks_per_node
    if m == 1 or g == 1:
        return _flat_exchange(cluster, kernels, elements, block_size)
    share = -(-elements // g)
    message = _chunk_bytes(share, m, block_size)
    within, between, efficiency = cluster.within, cluster.between, cluster.efficiency
    scatter = (g - 1) * (4 * share / (within.bandwidth * efficiency.reducescatter) + within.latency)
    scatter = max(scatter, (g - 1) * share / kernels.add)
    across = (m - 1) * (g * message / (between.bandwidth * efficiency.allgather) + between.latency)
    gather = (g - 1) * (m * message / (within.bandwidth * efficiency.allgather) + within.latency)
    alltoall = (m - 1) * (g * message / (between.bandwidth * efficiency.alltoall) + between.latency)
    chunk = share / m
    reduce = kernels.launch + (m - 1) * chunk / kernels.dequantize + chunk / kernels.quantize
    return Exchange(
        network=scatter + alltoall + across + gather,
        before=kernels.launch + (m - 1) * chunk / kernels.quantize,
        after=reduce + kernels.launch + elements / kernels.dequantize,
        rank_bytes=(g - 1) * 4 * share + 2 * (m - 1) * message + (g - 1) * m * message,
        host_bytes=2 * g * (m - 1) * message,
        calls=4,
    )


def _allgather_exchange(cluster: Cluster, kernels: Kernels, elements: int, block_size: int | None) -> Exchange:
    """The paper's (section 3.4) and GRACE's: every rank gets every rank's whole gradient in 8 bits, and adds."""
    n, link = cluster.ranks, cluster.ring
    message = _chunk_bytes(elements, 1, block_size)
    return Exchange(
        network=(n - 1) * (message / (link.bandwidth * cluster.efficiency.allgather) + link.latency),
        before=kernels.launch + elements / kernels.quantize,
        after=kernels.launch + (n - 1) * elements / kernels.dequantize,
        rank_bytes=(n - 1) * message,
        host_bytes=(n - 1) * message if cluster.nodes > 1 else 0.0,
        calls=1,
    )


def exchange(
    cluster: Cluster,
    kernels: Kernels,
    elements: int,
    method: str,
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
) -> Exchange:
    """The reduction of a bucket over all ranks of a cluster.

    Args:
        elements: of the bucket.
        method: "float32" or "fp16": Horovod's allreduce without and with Compression.fp16. In 8 bits: "flat", our
            alltoall and allgather among all ranks; "two_level", the same between hosts after a sum within each;
            "allgather" of all codes.

    Raises:
        ValueError: for a method that is not known, or fewer than 1 element.
    """
    _require(
        "exchange",
        {
            "elements": (elements, _count(elements), "an integer of at least 1"),
            "method": (method, method in METHODS, f"one of {', '.join(METHODS)}"),
        },
    )
    if cluster.ranks == 1:
        return Exchange(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    if method in FLOATS:
        return _float_exchange(cluster, kernels, elements, method)
    build = {"flat": _flat_exchange, "two_level": _two_level_exchange, "allgather": _allgather_exchange}[method]
    return build(cluster, kernels, elements, block_size)


def allreduce_seconds(
    cluster: Cluster,
    kernels: Kernels,
    elements: int,
    method: str,
    block_size: int | None = wire.DEFAULT_BLOCK_SIZE,
) -> float:
    """Seconds of one such reduction on its own, the calls' fixed cost included."""
    e = exchange(cluster, kernels, elements, method, block_size)
    return e.seconds + e.calls * cluster.call


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A training step by one method.

    Args:
        method: as in `exchange`.
        step: seconds.
        compute: of which the forward and backward pass.
        exposed: the rest: communication and coding that computation does not hide.
        network: seconds of transfers, hidden or not.
        kernels: seconds of coding, hidden or not.
        rank_bytes, host_bytes: sent by a rank, and through a host's network card.
    """

    method: str
    step: float
    compute: float
    exposed: float
    network: float
    kernels: float
    rank_bytes: float
    host_bytes: float


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A gradient, or group of them, and when the backward pass has it."""

    time: float
    elements: int
    is_coded: bool


def _backward(setting: Setting, method: str) -> list[_Ready]:
    """Gradients in the order in which they become ready."""
    forward, flops = setting.forward_seconds, setting.network.flops
    layers = setting.network.layers[::-1]
    clock, ready = forward, []
    for layer in layers:
        clock += 2 * forward * (layer.flops / flops if flops else 1 / len(layers))
        for elements in layer.parameters:
            is_coded = method in ALGORITHMS and elements >= setting.min_elements
            ready.append(_Ready(clock, elements, is_coded))
    if setting.groups is not None:
        ready = _grouped(ready, setting.groups)
    if not setting.overlap:
        ready = [dataclasses.replace(r, time=clock) for r in ready]
    return ready


def _grouped(ready: Sequence[_Ready], groups: int) -> list[_Ready]:
    """Horovod's num_groups: equal numbers of tensors, each group ready with its last. Uncompressed ones stay apart."""
    size = -(-len(ready) // groups)
    result = []
    for begin in range(0, len(ready), size):
        part = ready[begin : begin + size]
        for is_coded in (True, False):
            elements = sum(r.elements for r in part if r.is_coded == is_coded)
            if elements:
                result.append(_Ready(part[-1].time, elements, is_coded))
    return result


def _fused(elements: Sequence[int], width: int) -> list[int]:
    """Float tensors that are ready together, as Horovod fuses them: elements of each allreduce."""
    buckets: list[int] = []
    for n in elements:
        if buckets and (buckets[-1] + n) * width <= FUSION_BYTES:
            buckets[-1] += n
        else:
            buckets.append(n)
    return buckets


def predict(setting: Setting, method: str) -> Prediction:
    """A data-parallel training step.

    Whatever is ready when the network becomes free is exchanged next: floats fused as Horovod does, each compressed
    tensor or group by itself; the fixed cost of calls is paid once for all of it. Kernels delay the backward pass
    unless `kernels_overlap`.

    Args:
        method: as in `exchange`. In 8 bits, tensors below `min_elements` go as float32.
    """
    cluster, kernels = setting.cluster, setting.kernels
    _require("predict", {"method": (method, method in METHODS, f"one of {', '.join(METHODS)}")})
    compute = 3 * setting.forward_seconds
    if cluster.ranks == 1:
        return Prediction(method, compute, compute, 0.0, 0.0, 0.0, 0.0, 0.0)
    float_method = method if method in FLOATS else "float32"
    width = 2 if float_method == "fp16" else 4

    waiting = _backward(setting, method)
    free, delay, after_total = 0.0, 0.0, 0.0
    network = coding = rank_bytes = host_bytes = 0.0
    while waiting:
        start = max(free, waiting[0].time + delay)
        batch = [r for r in waiting if r.time + delay <= start]
        waiting = waiting[len(batch) :]
        parts = [exchange(cluster, kernels, r.elements, method, setting.block_size) for r in batch if r.is_coded]
        floats = _fused([r.elements for r in batch if not r.is_coded], width)
        parts += [exchange(cluster, kernels, n, float_method, setting.block_size) for n in floats]
        before, after = sum(p.before for p in parts), sum(p.after for p in parts)
        moved = sum(p.network for p in parts) + max(p.calls for p in parts) * cluster.call
        free = start + before + moved + after
        if not setting.kernels_overlap:
            delay += before
            after_total += after if free < compute + delay + after_total else 0.0
        network += moved
        coding += before + after
        rank_bytes += sum(p.rank_bytes for p in parts)
        host_bytes += sum(p.host_bytes for p in parts)
    step = max(free, compute + delay + after_total)
    return Prediction(method, step, compute, step - compute, network, coding, rank_bytes, host_bytes)


def predict_model_parallel(setting: Setting, method: str, sub_batch: int | None = None) -> Prediction:
    """A step with the fully connected layers at the network's end split over all ranks (paper sections 2.2 and 5.2).

    The global batch passes through them in sub-batches. In each pass every rank needs all ranks' features before each
    of these layers (an allgather), and gives back its part of their gradients (an alltoall, then a sum); the logits of
    the last layer cross as float32. The transfers of a sub-batch overlap with the computation of the one before. The
    gradients of the other layers are exchanged as in `predict`, along with the convolutions' backward pass.

    Args:
        method: "float32", "fp16", or "flat" for 8 bits.
        sub_batch: samples of all ranks that pass at a time; None for as many as a rank has (`batch`).

    Raises:
        ValueError: for a network without fully connected layers at its end, a sub-batch that is not between the number
            of ranks and the global batch, or another method.
    """
    cluster, kernels, network = setting.cluster, setting.kernels, setting.network
    ranks, whole = cluster.ranks, setting.batch * cluster.ranks
    sub_batch = max(setting.batch, ranks) if sub_batch is None else sub_batch
    head = network.layers[network.split :]
    _require(
        "predict_model_parallel",
        {
            "network": (network.name, bool(head) and network.split > 0, "one that ends in fully connected layers"),
            "method": (method, method in (*FLOATS, "flat"), "float32, fp16 or flat"),
            "sub_batch": (
                sub_batch,
                _count(sub_batch) and ranks <= sub_batch <= whole,
                f"between {ranks}, the number of ranks, and {whole}, the global batch",
            ),
        },
    )
    trunk = Network(network.name, network.layers[: network.split])
    fraction = trunk.flops / network.flops
    seconds = setting.compute_seconds
    base = predict(
        dataclasses.replace(setting, network=trunk, compute_seconds=None if seconds is None else seconds * fraction),
        method,
    )
    passes = -(-whole // sub_batch)
    # the head's work is the same in all, shared by the ranks: forward, then gradients of activations and of weights
    compute = 3 * setting.forward_seconds * (1 - fraction) / passes + 3 * len(head) * kernels.launch
    moved = coding = rank_bytes = host_bytes = 0.0
    if ranks > 1:
        widths = [layer.features[0] for layer in head]
        for features in widths:
            part = _activations(cluster, kernels, sub_batch * features, method, setting.block_size)
            moved, coding = moved + part.network + part.calls * cluster.call, coding + part.before + part.after
            rank_bytes, host_bytes = rank_bytes + part.rank_bytes, host_bytes + part.host_bytes
        logits = _activations(cluster, kernels, sub_batch * head[-1].features[1], "float32", setting.block_size)
        moved += logits.network + logits.calls * cluster.call
        rank_bytes, host_bytes = rank_bytes + logits.rank_bytes, host_bytes + logits.host_bytes
    busy = compute if setting.kernels_overlap else compute + coding
    transfer = moved + coding if setting.kernels_overlap else moved
    through_head = transfer + (passes - 1) * max(transfer, busy) + busy
    if not setting.overlap:
        through_head = passes * (transfer + busy)
    step = base.step + through_head
    total_compute = base.compute + passes * compute
    return Prediction(
        method,
        step,
        total_compute,
        step - total_compute,
        base.network + passes * moved,
        base.kernels + passes * coding,
        base.rank_bytes + passes * rank_bytes,
        base.host_bytes + passes * host_bytes,
    )


def _activations(cluster: Cluster, kernels: Kernels, elements: int, method: str, block_size: int | None) -> Exchange:
    """Allgather of activations and alltoall of their gradients: `elements` of a sub-batch, all ranks' together."""
    n, g = cluster.ranks, cluster.ranks_per_node
    own = -(-elements // n)
    if method in FLOATS:
        message = own * (2 if method == "fp16" else 4)
        cast = kernels.launch + own / kernels.cast if method == "fp16" else 0.0
        decode = n * own / kernels.cast if method == "fp16" else 0.0
        before, after = n * cast, 2 * (decode + kernels.launch * (method == "fp16"))
    else:
        message = _chunk_bytes(own, 1, block_size)
        before = 2 * kernels.launch + (1 + n) * own / kernels.quantize
        after = 2 * (kernels.launch + n * own / kernels.dequantize)
    gather = (n - 1) * (message / (cluster.ring.bandwidth * cluster.efficiency.allgather) + cluster.ring.latency)
    return Exchange(
        network=gather + _alltoall(cluster.nodes, g, cluster, message),
        before=before,
        after=after,
        rank_bytes=2 * (n - 1) * message,
        host_bytes=(g * (n - g) + (n - 1)) * message if cluster.nodes > 1 else 0.0,
        calls=2,
    )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether 8 bits pay.

    Args:
        pays: the step is at least WORTHWHILE times as fast as with the better of float32 and fp16.
        speedup: that ratio; below 1 where 8 bits are slower.
        against: the better of float32 and fp16.
        text: a sentence that begins with yes or no, with the reason of a no.
    """

    pays: bool
    speedup: float
    against: str
    text: str


def verdict(predictions: Sequence[Prediction], algorithm: str = "flat") -> Verdict:
    """Compares an 8-bit prediction with those of float32 and fp16, which must be among `predictions`."""
    by_method = {p.method: p for p in predictions}
    if algorithm not in by_method or not set(FLOATS) <= set(by_method):
        raise ValueError(f"algorithm={algorithm!r}: predictions of it and of {', '.join(FLOATS)} are needed")
    ours, best = by_method[algorithm], min((by_method[m] for m in FLOATS), key=lambda p: p.step)
    speedup = best.step / ours.step
    if best.network == 0:
        return Verdict(False, speedup, best.method, "no: one rank alone sends nothing, so there is nothing to compress")
    times = f"{1e3 * ours.step:.4g} ms a step, {best.method} {1e3 * best.step:.4g} ms"
    if speedup >= WORTHWHILE:
        return Verdict(True, speedup, best.method, f"yes: {speedup:.2f} times as fast as {best.method} ({times})")
    if speedup > 1 / WORTHWHILE:
        how = f"no faster than {best.method} in practice ({times})"
    else:
        how = f"{1 / speedup:.2f} times slower than {best.method} ({times})"
    return Verdict(False, speedup, best.method, f"no: {how}; {_reason(ours, best)}")


def _reason(ours: Prediction, best: Prediction) -> str:
    is_shared = best.host_bytes > 0
    ours_sends, best_sends = (p.host_bytes if is_shared else p.rank_bytes for p in (ours, best))
    if ours_sends > best_sends and ours.step > WORTHWHILE * best.step:
        where = "through a host's card, which its ranks share," if is_shared else "from each rank"
        return f"{ours.method} sends {ours_sends / 1e6:.4g} MB {where} and {best.method} {best_sends / 1e6:.4g} MB"
    if best.exposed < 0.1 * best.step:
        return f"the network is not what limits it: {100 * best.compute / best.step:.0f}% of that step is computation"
    if ours.network > best.network:
        return "the more messages and calls of 8 bits cost more than their fewer bytes save"
    if ours.kernels - best.kernels > best.network - ours.network:
        return f"coding takes {1e3 * ours.kernels:.3g} ms, more than is saved on the network"
    return f"of a step, only {1e3 * best.exposed:.3g} ms wait for the network"


def predict_all(setting: Setting, sub_batch: int | None = None, model_parallel: bool = False) -> list[Prediction]:
    """A Prediction for each method that applies."""
    if model_parallel:
        return [predict_model_parallel(setting, method, sub_batch) for method in (*FLOATS, "flat")]
    levels = setting.cluster.nodes > 1 and setting.cluster.ranks_per_node > 1
    return [predict(setting, method) for method in METHODS if method != "two_level" or levels]


def _ratio(setting: Setting, algorithm: str) -> float:
    """How many times as fast as the better of float32 and fp16."""
    return min(predict(setting, m).step for m in FLOATS) / predict(setting, algorithm).step


def with_bandwidth(setting: Setting, bandwidth: float) -> Setting:
    """The setting with another bandwidth between its nodes; within the node where there is one only."""
    cluster = setting.cluster
    name = "between" if cluster.nodes > 1 else "within"
    link = dataclasses.replace(getattr(cluster, name), bandwidth=bandwidth)
    return dataclasses.replace(setting, cluster=dataclasses.replace(cluster, **{name: link}))


def with_nodes(setting: Setting, nodes: int) -> Setting:
    """The setting on another number of nodes, with the same batch a rank."""
    return dataclasses.replace(setting, cluster=dataclasses.replace(setting.cluster, nodes=nodes))


def break_even_bandwidth(setting: Setting, algorithm: str = "flat") -> float | None:
    """The highest bandwidth between nodes (within, if there is but one) at which 8 bits pay, bytes a second.

    Pay: a step WORTHWHILE times as fast as the better of float32 and fp16. Searched from 1 MB/s to 10 TB/s; None if
    8 bits pay nowhere in it.
    """
    exponents = [6 + i / 8 for i in range(57)]
    pays = [e for e in exponents if _ratio(with_bandwidth(setting, 10**e), algorithm) >= WORTHWHILE]
    if not pays:
        return None
    low, high = pays[-1], pays[-1] + 1 / 8
    for _ in range(20):
        middle = (low + high) / 2
        if _ratio(with_bandwidth(setting, 10**middle), algorithm) >= WORTHWHILE:
            low = middle
        else:
            high = middle
    return 10**low


def break_even_nodes(setting: Setting, algorithm: str = "flat", most: int = 16384) -> tuple[int, int] | None:
    """The fewest and the most nodes, up to `most`, between which 8 bits pay; None if they pay for no number.

    Numbers tried: powers of two, and then all between by bisection, so that a gap in the middle may be missed.
    """

    def pays(nodes: int) -> bool:
        return _ratio(with_nodes(setting, nodes), algorithm) >= WORTHWHILE

    tried = [2**i for i in range(most.bit_length()) if 2**i <= most]
    good = [n for n in tried if pays(n)]
    if not good:
        return None
    first = good[0] if good[0] == 1 else _bisect(pays, good[0], good[0] // 2)
    last = good[-1] if good[-1] == tried[-1] else _bisect(pays, good[-1], good[-1] * 2)
    return first, last


def _bisect(holds: Callable[[int], bool], good: int, bad: int) -> int:
    """The number nearest to `bad` for which it holds, given one for which it does and one for which it does not."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
