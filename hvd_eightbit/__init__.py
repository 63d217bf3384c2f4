"""8-bit approximations for parallelism in deep learning (Dettmers 2016), as a plugin for Horovod and Keras.

    import hvd_eightbit as eightbit
    tape = hvd.DistributedGradientTape(tape, compression=eightbit.Compression.dynamic_tree)

TensorFlow and Horovod are imported when a name that needs them is first used.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Compression": "compression",
    "EightBitCompressor": "compression",
    "DataType": "data_types",
    "allreduce": "collectives",
    "quantize": "ops",
    "dequantize": "ops",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
