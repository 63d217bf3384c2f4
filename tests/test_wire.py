"""The layout of messages: every element once, in order, in as few bytes as promised."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_eightbit import wire


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    ranks=st.integers(1, 12),
    block_size=st.sampled_from([None, 16, 100, 2048]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_element_has_one_place(sizes, ranks, block_size):
    layout = wire.layout(sizes, ranks, block_size)
    covered = [0] * len(sizes)
    position = 0
    for rank, chunk in enumerate(layout.chunks):
        next_block = 0
        for segment in chunk:
            assert segment.begin == covered[segment.tensor]
            assert rank * layout.chunk_elements + segment.code == position
            assert segment.block == next_block and segment.elements > 0
            covered[segment.tensor] += segment.elements
            position += segment.elements
            next_block += wire.blocks(segment.elements, block_size)
            assert segment.code + segment.elements <= layout.chunk_elements
        assert next_block <= layout.chunk_blocks
    assert covered == sizes
    assert layout.chunk_elements % wire.ALIGNMENT == layout.chunk_bytes % wire.ALIGNMENT == 0
    assert layout.chunk_elements + 4 * layout.chunk_blocks <= layout.chunk_bytes


@pytest.mark.parametrize(
    ("elements", "ranks", "chunk_elements", "blocks", "sent"),
    [
        (1_000_000, 2, 500_000, 245, 2 * 500_992),
        (1_000_000, 3, 333_344, 163, 4 * 334_000),
        (2**31 + 16, 4, 2**29 + 16, 2**18 + 1, 6 * (2**29 + 16 + 2**20 + 16)),
        (0, 2, 16, 0, 32),
        (1, 4, 16, 1, 6 * 32),
    ],
)
def test_known_sizes(elements, ranks, chunk_elements, blocks, sent):
    layout = wire.layout([elements], ranks, 2048)
    assert (layout.chunk_elements, layout.chunk_blocks, layout.bytes_sent) == (chunk_elements, blocks, sent)


def test_a_quarter_of_float32():
    """Bits an element at block 2048, and the whole exchange against the float32 ring's 8 (N - 1) / N bytes."""
    for ranks in (2, 3, 4, 8, 96):
        elements = 25_000_000
        layout = wire.layout([elements], ranks, 2048)
        assert layout.bytes_sent / (8 * (ranks - 1) / ranks * elements) < 0.2507


def test_a_block_does_not_cross_tensors():
    layout = wire.layout([20, 30], 1, 2048)
    assert [(s.tensor, s.block) for s in layout.chunks[0]] == [(0, 0), (1, 1)]
    assert layout.chunk_blocks == 2


@pytest.mark.parametrize(("sizes", "ranks"), [([], 2), ([-1], 2), ([5], 0)])
def test_bad_buckets(sizes, ranks):
    with pytest.raises(ValueError, match="sizes=|ranks="):
        wire.layout(sizes, ranks, 2048)
