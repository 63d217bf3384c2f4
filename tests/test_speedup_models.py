"""Parameter counts and operations of the networks."""

import pytest

from hvd_eightbit.speedup import models


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("alexnet", 60_965_224, 16),
        ("vgg16", 138_357_544, 32),
        ("resnet50", 25_557_032, 161),
        ("bert_large", 335_141_888, 391),
    ],
)
def test_parameters(name, parameters, tensors):
    network = models.preset(name)
    assert network.parameters == parameters
    assert sum(len(layer.parameters) for layer in network.layers) == tensors


# Multiply-adds as the papers and common tables have them: 0.72, 15.5, 4.1 G; BERT-large: 2 x 302 M x 128 and attention.
@pytest.mark.parametrize(
    ("name", "flops"), [("alexnet", 1.45e9), ("vgg16", 30.96e9), ("resnet50", 8.18e9), ("bert_large", 78.9e9)]
)
def test_operations(name, flops):
    assert models.preset(name).flops == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(("name", "layers"), [("alexnet", 3), ("vgg16", 3), ("resnet50", 1), ("bert_large", 0)])
def test_layers_that_model_parallelism_splits(name, layers):
    network = models.preset(name)
    assert len(network.layers) - network.split == layers


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match="model='lenet'.*alexnet, vgg16, resnet50, bert_large"):
        models.preset("lenet")


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_keras_model_is_read(library):
    keras = pytest.importorskip(library)
    inside = keras.Sequential([keras.Input((8, 8, 4)), keras.layers.Conv2D(5, 3, name="inner"), keras.layers.Flatten()])
    frozen = keras.layers.Dense(7, trainable=False, name="frozen")
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, padding="same", name="conv"),
            keras.layers.BatchNormalization(name="norm"),
            inside,
            frozen,
            keras.layers.Dense(10, name="head"),
        ],
        name="small",
    )
    network = models.from_keras(model)
    assert network.name == "small"
    assert [(x.name, x.parameters) for x in network.layers] == [
        ("conv", (3 * 3 * 3 * 4, 4)),
        ("norm", (4, 4)),
        ("inner", (3 * 3 * 4 * 5, 5)),
        ("head", (70, 10)),
    ]
    assert network.layers[0].flops == 2 * 108 * 64
    assert network.layers[2].flops == 2 * 180 * 36
    assert network.layers[3].features == (7, 10) and network.split == 3


def test_keras_application_equals_preset():
    keras = pytest.importorskip("keras")
    network = models.from_keras(keras.applications.VGG16(weights=None))
    assert network.parameters == 138_357_544
    assert network.flops == pytest.approx(models.vgg16().flops, rel=0.001)


def test_keras_model_not_built():
    keras = pytest.importorskip("keras")
    with pytest.raises(ValueError, match="no trainable weights"):
        models.from_keras(keras.Sequential([keras.layers.Dense(3)]))
