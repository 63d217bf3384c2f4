"""A library that is missing, or of another TensorFlow, is refused with a message that says how to build it."""

import json

import pytest
import tensorflow as tf

from hvd_eightbit import ops


@pytest.fixture
def library_file(tmp_path, monkeypatch):
    """Where the library is looked for, for this test: a file that is no library, built for TensorFlow as given."""

    def make(built_for: str | None):
        library, build = tmp_path / "_tf_ops.so", tmp_path / "_build.json"
        if built_for is not None:
            library.write_bytes(b"not a library")
            build.write_text(json.dumps({"tensorflow": built_for}))
        monkeypatch.setattr(ops, "_LIBRARY", library)
        monkeypatch.setattr(ops, "_BUILD", build)

    ops.library.cache_clear()
    yield make
    ops.library.cache_clear()


def test_not_built(library_file):
    library_file(None)
    with pytest.raises(ImportError, match="is not built .*pip install"):
        ops.quantize(tf.zeros([4]))


def test_built_for_another_tensorflow(library_file):
    library_file("2.3.1")
    with pytest.raises(
        ImportError, match=rf"built for TensorFlow 2.3.1, but TensorFlow {tf.__version__} .*pip install"
    ):
        ops.quantize(tf.zeros([4]))


def test_broken(library_file):
    library_file(tf.__version__)
    with pytest.raises(ImportError, match="does not load .*The loader says"):
        ops.quantize(tf.zeros([4]))
