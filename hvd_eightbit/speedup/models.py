"""What is exchanged and computed: layers of well-known networks, or of a Keras model.

Parameters and floating-point operations are computed from the architectures as their papers describe them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: what it sends in data parallelism, and how long it computes.

    Args:
        name: of the layer.
        parameters: elements of each of its trainable tensors.
        flops: floating-point operations of the forward pass for one sample, a multiply-add counted as two.
        features: (inputs, outputs) of a fully connected layer; None for any other, which is never split over ranks.
    """

    name: str
    parameters: tuple[int, ...]
    flops: float
    features: tuple[int, int] | None = None

    def __post_init__(self):
        if any(p < 1 for p in self.parameters) or self.flops < 0:
            raise ValueError(
                f"layer {self.name!r}: parameters={self.parameters} must be positive, flops={self.flops} not negative"
            )


@dataclasses.dataclass(frozen=True)
class Network:
    """Layers in the order of the forward pass."""

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self):
        if not self.layers:
            raise ValueError(f"network {self.name!r} has no layers with trainable parameters")

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(sum(layer.parameters) for layer in self.layers)

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass for one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def split(self) -> int:
        """Index of the first of the fully connected layers at the end, those that model parallelism splits."""
        first = len(self.layers)
        while first and self.layers[first - 1].features:
            first -= 1
        return first


def _conv(name: str, kernel: int, inputs: int, outputs: int, size: int, groups: int = 1, norm: bool = False) -> Layer:
    """A convolution with bias, or with batch normalization (two vectors) in its place; `size`: its output's side."""
    weights = kernel * kernel * inputs // groups * outputs
    return Layer(name, (weights, outputs, outputs) if norm else (weights, outputs), 2 * weights * size * size)


def _dense(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, (inputs * outputs, outputs), 2 * inputs * outputs, (inputs, outputs))


def alexnet() -> Network:
    """AlexNet, with two groups in conv2, 4 and 5 (Krizhevsky, Sutskever and Hinton 2012): 60,965,224 parameters."""
    return Network(
        "alexnet",
        (
            _conv("conv1", 11, 3, 96, 55),
            _conv("conv2", 5, 96, 256, 27, groups=2),
            _conv("conv3", 3, 256, 384, 13),
            _conv("conv4", 3, 384, 384, 13, groups=2),
            _conv("conv5", 3, 384, 256, 13, groups=2),
            _dense("fc6", 256 * 6 * 6, 4096),
            _dense("fc7", 4096, 4096),
            _dense("fc8", 4096, 1000),
        ),
    )


def vgg16() -> Network:
    """VGG-16, configuration D (Simonyan and Zisserman 2015): 138,357,544 parameters."""
    layers, inputs = [], 3
    for stage, (outputs, repeats) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for i in range(1, repeats + 1):
            layers.append(_conv(f"conv{stage}_{i}", 3, inputs, outputs, 448 >> stage))
            inputs = outputs
    layers += [_dense("fc6", 512 * 7 * 7, 4096), _dense("fc7", 4096, 4096), _dense("fc8", 4096, 1000)]
    return Network("vgg16", tuple(layers))


def resnet50() -> Network:
    """ResNet-50 (He et al. 2016), stride in the 3x3 convolutions: 25,557,032 trainable parameters in 161 tensors."""
    layers, inputs = [_conv("conv1", 7, 3, 64, 112, norm=True)], 64
    for stage, (width, repeats) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        size = 224 >> stage
        for i in range(1, repeats + 1):
            name = f"conv{stage}_{i}"
            before = size * 2 if i == 1 and stage > 2 else size
            layers += [
                _conv(f"{name}_reduce", 1, inputs, width, before, norm=True),
                _conv(f"{name}_3x3", 3, width, width, size, norm=True),
                _conv(f"{name}_expand", 1, width, 4 * width, size, norm=True),
            ]
            if i == 1:
                layers.append(_conv(f"{name}_shortcut", 1, inputs, 4 * width, size, norm=True))
            inputs = 4 * width
    return Network("resnet50", (*layers, _dense("fc", 2048, 1000)))


def bert_large(sequence: int = 128) -> Network:
    """BERT-large with pooler, vocabulary 30522 (Devlin et al. 2019): 335,141,888 parameters.

    Args:
        sequence: tokens of a sample; operations are those of whole sequences.
    """
    width, inner = 1024, 4096

    def linear(name: str, inputs: int, outputs: int) -> Layer:
        return Layer(name, (inputs * outputs, outputs), 2 * sequence * inputs * outputs)

    layers = [Layer("embeddings", (30522 * width, 512 * width, 2 * width, width, width), 0)]
    for i in range(1, 25):
        layers += [linear(f"block{i}_{part}", width, width) for part in ("query", "key", "value")]
        layers += [
            Layer(f"block{i}_attention", (), 4 * sequence * sequence * width),
            linear(f"block{i}_output", width, width),
            Layer(f"block{i}_norm1", (width, width), 0),
            linear(f"block{i}_expand", width, inner),
            linear(f"block{i}_contract", inner, width),
            Layer(f"block{i}_norm2", (width, width), 0),
        ]
    layers.append(Layer("pooler", (width * width, width), 2 * width * width))
    return Network("bert_large", tuple(layers))


PRESETS: dict[str, Callable[[], Network]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet50": resnet50,
    "bert_large": bert_large,
}


def preset(name: str) -> Network:
    """The network of that name.

    Raises:
        ValueError: for a name that is not one of PRESETS.
    """
    if name not in PRESETS:
        raise ValueError(f"model={name!r} is not known: use one of {', '.join(PRESETS)}, or the file of a Keras model")
    return PRESETS[name]()


def _leaves(model) -> Iterator:
    for layer in model.layers:
        if getattr(layer, "layers", None):
            yield from _leaves(layer)
        else:
            yield layer


def _positions(layer) -> int:
    """Places of a sample at which a layer applies its weights: pixels, or tokens; 1 where its output is not known."""
    try:
        shape = tuple(getattr(layer, "output_shape", None) or layer.output.shape)
        dimensions = shape[2:] if getattr(layer, "data_format", None) == "channels_first" else shape[1:-1]
        return math.prod(int(d) for d in dimensions if d)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return 1


def from_keras(model) -> Network:
    """The Network of a built Keras model (Keras 2, tf_keras or Keras 3), read from its trainable weights.

    Operations are counted for weights of two and more dimensions, except tables that are looked up (embeddings), at
    every position of the layer's output; attention between positions, recurrence over time and layers without
    parameters are not. Give the measured time of a step rather than rely on them.

    Raises:
        ValueError: if the model is not built or has no trainable weights.
    """
    if not model.trainable_weights:
        raise ValueError(
            f"model {model.name!r} has no trainable weights: build it first, with model.build(input_shape) or a call"
        )
    layers, seen = [], set()

    def sizes(weights) -> list[tuple[int, int]]:
        """(elements, dimensions) of weights not seen yet."""
        new = [w for w in weights if id(w) not in seen]
        seen.update(id(w) for w in new)
        return [(math.prod(w.shape), len(w.shape)) for w in new]

    for layer in _leaves(model):
        weights = sizes(layer.trainable_weights)
        if not weights:
            continue
        kind = type(layer).__name__
        kernel = 0 if kind == "Embedding" else sum(n for n, dimensions in weights if dimensions > 1)
        positions = _positions(layer)
        features = None
        if kind == "Dense" and positions == 1:
            features = tuple(int(d) for d in layer.kernel.shape)
        layers.append(Layer(layer.name, tuple(n for n, _ in weights), 2 * kernel * positions, features))
    rest = sizes(model.trainable_weights)
    if rest:
        layers.append(Layer("other", tuple(n for n, _ in rest), 2 * sum(n for n, d in rest if d > 1)))
    return Network(model.name, tuple(layers))
