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


def test_gpu_kernels_are_registered_where_cuda_was_built():
    """Also where there is no GPU: cudart is in the library."""
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op

    ops.library()
    built = json.loads(ops._BUILD.read_text())["cuda"]
    for name in ("Quantize", "Dequantize", "Pack", "Reduce", "Unpack", "Probe", "AgreedScale"):
        kernels = get_registered_kernels_for_op(f"EightBit{name}").kernel
        types = {
            device: sorted(k.constraint[0].allowed_values.list.type[0] for k in kernels if k.device_type == device)
            for device in ("CPU", "GPU")
        }
        expected = [tf.float32, tf.float64] if name in ("Probe", "AgreedScale") else ops.DTYPES
        assert types["CPU"] == sorted(d.as_datatype_enum for d in expected)
        if built or name in ("Probe", "AgreedScale"):
            assert types["GPU"] == types["CPU"]
