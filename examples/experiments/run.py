"""The paper's experiments (Dettmers 2016, section 4), with float32, its 8-bit types and other methods side by side.

    horovodrun -np 2 --gloo python examples/experiments/run.py --out results
    horovodrun -np 2 --gloo python examples/experiments/run.py --out results --parallelism model
    horovodrun -np 2 --gloo python examples/experiments/run.py --out results --model conv
    horovodrun -np 2 --gloo python examples/experiments/run.py --out results --model alexnet   # synthetic: speed, bytes
    python examples/experiments/report.py results

Each run (net, parallelism, ranks, method, seed) is one JSON file in --out; those that are there are not run again, so
a command that was interrupted goes on where it stopped. What was measured is in docs/experiments.md.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from methods import DATA_TYPES, METHODS, MIN_ELEMENTS

import hvd_eightbit as eightbit
import hvd_eightbit.keras as eightbit_keras
from hvd_eightbit.feedback import ErrorFeedback

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import images  # noqa: E402

TEST_BATCH = 500
WARM_UP = 3  # steps left out of the timing: the first one traces the graph


class Net:
    """A net of the paper, and how it is trained.

    Args:
        name: "dense" (section 4.1: 784-1024-1024-10), "conv" (4.2: after the CIFAR-10 net) or "alexnet" (4.3).
        parallelism: "data", or "model": the hidden fully connected layers are spread over the ranks.
        data_type: of activations in model parallelism; None for float32.
    """

    def __init__(self, name: str, parallelism: str, data_type: str | None, shape, args: argparse.Namespace, seed: int):
        self._parallel = parallelism == "model"
        self._data_type = data_type
        self._layers = tf.keras.layers
        tf.keras.utils.set_random_seed(seed)  # the same weights for every method
        self._seed = 100 * (seed * hvd.size() + hvd.rank())  # other units are dropped on every rank
        layers = [self._layers.Input(shape)]
        layers += {"dense": self._dense, "conv": self._conv, "alexnet": self._alexnet}[name](shape, args)
        self.model = tf.keras.Sequential(layers)

    def _hidden(self, units: int):
        if not self._parallel:
            return self._layers.Dense(units, activation="relu")
        return eightbit_keras.ModelParallelDense(
            units, activation="relu", forward=self._data_type, backward=self._data_type
        )

    def _dropout(self, rate: float):
        self._seed += 1
        return self._layers.Dropout(rate, seed=self._seed)

    def _dense(self, shape, args):
        hidden = [[self._hidden(args.hidden), self._dropout(0.3)] for _ in range(2)]
        flat = [self._layers.Flatten()] if len(shape) > 1 else []
        return [*flat, self._dropout(0.2), *hidden[0], *hidden[1], self._layers.Dense(10)]

    def _conv(self, shape, args):
        """Two 5x5 convolutions, pooled 3x3 with stride 2, then two of 3x3 in place of the paper's local layers."""
        layers = []
        for channels, size, pooled in ((64, 5, True), (64, 5, True), (64, 3, False), (32, 3, False)):
            channels = max(8, channels * args.hidden // 1024)
            layers.append(self._layers.Conv2D(channels, size, padding="same", activation="relu"))
            if pooled:
                layers.append(self._layers.MaxPooling2D(3, 2, padding="same"))
        dense = [self._hidden(args.hidden)] if self._parallel else []
        return [*layers, self._layers.Flatten(), *dense, self._layers.Dense(10)]

    def _alexnet(self, shape, args):
        """One tower (Krizhevsky 2014): 64, 192, 384, 256, 256 channels, then 4096, 4096, 1000 units."""
        conv, pool = self._layers.Conv2D, self._layers.MaxPooling2D
        layers = [conv(64, 11, 4, padding="same", activation="relu"), pool(3, 2)]
        layers += [conv(192, 5, padding="same", activation="relu"), pool(3, 2)]
        layers += [conv(384, 3, padding="same", activation="relu"), conv(256, 3, padding="same", activation="relu")]
        layers += [conv(256, 3, padding="same", activation="relu"), pool(3, 2), self._layers.Flatten()]
        units = 4 * args.hidden
        layers += [self._hidden(units), self._dropout(0.5), self._hidden(units), self._dropout(0.5)]
        return [*layers, self._layers.Dense(1000)]


class Step:
    """A training step, and the same with the error of the mean measured."""

    def __init__(self, net: Net, method: str, parallelism: str, optimizer, seed: int):
        self._model, self._optimizer = net.model, optimizer
        self._loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._variables = [v if isinstance(v, tf.Variable) else v.value for v in net.model.trainable_variables]
        local = [w for layer in eightbit_keras.local_layers(net.model) for w in layer.trainable_weights]
        local = {(w if isinstance(w, tf.Variable) else w.value).ref() for w in local}
        self._local = [v.ref() in local for v in self._variables]
        # In model parallelism the other gradients are few, and left alone: what is compared are the activations.
        if parallelism == "data" and max(v.shape.num_elements() for v in self._variables) < MIN_ELEMENTS:
            raise ValueError(f"no gradient has {MIN_ELEMENTS} elements, so no method would code any: a larger --hidden")
        make = METHODS[method if parallelism == "data" else "float32"]
        own = seed * hvd.size() + hvd.rank()
        self._compressions = [make(v.shape, 1000 * own + i) for i, v in enumerate(self._variables)]
        self.train = tf.function(self._train)
        self.train_measured = tf.function(self._train_measured)

    def _gradients(self, batch, labels):
        with tf.GradientTape() as tape:
            loss = self._loss(labels, self._model(batch, training=True))
        return loss, tape.gradient(loss, self._variables)

    def _reduce(self, gradients, exact: bool):
        # Horovod matches collectives by name; hvd.allreduce makes it from the tensor's.
        kind = "exact" if exact else "gradient"
        reduced = []
        for i, (gradient, compression) in enumerate(zip(gradients, self._compressions)):
            if self._local[i]:
                reduced.append(gradient / hvd.size())  # of the whole batch already
                continue
            gradient = tf.identity(gradient, name=f"{kind}_{i}")
            reduced.append(hvd.allreduce(gradient, compression=hvd.Compression.none if exact else compression))
        return reduced

    def _train(self, batch, labels):
        loss, gradients = self._gradients(batch, labels)
        self._optimizer.apply_gradients(zip(self._reduce(gradients, False), self._model.trainable_variables))
        return loss

    def _train_measured(self, batch, labels):
        """The same; and the error of the mean gradient, relative to it in the L2 norm."""
        loss, gradients = self._gradients(batch, labels)
        reduced, exact = self._reduce(gradients, False), self._reduce(gradients, True)
        error = tf.linalg.global_norm([a - b for a, b in zip(reduced, exact)]) / tf.linalg.global_norm(exact)
        self._optimizer.apply_gradients(zip(reduced, self._model.trainable_variables))
        return loss, error


def train(args: argparse.Namespace, method: str, data: images.Images | None, seed: int) -> dict:
    """Trains one net from scratch and returns what was measured."""
    shape, net_data = net_input(args, data, seed)
    net = Net(args.model, args.parallelism, DATA_TYPES.get(method), shape, args, seed)
    steps = len(net_data.train_images) // (args.batch_size * hvd.size())
    total = args.epochs * steps
    optimizer = tf.keras.optimizers.RMSprop(tf.keras.optimizers.schedules.CosineDecay(args.lr, total))
    optimizer.build(net.model.trainable_variables)
    step = Step(net, method, args.parallelism, optimizer, seed)

    seconds, errors, sent, losses, shown = [], [], [], [], time.monotonic()
    for epoch in range(args.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(net_data.train_images))
        mine = order[hvd.rank() :: hvd.size()]  # ranks see different images, every epoch in another order
        counted, before = 0, transmitted_bytes()
        for i in range(steps):
            batch = mine[i * args.batch_size : (i + 1) * args.batch_size]
            batch = (
                tf.constant(net_data.train_images[batch].reshape(-1, *shape)),
                tf.constant(net_data.train_labels[batch]),
            )
            start = time.perf_counter()
            if args.parallelism == "data" and i % args.measure_every == args.measure_every - 1:
                sent.append((transmitted_bytes() - before) / (hvd.local_size() * counted) if counted else math.nan)
                loss, error = step.train_measured(*batch)
                errors.append(float(error))
                counted, before = 0, transmitted_bytes()
            else:
                loss = float(step.train(*batch))
                seconds.append(time.perf_counter() - start)
                counted += 1
            losses.append(float(loss))
            if hvd.rank() == 0 and time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"  epoch {epoch + 1}/{args.epochs}, step {i + 1}/{steps}, loss {losses[-1]:.3f}", flush=True)
        if counted:
            sent.append((transmitted_bytes() - before) / (hvd.local_size() * counted))
    return {
        "test_error": test_error(net.model, net_data, shape) if args.model != "alexnet" else None,
        "train_loss": float(np.mean(losses[-20:])),
        "bytes": float(np.nanmin(sent)),  # other programs' traffic is counted too
        "seconds": float(np.median(seconds[WARM_UP:] or seconds)),
        "error_of_mean": float(np.mean(errors)) if errors else None,
        "codec_ms": codec_ms(method) if args.parallelism == "data" else None,
        "parameters": int(net.model.count_params()),
        "steps": total,
    }


def net_input(args, data: images.Images | None, seed: int):
    """The shape of a sample, and images."""
    if args.model == "alexnet":  # synthetic: noise, for speed and bytes only
        rng, size = np.random.default_rng(seed), args.steps * args.batch_size * hvd.size()
        pixels = rng.random((size, args.side * args.side * 3), np.float32)
        labels = rng.integers(0, 1000, size)
        return (args.side, args.side, 3), images.Images("noise", pixels, labels, pixels[:0], labels[:0], 1)
    width = data.train_images.shape[1]
    channels = 3 if width == 3072 else 1
    side = math.isqrt(width // channels)
    return ((width,) if args.model == "dense" else (side, side, channels)), data


def load(args) -> images.Images | None:
    """The images: CIFAR-10 where --data names its folder (the Python version), else those of images.py."""
    if args.model == "alexnet":
        return None
    folder = pathlib.Path(args.data or "")
    if not args.data or not (folder / "test_batch").exists():
        data = images.load(args.data)
    else:
        import pickle

        parts = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        batches = [pickle.loads((folder / part).read_bytes(), encoding="bytes") for part in parts]
        x = [b[b"data"].reshape(-1, 3, 1024).transpose(0, 2, 1).reshape(-1, 3072) / np.float32(255) for b in batches]
        y = [np.array(b[b"labels"], np.int64) for b in batches]
        data = images.Images(str(folder), np.concatenate(x[:5]), np.concatenate(y[:5]), x[5], y[5], epochs=10)
    keep = args.train_images or len(data.train_images)
    return data._replace(train_images=data.train_images[:keep], train_labels=data.train_labels[:keep])


def test_error(model, data: images.Images, shape) -> float:
    """In percent, over all test images."""
    wrong = 0
    for i in range(0, len(data.test_labels), TEST_BATCH * hvd.size()):  # all ranks take part in every batch
        own = slice(i + hvd.rank(), i + TEST_BATCH * hvd.size(), hvd.size())
        logits = model(tf.constant(data.test_images[own].reshape(-1, *shape)), training=False)
        wrong += np.sum(np.argmax(logits, axis=1) != data.test_labels[own])
    wrong = hvd.allreduce(tf.constant(float(wrong)), op=hvd.Sum, name="wrong")
    return 100 * float(wrong) / len(data.test_labels)


def codec_ms(method: str) -> float | None:
    """Milliseconds to code a gradient of 1024 x 1024 and decode it, nothing sent: best of 10."""
    compression = METHODS[method](tf.TensorShape([1024, 1024]), 0)
    if method == "float32" or isinstance(compression, ErrorFeedback):  # the latter has no codec apart from its exchange
        return None
    if isinstance(compression, eightbit.EightBitCompressor):
        kind = compression.data_type, compression.block_size

        def both(x):
            return eightbit.dequantize(*eightbit.quantize(x, *kind), *kind)
    elif hasattr(compression, "encode"):

        def both(x):
            return compression.decode(compression.encode(x))
    else:

        def both(x):
            return compression.decompress(*compression.compress(x))

    both, x, times = tf.function(both), tf.random.stateless_normal([1024, 1024], [1, 2]), []
    for _ in range(11):
        start = time.perf_counter()
        both(x).numpy()
        times.append(time.perf_counter() - start)
    return 1000 * min(times[1:])


def transmitted_bytes() -> float:
    """Bytes this host has sent by the time all ranks are here, over all interfaces; NaN without Linux's counters."""
    hvd.allreduce(tf.zeros([]), name="barrier")
    try:
        lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:
        return math.nan
    return float(sum(int(line.split(":")[1].split()[8]) for line in lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--out", type=pathlib.Path, required=True, help="folder of the results, made if it is not there")
    option("--model", choices=("dense", "conv", "alexnet"), default="dense", help="%(default)s by default")
    option("--parallelism", choices=("data", "model"), default="data", help="%(default)s by default")
    option("--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"of {', '.join(METHODS)}; all by default")
    option("--data", help="a folder: IDX files, or CIFAR-10's Python version; by default what this machine has")
    option("--train-images", type=int, help="use only so many of the training images")
    option("--seeds", type=int, default=5, help="%(default)s by default")
    option("--epochs", type=int, default=3, help="%(default)s by default")
    option("--batch-size", type=int, default=128, help="images per rank and step, %(default)s by default")
    option("--hidden", type=int, default=1024, help="units of a hidden layer, %(default)s by default")
    option("--lr", type=float, default=0.001, help="learning rate at the start, %(default)s by default")
    option("--measure-every", type=int, default=25, help="steps from one measured error to the next, %(default)s")
    option("--steps", type=int, default=6, help="alexnet: steps, %(default)s by default")
    option("--side", type=int, default=224, help="alexnet: pixels of an image's side, %(default)s by default")
    args = parser.parse_args()
    for name in ("seeds", "epochs", "batch_size", "hidden", "measure_every", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: {getattr(args, name)} is too small: at least 1")
    args.methods = args.methods or [m for m in METHODS if args.parallelism == "data" or m in DATA_TYPES]
    unsuitable = [m for m in args.methods if args.parallelism == "model" and m not in DATA_TYPES]
    if unsuitable:
        parser.error(f"argument --methods: {unsuitable[0]} does not code activations: use {', '.join(DATA_TYPES)}")
    if args.model == "alexnet":
        args.epochs = 1
    return args


def main() -> None:
    hvd.init()
    tf.config.threading.set_inter_op_parallelism_threads(4)
    args = parse_arguments()
    data = load(args)
    args.out.mkdir(parents=True, exist_ok=True)
    todo = [(seed, method) for seed in range(args.seeds) for method in args.methods]
    settings = {k: getattr(args, k) for k in ("epochs", "batch_size", "hidden", "lr", "train_images", "side")}
    for number, (seed, method) in enumerate(todo):
        path = args.out / f"{args.model}-{args.parallelism}-{hvd.size()}-{method}-{seed}.json"
        done = hvd.broadcast_object(path.exists(), root_rank=0)  # one rank looks, so that all do the same
        if hvd.rank() == 0:
            print(f"[{number + 1}/{len(todo)}] {path.name}{': done before' if done else ''}", flush=True)
        if done:
            continue
        start = time.monotonic()
        found = train(args, method, data, seed)
        if hvd.rank() == 0:
            what = {"net": args.model, "parallelism": args.parallelism, "ranks": hvd.size(), "method": method}
            facts = {**what, "seed": seed, "data": data.name if data else "noise", "settings": settings, **found}
            part = path.with_suffix(".part")
            part.write_text(json.dumps(facts, indent=1) + "\n")
            part.rename(path)  # a file that is there is whole
            error = "" if found["test_error"] is None else f"test error {found['test_error']:.2f}%, "
            print(f"  {error}{found['bytes']:,.0f} bytes a step, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
