"""Model parallelism with 8-bit activations: fully connected layers of a classifier are spread over the ranks.

    horovodrun -np 2 --gloo python examples/model_parallel.py
    horovodrun -np 2 --gloo python examples/model_parallel.py --convolutional --seeds 5

The net is that of Dettmers 2016, section 4.1, two hidden layers of 1024 units and a softmax; or, with
--convolutional, one like the paper's larger ones, convolutions data-parallel and fully connected layers model-
parallel. Each rank has its own images and part of the hidden layers' columns; the softmax layer is small, and every
rank has all of it. Trains with float32 and with 8 bits, and prints the test error, the bytes that a rank sends in a
step, and the seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time

import horovod.tensorflow as hvd
import images
import numpy as np
import tensorflow as tf

import hvd_eightbit as eightbit
import hvd_eightbit.keras as eightbit_keras

TEST_BATCH = 500
BITS = {"float32": None, "8 bits": "dynamic_tree"}


def make_model(width: int, data_type: str | None, args: argparse.Namespace, seed: int) -> tf.keras.Model:
    """The net for flat images of so many pixels."""
    tf.keras.utils.set_random_seed(seed)  # the same on all ranks: they start with one model
    layers = [tf.keras.layers.Input((width,))]
    if args.convolutional:
        side = math.isqrt(width)
        layers.append(tf.keras.layers.Reshape((side, side, 1)))
        for channels in (32, 64):
            layers.append(tf.keras.layers.Conv2D(channels, 5, padding="same", activation="relu"))
            layers.append(tf.keras.layers.MaxPooling2D(2))
        layers.append(tf.keras.layers.Flatten())
    for _ in range(2):
        layers.append(
            eightbit_keras.ModelParallelDense(
                args.hidden, activation="relu", sub_batches=args.sub_batches, forward=data_type, backward=data_type
            )
        )
    layers.append(tf.keras.layers.Dense(10))  # few logits: left alone, as in the paper
    return tf.keras.Sequential(layers)


def train(data: images.Images, data_type: str | None, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Trains a model; its test error in percent, and of a step the seconds and the bytes that a rank sends."""
    model = make_model(data.train_images.shape[1], data_type, args, seed)
    optimizer = tf.keras.optimizers.Adam(args.lr)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    local = eightbit_keras.local_layers(model)
    compression = hvd.Compression.none if data_type is None else eightbit.EightBitCompressor(data_type)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        # Gradients of the other layers are averaged over the ranks, those of the hidden layers' columns are not.
        tape = eightbit_keras.PartialDistributedGradientTape(tape, local, compression=compression)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    steps = len(data.train_images) // (args.batch_size * hvd.size())
    seconds, sent = [], []
    for epoch in range(args.epochs or data.epochs):
        mine = np.random.default_rng([seed, epoch]).permutation(len(data.train_images))[hvd.rank() :: hvd.size()]
        before = transmitted_bytes()
        for i in range(steps):
            batch = mine[i * args.batch_size : (i + 1) * args.batch_size]
            start = time.perf_counter()
            step(tf.constant(data.train_images[batch]), tf.constant(data.train_labels[batch]))
            seconds.append(time.perf_counter() - start)
        sent.append((transmitted_bytes() - before) / (hvd.local_size() * steps))

    wrong = 0
    for i in range(0, len(data.test_labels), TEST_BATCH * hvd.size()):  # all ranks take part in every batch
        own = slice(i + hvd.rank(), i + TEST_BATCH * hvd.size(), hvd.size())
        logits = model(tf.constant(data.test_images[own]), training=False)
        wrong += np.sum(np.argmax(logits, axis=1) != data.test_labels[own])
    wrong = hvd.allreduce(tf.constant(float(wrong)), op=hvd.Sum, name="wrong")
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
    parser.add_argument("--convolutional", action="store_true", help="put two convolutional layers first")
    parser.add_argument("--epochs", type=int, help="by default what the data needs")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step, %(default)s by default")
    parser.add_argument("--hidden", type=int, default=1024, help="units of a hidden layer, %(default)s by default")
    parser.add_argument("--sub-batches", type=int, default=2, help="parts of a batch, %(default)s by default")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate, %(default)s by default")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order, %(default)s by default")
    parser.add_argument("--seeds", type=int, default=1, help="train with so many seeds; %(default)s by default")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results there as well")
    args = parser.parse_args()
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    try:
        data = images.load(args.data)
    except (ImportError, OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")

    runs = []
    for seed in range(args.seed, args.seed + args.seeds):
        for name, data_type in BITS.items():
            runs.append({"bits": name, "seed": seed, **train(data, data_type, args, seed)})
            if hvd.rank() == 0:
                print(f"{name}, seed {seed}: test error {runs[-1]['error']:.2f}%", flush=True)
    if hvd.rank() == 0:
        net = "convolutional" if args.convolutional else "dense"
        print_table(f"{data.name}; {net} net; {hvd.size()} ranks", runs)
        if args.json:
            facts = {"data": data.name, "net": net, "ranks": hvd.size(), "runs": runs}
            args.json.write_text(json.dumps(facts, indent=1) + "\n")


def print_table(title: str, runs: list[dict]) -> None:
    """Mean error over the seeds with its standard deviation, least bytes, median seconds."""
    print(f"\n{title}\n{'bits':<10}{'test error %':>16}{'bytes a step':>15}{'s a step':>10}")
    for name in BITS:
        own = [run for run in runs if run["bits"] == name]
        error, sent, seconds = (np.array([run[what] for run in own]) for what in ("error", "bytes", "seconds"))
        spread = f" +- {error.std(ddof=1):.2f}" if len(error) > 1 else ""
        print(f"{name:<10}{f'{error.mean():.2f}{spread}':>16}{sent.min():>15,.0f}{np.median(seconds):>10.4f}")


if __name__ == "__main__":
    main()
