"""The fit of times, without measuring any."""

import pytest

pytest.importorskip("horovod.tensorflow")

from hvd_eightbit.speedup import measure  # noqa: E402


def test_fit_finds_what_made_the_times():
    sizes = (1e4, 1e6, 1e8)
    fixed, slope = measure.fit(sizes, [1e-3 + 2e-9 * n for n in sizes])
    assert (fixed, slope) == (pytest.approx(1e-3), pytest.approx(2e-9))


def test_fit_is_never_negative():
    fixed, slope = measure.fit((1, 2, 4), (1.0, 3.0, 8.0))
    assert (fixed, slope) == (0, 8 / 4)


def test_fit_refuses_times_that_do_not_grow():
    with pytest.raises(ValueError, match="do not grow.*idle machine"):
        measure.fit((1, 10, 100), (3.0, 2.0, 1.0))
