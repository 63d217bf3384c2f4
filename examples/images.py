"""Images to classify, without a download: Fashion-MNIST (or MNIST) where its files are, else scikit-learn's digits."""

from __future__ import annotations

import gzip
import pathlib
from typing import NamedTuple

import numpy as np

FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
DIGITS_TEST = 0.2  # part of the digits held out


class Images(NamedTuple):
    """Images, one flat float32 row each with values in [0, 1], and their classes 0 to 9 as int64."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    epochs: int  # about as many as it takes to learn them


def load(source: str | None = None) -> Images:
    """Loads a data set; the split into training and test images is always the same one.

    Args:
        source: "digits"; or a folder with the four IDX files of MNIST or Fashion-MNIST, gzipped or not; or None for
            Debian's Fashion-MNIST where it is installed, and the digits elsewhere.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ImportError: the digits were asked for and scikit-learn is not installed.
        ValueError: a file is not in the IDX format.
    """
    if source is None:
        source = str(FASHION_MNIST) if FASHION_MNIST.is_dir() else "digits"
    if source == "digits":
        return _digits()
    folder = pathlib.Path(source)
    if not folder.is_dir():
        raise FileNotFoundError(f"{source!r} is not a folder; give one with the IDX files, or 'digits'")
    images, labels = {}, {}
    for part in ("train", "t10k"):
        pixels = _read_idx(folder / f"{part}-images-idx3-ubyte")
        images[part] = pixels.reshape(len(pixels), -1).astype(np.float32) / 255
        labels[part] = _read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)
    return Images(str(folder), images["train"], labels["train"], images["t10k"], labels["t10k"], epochs=10)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn, or give a folder") from error
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    test = round(DIGITS_TEST * len(order))
    name = f"scikit-learn's {len(order):,} digits of 8x8 pixels (the input is 64 wide, not the paper's 784)"
    return Images(name, images[test:], labels[test:], images[:test], labels[:test], epochs=50)


def _read_idx(path: pathlib.Path) -> np.ndarray:
    """The array in an IDX file of unsigned bytes: 0, 0, 8, dimensions; their sizes as big-endian int32; the bytes."""
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise FileNotFoundError(f"neither {path} nor {packed.name} beside it exists")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    start = 4 + 4 * data[3] if len(data) > 3 else 0
    if data[:3] != b"\0\0\x08" or len(data) < start:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    shape = np.frombuffer(data[4:start], ">i4")
    if len(data) - start != np.prod(shape):
        raise ValueError(f"{path} is cut short: {len(data) - start} bytes of data, {np.prod(shape)} announced")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
