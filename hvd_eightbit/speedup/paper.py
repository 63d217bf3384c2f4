"""The predictive model of Dettmers 2016, from the constants it prints, and corrected.

Two settings: AlexNet on 4 GPUs of one machine (section 4, tables 3 and 4) and on 96 GPUs of 32 machines (section 5,
tables 5 to 7; table 1 is its summary). `Corrections()` without arguments is the paper as printed; each field mends one
of its faults. Times are milliseconds, message sizes the paper's kB (of 1024 bytes).
"""

from __future__ import annotations

import dataclasses

# Time of one pass of a sub-batch of 128 through AlexNet, forward, backward and update, on one GPU (section 4, table 4).
BATCH_MS = {"NervanaGPU": 104.1, "convnet2": 177.0}
FC_MS = 6.5  # of which the fully connected layers
FC_PARALLEL_MS = 3.34  # the same on 4 GPUs, a sub-batch of 128 of each (table 4)

FOUR_GPUS = 4
CONV_PENALTY_MS = 0.05  # only the last convolution's gradient is not hidden behind the backward pass
# Exposed part of each transfer: its time (table 3) less the computation that hides it (table 4), as section 4 lists
# them. The paper's sum for 32 bits, 6.81, is a slip of addition.
FC_PENALTY_MS = {
    32: (0.9 - 0.9) + (1.1 - 0.3) + (1.1 - 0.15) + (0.4 - 0.3) + (1.1 - 0.9) + (1.1 - 0.64) + 5 * 0.9,
    8: (0.5 - 0.3) + (0.5 - 0.15) + 5 * 0.4,
}
PRINTED_FC_PENALTY_MS = {32: 6.81, 8: 2.55}

CLUSTER_NODES = 32
CLUSTER_GPUS = 96
CLUSTER_BATCH = CLUSTER_GPUS * 128
SUB_BATCHES = (128, 256, 512, 1024, 2048, 12288)
HIDDEN_MS = 1.3  # what a transfer may take before it is exposed: the first fully connected layer's forward pass
FEATURES = 9216  # of an image at the border between convolutions and fully connected layers

# Table 5: the message of one node to one other in a pass, kB, and its latency, ms.
MESSAGE_KB = {
    32: dict(zip(SUB_BATCHES, (144, 288, 576, 1152, 2312, 13872))),
    8: dict(zip(SUB_BATCHES, (18, 36, 72, 144, 289, 1734))),
}
LATENCY_MS = {
    32: dict(zip(SUB_BATCHES, (0.035, 0.07, 0.1, 0.3, 0.7, 5.0))),
    8: dict(zip(SUB_BATCHES, (0.007, 0.01, 0.02, 0.04, 0.07, 0.06))),
}
# Table 6: the exchange among all nodes in one pass, ms.
SINGLE_PASS_MS = {
    32: dict(zip(SUB_BATCHES, (2.1, 4.2, 7.15, 17.4, 25.5, 250.0))),
    8: dict(zip(SUB_BATCHES, (0.35, 0.55, 1.13, 2.25, 3.26, 31.0))),
}
# Tables 1 and 7: speedups as printed, by kernels, bits and sub-batch.
PRINTED_SPEEDUP = {
    "NervanaGPU": {
        32: dict(zip(SUB_BATCHES, (13.4, 20.0, 23.0, 14.8, 11.3, 1.3))),
        8: dict(zip(SUB_BATCHES, (13.8, 24.4, 39.3, 48.6, 50.6, 9.7))),
    },
    "convnet2": {
        32: dict(zip(SUB_BATCHES, (20.7, 29.7, 33.5, 22.7, 17.7, 2.15))),
        8: dict(zip(SUB_BATCHES, (21.4, 35.2, 51.9, 61.0, 62.8, 15.5))),
    },
}

# Cost of coding, ns a number on a GTX Titan: the paper's text has 1 and 0.5, ten times what its author's raw data show,
# and at which an 8-bit transfer on that machine could not have been twice as fast.
RAW_CODING_NS = (0.094, 0.047)
PRINTED_CODING_NS = (1.0, 0.5)


@dataclasses.dataclass(frozen=True)
class Corrections:
    """Which faults of the 96-GPU model are mended; none by default.

    Args:
        quarter_messages: an 8-bit message is a quarter of the 32-bit one. The paper's table 5 has an eighth.
        compression_ns: (compress, decompress) ns a number, charged to the 8-bit rows; None charges nothing, as the
            paper does. RAW_CODING_NS or PRINTED_CODING_NS.
        transfer_once: the latencies of table 5 were read off a chart of whole transfers, which contain size/bandwidth
            already; the paper adds it again. True takes the chart's time alone, by message size (the 0.06 ms that
            table 5 has for 1734 kB would be 29 GB/s over a link of 6).
        every_pass: the exchange is paid once in each pass. The paper multiplies it by 31, for any number of passes.
        fc_grows: the fully connected layers take time in proportion to the sub-batch. The paper takes 6.5 ms a pass for
            128 images and for 12288.
        fc_gpus: GPUs that share the fully connected layers' work without loss, where `fc_grows`. 1 is what the paper's
            text says (it rejects model parallelism of these layers on the cluster); 96 is the ideal.
    """

    quarter_messages: bool = False
    compression_ns: tuple[float, float] | None = None
    transfer_once: bool = False
    every_pass: bool = False
    fc_grows: bool = False
    fc_gpus: int = 1

    def __post_init__(self):
        if not 1 <= self.fc_gpus <= CLUSTER_GPUS:
            raise ValueError(f"fc_gpus={self.fc_gpus} must be from 1 to {CLUSTER_GPUS}, the GPUs of the cluster")
        if self.compression_ns is not None and (len(self.compression_ns) != 2 or min(self.compression_ns) < 0):
            raise ValueError(
                f"compression_ns={self.compression_ns!r}: give (compress, decompress), nanoseconds a number, 0 or more"
            )


AS_PRINTED = Corrections()


def _check(bits: int, kernels: str) -> None:
    if bits not in (8, 32):
        raise ValueError(f"bits={bits}: the paper's model knows 8 and 32")
    if kernels not in BATCH_MS:
        raise ValueError(f"kernels={kernels!r} is not known: use one of {', '.join(BATCH_MS)}")


def four_gpus(bits: int, kernels: str = "NervanaGPU", correct_sum: bool = False) -> float:
    """Speedup of 4 GPUs over one (section 4): convolutions data-parallel, fully connected layers model-parallel.

    Args:
        bits: 32 or 8, of the numbers that cross.
        kernels: "NervanaGPU" or "convnet2": whose computation times.
        correct_sum: use the sum of the paper's penalties, not the one it prints for 32 bits (7.01, not 6.81 ms).

    Raises:
        ValueError: for other bits or kernels.
    """
    _check(bits, kernels)
    batch = BATCH_MS[kernels]
    penalty = (FC_PENALTY_MS if correct_sum else PRINTED_FC_PENALTY_MS)[bits]
    step = (batch - FC_MS) + CONV_PENALTY_MS + FOUR_GPUS * FC_PARALLEL_MS + penalty
    return FOUR_GPUS * batch / step


def _interpolate(table: dict[float, float], x: float) -> float:
    """Linear between the points of a table, and in proportion below the first."""
    points = [(0.0, 0.0), *sorted(table.items())]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise ValueError(f"a message of {x} kB is beyond the paper's tables, which end at {points[-1][0]} kB")


def _by_size(table: dict[int, dict[int, float]]) -> dict[float, float]:
    """A table of table 5 or 6 by message size instead of sub-batch; where both rows have a size, the 32-bit one."""
    sizes = {MESSAGE_KB[8][s]: table[8][s] for s in (128, 256, 512)}
    return sizes | {MESSAGE_KB[32][s]: table[32][s] for s in SUB_BATCHES}


def single_pass_ms(bits: int, sub_batch: int, corrections: Corrections = AS_PRINTED) -> float:
    """Time of the exchange among the 32 nodes in one pass, coding not counted, ms."""
    if sub_batch not in SUB_BATCHES:
        raise ValueError(f"sub_batch={sub_batch} is not in the paper's tables: use one of {SUB_BATCHES}")
    kb = MESSAGE_KB[32][sub_batch] / 4 if bits == 8 and corrections.quarter_messages else MESSAGE_KB[bits][sub_batch]
    if corrections.transfer_once:
        return (CLUSTER_NODES - 1) * _interpolate(_by_size(LATENCY_MS), kb)
    if kb != MESSAGE_KB[bits][sub_batch]:
        return _interpolate(_by_size(SINGLE_PASS_MS), kb)
    return SINGLE_PASS_MS[bits][sub_batch]


def _coding_ms(compression_ns: tuple[float, float]) -> float:
    """Compressing a node's own activations and decompressing those of the others, ms for all passes together."""
    own = CLUSTER_BATCH // CLUSTER_NODES * FEATURES
    compress, decompress = compression_ns
    return own * (compress + (CLUSTER_NODES - 1) * decompress) * 1e-6


def cluster(bits: int, sub_batch: int, kernels: str = "NervanaGPU", corrections: Corrections = AS_PRINTED) -> float:
    """Speedup of 96 GPUs in 32 nodes over one (section 5.2).

    Only the activations between the convolutions and the fully connected layers are charged: the exchange of the
    convolutions' gradients hides behind their backward pass.

    Args:
        bits: 32 or 8, of the numbers that cross.
        sub_batch: images that pass through the fully connected layers at a time: 128, 256, 512, 1024, 2048 or 12288.
        kernels: "NervanaGPU" or "convnet2": whose computation times.
        corrections: which of the paper's faults are mended.

    Raises:
        ValueError: for bits, sub-batch or kernels that the tables do not have.
    """
    _check(bits, kernels)
    single = single_pass_ms(bits, sub_batch, corrections)
    passes = CLUSTER_BATCH // sub_batch
    fc_pass, hidden = FC_MS, HIDDEN_MS
    if corrections.fc_grows:
        growth = sub_batch / 128 / corrections.fc_gpus
        fc_pass, hidden = FC_MS * growth, HIDDEN_MS * growth
    if corrections.every_pass:
        exchange = passes * max(0.0, single - hidden)
    else:
        exchange = single if single <= hidden else (CLUSTER_NODES - 1) * (single - hidden)
    if bits == 8 and corrections.compression_ns is not None:
        exchange += _coding_ms(corrections.compression_ns)
    step = (BATCH_MS[kernels] - FC_MS) + passes * fc_pass + exchange
    return CLUSTER_GPUS * BATCH_MS[kernels] / step


def best(bits: int, kernels: str = "NervanaGPU", corrections: Corrections = AS_PRINTED) -> tuple[int, float]:
    """(sub-batch, speedup) of the sub-batch with the highest speedup."""
    return max(((s, cluster(bits, s, kernels, corrections)) for s in SUB_BATCHES), key=lambda pair: pair[1])


def corrected() -> list[tuple[str, Corrections]]:
    """The corrections one by one, each with what it mends, and then together, in the order in which they are told."""
    raw = RAW_CODING_NS
    return [
        ("as printed", AS_PRINTED),
        ("8-bit messages a quarter, not an eighth", Corrections(quarter_messages=True)),
        ("coding charged, at the raw data's rates", Corrections(compression_ns=raw)),
        ("coding charged, at the text's rates", Corrections(compression_ns=PRINTED_CODING_NS)),
        ("size/bandwidth counted once", Corrections(transfer_once=True)),
        ("one exchange in each pass, not 31", Corrections(every_pass=True)),
        ("FC time grows with the sub-batch, on 1 GPU", Corrections(fc_grows=True)),
        ("FC time grows with the sub-batch, on 96 GPUs", Corrections(fc_grows=True, fc_gpus=CLUSTER_GPUS)),
        ("quarter and coding", Corrections(True, raw)),
        ("quarter, coding, once", Corrections(True, raw, True)),
        ("quarter, coding, once, each pass", Corrections(True, raw, True, True)),
        ("all, FC on 1 GPU", Corrections(True, raw, True, True, True)),
        ("all, FC on the 3 GPUs of a node", Corrections(True, raw, True, True, True, 3)),
        ("all, FC on 96 GPUs without loss", Corrections(True, raw, True, True, True, CLUSTER_GPUS)),
    ]


def report() -> str:
    """The paper's tables as text: reproduced, and with its faults mended one by one."""
    lines = ["AlexNet on 4 GPUs of one machine (speedup over one GPU)", f"  {'kernels':<12}{'32 bit':>8}{'8 bit':>8}"]
    lines += [f"  {k:<12}{four_gpus(32, k):8.2f}{four_gpus(8, k):8.2f}" for k in BATCH_MS]
    lines += ["", "AlexNet on 96 GPUs of 32 machines, by sub-batch: 32 bit / 8 bit, and as the paper prints them"]
    for kernels in BATCH_MS:
        for s in SUB_BATCHES:
            ours = " / ".join(f"{cluster(bits, s, kernels):5.2f}" for bits in (32, 8))
            theirs = " / ".join(f"{PRINTED_SPEEDUP[kernels][bits][s]:g}" for bits in (32, 8))
            lines.append(f"  {kernels:<12}{s:>6}   {ours}   ({theirs})")
    lines += [
        "",
        "The best sub-batch of each (NervanaGPU): what is left of 50 against 23 when the paper's faults are mended",
    ]
    lines.append(f"  {'':<46}{'32 bit (sub-batch)':>20}{'8 bit (sub-batch)':>20}{'ratio':>7}")
    for what, corrections in corrected():
        (s32, v32), (s8, v8) = best(32, corrections=corrections), best(8, corrections=corrections)
        full, short = f"{v32:.1f} ({s32})", f"{v8:.1f} ({s8})"
        lines.append(f"  {what:<46}{full:>20}{short:>20}{v8 / v32:7.2f}")
    return "\n".join(lines)
