"""The layout of a message: sizes and offsets (plain integers; tf_ops/wire.h is the same arithmetic in C++).

A bucket of tensors is seen as one flat vector and cut into one chunk per rank. A chunk's message is one uint8 buffer:

    codes    chunk_elements bytes, one per element of the chunk
    absmax   4 bytes per block, float32 in the machine's byte order
    zeros    up to chunk_bytes

A block is `block_size` consecutive elements that share an absmax. It never crosses from one tensor into the next:
neighbours in a bucket may differ by orders of magnitude, and the smaller one would lose its gradient for good. So a
block ends where its tensor or its chunk does, and may be short; nothing is padded up to a whole block. All chunks have
the same size, so that one collective without split sizes moves them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

ALIGNMENT = 16  # elements in a chunk, and bytes in its message, are multiples: wide loads stay aligned
ABSMAX_BYTES = 4
MIN_BLOCK_SIZE = 16  # below, the absmax values would take over a quarter of the message
DEFAULT_BLOCK_SIZE = 2048


def check_block_size(block_size: int | None) -> int | None:
    """Returns block_size if it is one: an integer of at least MIN_BLOCK_SIZE, or None for the whole tensor.

    Raises:
        TypeError, ValueError: if it is not.
    """
    if block_size is None:
        return None
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size={block_size!r}: expected an integer, or None for one block per tensor")
    if not MIN_BLOCK_SIZE <= block_size < 2**31:
        raise ValueError(
            f"block_size={block_size} must be at least {MIN_BLOCK_SIZE} and below 2^31, or None for one block per "
            f"tensor; {DEFAULT_BLOCK_SIZE} is the default"
        )
    return block_size


def blocks(elements: int, block_size: int | None) -> int:
    """Number of blocks that `elements` consecutive elements of one tensor take."""
    if block_size is None:
        return min(elements, 1)
    return -(-elements // block_size)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The part of one tensor that lies in one chunk."""

    tensor: int  # index of the tensor in the bucket
    begin: int  # its first element within the flattened tensor
    elements: int
    code: int  # offset of its first code within the chunk's message, bytes
    block: int  # index of its first block within the chunk


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a bucket of tensors lies in the messages of `ranks` ranks.

    Args:
        sizes: elements of each tensor of the bucket.
        ranks: number of ranks, and so of chunks.
        block_size: elements that share an absmax; None for a tensor's whole part of a chunk.
    """

    sizes: tuple[int, ...]
    ranks: int
    block_size: int | None

    @functools.cached_property
    def chunk_elements(self) -> int:
        """Elements (so bytes of codes) in a chunk; the last chunks may be filled in part or not at all."""
        chunk = -(-sum(self.sizes) // self.ranks)
        return max(ALIGNMENT, -(-chunk // ALIGNMENT) * ALIGNMENT)

    @functools.cached_property
    def chunks(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each chunk, in order."""
        return tuple(tuple(self._segments(rank)) for rank in range(self.ranks))

    def _segments(self, rank: int) -> Iterator[Segment]:
        first, last = rank * self.chunk_elements, (rank + 1) * self.chunk_elements
        block = tensor_first = 0
        for tensor, size in enumerate(self.sizes):
            begin, end = max(first, tensor_first), min(last, tensor_first + size)
            if begin < end:
                yield Segment(tensor, begin - tensor_first, end - begin, begin - first, block)
                block += blocks(end - begin, self.block_size)
            tensor_first += size

    @functools.cached_property
    def chunk_blocks(self) -> int:
        """Absmax values a chunk's message has room for: the most that any of the chunks needs."""
        return max(sum(blocks(s.elements, self.block_size) for s in chunk) for chunk in self.chunks)

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's message."""
        message = self.chunk_elements + ABSMAX_BYTES * self.chunk_blocks
        return -(-message // ALIGNMENT) * ALIGNMENT

    @property
    def bytes_sent(self) -> int:
        """Bytes a rank sends for one allreduce: to each other rank a chunk in the alltoall, one in the allgather."""
        return 2 * (self.ranks - 1) * self.chunk_bytes


def layout(sizes: Sequence[int], ranks: int, block_size: int | None) -> Layout:
    """The Layout of a bucket, its arguments checked.

    Raises:
        ValueError: for no tensor, a negative size or fewer than one rank.
    """
    if not sizes or min(sizes) < 0:
        raise ValueError(f"sizes={list(sizes)!r}: a bucket needs tensors, of 0 or more elements each")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    return Layout(tuple(int(size) for size in sizes), int(ranks), check_block_size(block_size))
