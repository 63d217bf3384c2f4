"""The codec in plain NumPy: the definition that every kernel equals bit for bit.

Written to be read, not to be fast. Arithmetic is float32 with subnormals kept; input of another floating type is
converted to float32 first, and results are converted to the type asked for last.

A block's absmax is `max |x|`, or NaN if any element is NaN or infinite. Its elements are divided by it, and coded as
the nearest value of the data type, ties to the lower code. A block whose absmax is 0 or NaN is filled with the code of
zero; decoding it gives zeros, or NaN throughout: a loss scaler on any rank sees the overflow of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_eightbit import wire
from hvd_eightbit.data_types import DataType

# 1 / absmax is infinite for the smallest numbers: below SMALL, absmax and elements are raised by RAISE first (exact).
SMALL = np.float32(2.0**-100)
RAISE = np.float32(2.0**100)


def block_absmax(x: np.ndarray) -> np.float32:
    """Absolute maximum of one block: float32, NaN if the block has a NaN or an infinity, 0 if it is empty."""
    absmax = np.max(np.abs(x), initial=np.float32(0))
    return np.float32(absmax) if np.isfinite(absmax) else np.float32(np.nan)


def encode_block(x: np.ndarray, absmax: np.float32, data_type: DataType) -> np.ndarray:
    """Codes of one block: float32[n] -> uint8[n], `number of midpoints < x / absmax`."""
    if absmax == 0 or np.isnan(absmax):
        return np.full(x.shape, data_type.zero_code, np.uint8)
    if absmax < SMALL:
        x, absmax = x * RAISE, absmax * RAISE
    scaled = x * (np.float32(1) / absmax)
    return np.searchsorted(data_type.midpoints, scaled, side="left").astype(np.uint8)


def decode_block(codes: np.ndarray, absmax: np.float32, data_type: DataType) -> np.ndarray:
    """Values of one block: uint8[n] -> float32[n]."""
    return data_type.values[codes] * absmax


def _to_float32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # a float64 beyond float32 is an infinity, and the block NaN
        return np.ascontiguousarray(x).ravel().astype(np.float32)


def _from_float32(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def _block_slices(elements: int, block_size: int | None) -> list[slice]:
    step = block_size or max(elements, 1)
    return [slice(begin, min(begin + step, elements)) for begin in range(0, elements, step)]


def quantize(x: np.ndarray, data_type: DataType, block_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes a tensor.

    Args:
        x: floating point, any shape.
        data_type: the table of values.
        block_size: consecutive elements that share an absmax; None for all.

    Returns:
        (codes, absmax): uint8 of x's shape, and float32[blocks].
    """
    flat = _to_float32(x)
    slices = _block_slices(flat.size, block_size)
    absmax = np.array([block_absmax(flat[s]) for s in slices], np.float32)
    codes = [encode_block(flat[s], m, data_type) for s, m in zip(slices, absmax)]
    return np.concatenate([np.empty(0, np.uint8), *codes]).reshape(np.shape(x)), absmax


def dequantize(
    codes: np.ndarray, absmax: np.ndarray, data_type: DataType, block_size: int | None, dtype: np.dtype = np.float32
) -> np.ndarray:
    """The tensor that `quantize` coded, of codes' shape and the given type."""
    flat = codes.ravel()
    slices = _block_slices(flat.size, block_size)
    values = [decode_block(flat[s], m, data_type) for s, m in zip(slices, absmax)]
    return _from_float32(np.concatenate([np.empty(0, np.float32), *values]), dtype).reshape(codes.shape)


def _segment_blocks(layout: wire.Layout, chunk: int):
    """(tensor, slice in it, slice of codes in the message, slice of absmax bytes) of each block of a chunk."""
    for segment in layout.chunks[chunk]:
        for i, s in enumerate(_block_slices(segment.elements, layout.block_size)):
            absmax_at = layout.chunk_elements + wire.ABSMAX_BYTES * (segment.block + i)
            yield (
                segment.tensor,
                slice(segment.begin + s.start, segment.begin + s.stop),
                slice(segment.code + s.start, segment.code + s.stop),
                slice(absmax_at, absmax_at + wire.ABSMAX_BYTES),
            )


def _write_block(message: np.ndarray, code_at: slice, absmax_at: slice, x: np.ndarray, data_type: DataType) -> None:
    absmax = block_absmax(x)
    message[code_at] = encode_block(x, absmax, data_type)
    message[absmax_at] = np.frombuffer(absmax.tobytes(), np.uint8)


def _read_block(message: np.ndarray, code_at: slice, absmax_at: slice, data_type: DataType) -> np.ndarray:
    return decode_block(message[code_at], message[absmax_at].view(np.float32)[0], data_type)


def pack(
    tensors: Sequence[np.ndarray], ranks: int, rank: int, data_type: DataType, block_size: int | None
) -> np.ndarray:
    """Step 1 of the allreduce: the messages of one rank to all.

    The rank's own row stays zero: its own contribution is never coded, as in the paper (section 2.1).

    Returns:
        uint8[ranks, chunk_bytes]: row r goes to rank r.
    """
    layout = wire.layout([t.size for t in tensors], ranks, block_size)
    flat = [_to_float32(t) for t in tensors]
    messages = np.zeros((ranks, layout.chunk_bytes), np.uint8)
    for chunk in range(ranks):
        if chunk != rank:
            for tensor, at, code_at, absmax_at in _segment_blocks(layout, chunk):
                _write_block(messages[chunk], code_at, absmax_at, flat[tensor][at], data_type)
    return messages


def reduce(
    received: np.ndarray, tensors: Sequence[np.ndarray], rank: int, data_type: DataType, block_size: int | None
) -> np.ndarray:
    """Step 3: the mean over ranks of this rank's chunk, quantized.

    Contributions are added in float32 in the order of ranks, the rank's own from its tensors (exact), and the sum is
    multiplied by float32(1) / float32(ranks).

    Args:
        received: uint8[ranks, chunk_bytes], row r from rank r; the own row is not read.
        tensors: the tensors that this rank packed.

    Returns:
        uint8[chunk_bytes].
    """
    ranks = len(received)
    layout = wire.layout([t.size for t in tensors], ranks, block_size)
    flat = [_to_float32(t) for t in tensors]
    message = np.zeros(layout.chunk_bytes, np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        for tensor, at, code_at, absmax_at in _segment_blocks(layout, rank):
            total = np.zeros(at.stop - at.start, np.float32)
            for r in range(ranks):
                own = r == rank
                total += flat[tensor][at] if own else _read_block(received[r], code_at, absmax_at, data_type)
            mean = total * (np.float32(1) / np.float32(ranks))
            _write_block(message, code_at, absmax_at, mean, data_type)
    return message


def unpack(
    gathered: np.ndarray,
    like: Sequence[np.ndarray],
    data_type: DataType,
    block_size: int | None,
    scale: float = 1.0,
) -> list[np.ndarray]:
    """Step 5: the tensors out of all ranks' reduced chunks.

    Args:
        gathered: uint8[ranks, chunk_bytes], row r reduced by rank r.
        like: tensors whose shapes and types the result has.
        scale: multiplies the mean, in float32: 1 for the mean, the number of ranks for the sum.
    """
    layout = wire.layout([t.size for t in like], len(gathered), block_size)
    flat = [np.zeros(t.size, np.float32) for t in like]
    with np.errstate(over="ignore", invalid="ignore"):
        for chunk in range(len(gathered)):
            for tensor, at, code_at, absmax_at in _segment_blocks(layout, chunk):
                mean = _read_block(gathered[chunk], code_at, absmax_at, data_type)
                flat[tensor][at] = mean * np.float32(scale)
    return [_from_float32(x, t.dtype).reshape(t.shape) for x, t in zip(flat, like)]


def allreduce(
    tensors: Sequence[Sequence[np.ndarray]], data_type: DataType, block_size: int | None, scale: float = 1.0
) -> list[np.ndarray]:
    """The whole 8-bit allreduce, simulated: tensors[rank] is that rank's bucket; what every rank receives."""
    ranks = len(tensors)
    if ranks == 1:
        return unpack_exact(tensors[0], scale)
    sent = [pack(bucket, ranks, rank, data_type, block_size) for rank, bucket in enumerate(tensors)]
    received = [np.stack([messages[rank] for messages in sent]) for rank in range(ranks)]
    reduced = [reduce(received[rank], tensors[rank], rank, data_type, block_size) for rank in range(ranks)]
    return unpack(np.stack(reduced), tensors[0], data_type, block_size, scale)


def unpack_exact(tensors: Sequence[np.ndarray], scale: float) -> list[np.ndarray]:
    """What one rank alone gets: nothing crosses a wire, so nothing is coded."""
    return [_from_float32(_to_float32(t) * np.float32(scale), t.dtype).reshape(t.shape) for t in tensors]
