"""Model parallelism with 8-bit activations: the hidden layers of a classifier are spread over the ranks.

    horovodrun -np 2 --gloo python examples/model_parallel.py

The net of Dettmers 2016, section 4.1: two hidden layers of 1024 units and a softmax. Each rank has its own images and
part of the hidden layers' columns; the softmax layer is small, and every rank has all of it. Trains with float32 and
with 8-bit boundaries, and prints the test error, the bytes that a rank sends in a step, and the seconds of a step.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import horovod.tensorflow as hvd
import images
import numpy as np
import tensorflow as tf

import hvd_eightbit.keras as eightbit_keras

BOUNDARIES = {"float32": None, "8 bits": "dynamic_tree"}


def make_model(width: int, hidden: int, data_type: str | None, sub_batches: int, seed: int) -> tf.keras.Model:
    tf.keras.utils.set_random_seed(seed)  # the same on all ranks: they start with one model
    settings = {"activation": "relu", "sub_batches": sub_batches, "forward": data_type, "backward": data_type}
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((width,)),
            eightbit_keras.ModelParallelDense(hidden, **settings),
            eightbit_keras.ModelParallelDense(hidden, **settings),
            tf.keras.layers.Dense(10),  # few logits: left alone, as in the paper
        ]
    )


def train(data: images.Images, data_type: str | None, args: argparse.Namespace) -> dict[str, float]:
    """Trains a model; its test error in percent, and of a step the seconds and the bytes that a rank sends."""
    model = make_model(data.train_images.shape[1], args.hidden, data_type, args.sub_batches, args.seed)
    optimizer = tf.keras.optimizers.Adam(args.lr)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    local = eightbit_keras.local_layers(model)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        # The softmax layer's gradients are averaged over the ranks, those of the hidden layers' columns are not.
        tape = eightbit_keras.PartialDistributedGradientTape(tape, local)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    steps = len(data.train_images) // (args.batch_size * hvd.size())
    seconds, sent = [], []
    for epoch in range(args.epochs or data.epochs):
        mine = np.random.default_rng([args.seed, epoch]).permutation(len(data.train_images))[hvd.rank() :: hvd.size()]
        before = transmitted_bytes()
        for i in range(steps):
            batch = mine[i * args.batch_size : (i + 1) * args.batch_size]
            start = time.perf_counter()
            step(tf.constant(data.train_images[batch]), tf.constant(data.train_labels[batch]))
            seconds.append(time.perf_counter() - start)
        sent.append((transmitted_bytes() - before) / (hvd.local_size() * steps))

    own = slice(hvd.rank(), None, hvd.size())
    wrong = np.argmax(model(tf.constant(data.test_images[own])), axis=1) != data.test_labels[own]
    wrong = hvd.allreduce(tf.constant(float(wrong.sum())), op=hvd.Sum, name="wrong")
    return {
        "error": 100 * float(wrong) / len(data.test_labels),
        "bytes": min(sent),  # other programs' traffic is counted too
        "seconds": float(np.median(seconds)),
    }


def transmitted_bytes() -> float:
    """Bytes that this host has sent by the time all ranks are here, over all interfaces; NaN where none are counted."""
    hvd.allreduce(tf.zeros([]), name="barrier")
    try:
        lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:
        return float("nan")
    return float(sum(int(line.split(":")[1].split()[8]) for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="'digits', or a folder with MNIST's IDX files; by default what this machine has")
    parser.add_argument("--epochs", type=int, help="by default what the data needs")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step, %(default)s by default")
    parser.add_argument("--hidden", type=int, default=1024, help="units of a hidden layer, %(default)s by default")
    parser.add_argument("--sub-batches", type=int, default=2, help="parts of a batch, %(default)s by default")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate, %(default)s by default")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order, %(default)s by default")
    args = parser.parse_args()
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    try:
        data = images.load(args.data)
    except (ImportError, OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")

    rows = {name: train(data, data_type, args) for name, data_type in BOUNDARIES.items()}
    if hvd.rank() == 0:
        print(f"\n{data.name}; {hvd.size()} ranks\n{'boundary':<12}{'test error %':>14}{'bytes':>14}{'seconds':>10}")
        for name, row in rows.items():
            print(f"{name:<12}{row['error']:>14.2f}{row['bytes']:>14,.0f}{row['seconds']:>10.4f}")


if __name__ == "__main__":
    main()
