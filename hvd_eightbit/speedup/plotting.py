"""Matplotlib, which only plots need."""

from __future__ import annotations


def pyplot():
    """matplotlib.pyplot, drawing to files.

    Raises:
        ImportError: if it is not installed, with how to install it.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "a plot needs matplotlib: pip install matplotlib, or pip install 'hvd-eightbit[plot]'"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
