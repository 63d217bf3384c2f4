"""Data-parallel training with 8-bit gradients: one argument added to an ordinary Horovod program.

    horovodrun -np 2 --gloo python examples/train.py --compression dynamic_tree
    horovodrun -np 2 --gloo python examples/train.py --compare

The net is that of the paper's section 4.1 (Dettmers 2016): 784-1024-1024-10, ReLU, dropout .2/.3/.3, RMSProp.
The training loop is written out, with hvd.DistributedGradientTape, to work with Keras 2 and 3 alike: under model.fit of
Keras 3, Horovod's DistributedOptimizer averages nothing, without a word.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pathlib
import sys
import time

import horovod.tensorflow as hvd
import images
import numpy as np
import tensorflow as tf

import hvd_eightbit as eightbit

COMPRESSIONS = {"none": 4, "fp16": 2, "dynamic_tree": 1, "linear": 1, "mantissa": 1, "static_tree": 1}  # bytes each
WARM_UP = 3  # steps left out of the timing: the first one traces the graph


def compressor(name: str, args: argparse.Namespace):
    """What to pass as Horovod's `compression=`."""
    if name in ("none", "fp16"):
        return getattr(hvd.Compression, name)
    return eightbit.EightBitCompressor(name, block_size=args.block_size, min_elements=args.min_elements)


def train(name: str, compression, data: images.Images, args: argparse.Namespace, seed: int) -> dict:
    """Trains one net from scratch and returns what was measured."""
    tf.keras.utils.set_random_seed(seed)  # the same weights for every compression
    own_seed = 3 * (seed * hvd.size() + hvd.rank())  # other units are dropped on every rank
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((data.train_images.shape[1],)),
            tf.keras.layers.Dropout(0.2, seed=own_seed),
            tf.keras.layers.Dense(args.hidden, activation="relu"),
            tf.keras.layers.Dropout(0.3, seed=own_seed + 1),
            tf.keras.layers.Dense(args.hidden, activation="relu"),
            tf.keras.layers.Dropout(0.3, seed=own_seed + 2),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = len(data.train_images) // (args.batch_size * hvd.size())  # of an epoch, the same number on every rank
    total = args.epochs * steps
    optimizer = tf.keras.optimizers.RMSprop(tf.keras.optimizers.schedules.CosineDecay(args.lr, total))
    optimizer.build(model.trainable_variables)

    hvd.broadcast_variables(tf_variables(model.weights), root_rank=0)  # Horovod: start from equal weights

    @tf.function
    def train_step(batch, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(batch, training=True))
        # Horovod: average the gradients over all ranks. The argument `compression` is all that 8 bits take.
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, tf_variables(model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    terminal = sys.stdout.isatty()
    bar = tf.keras.utils.Progbar(total, verbose=0 if hvd.rank() else 1 if terminal else 2)
    seconds, sent = [], []
    for epoch in range(args.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(data.train_images))
        mine = order[hvd.rank() :: hvd.size()]  # ranks see different images, every epoch in another order
        sent_before = transmitted_bytes()
        for step in range(steps):
            batch = mine[step * args.batch_size : (step + 1) * args.batch_size]
            start = time.perf_counter()
            loss = float(train_step(data.train_images[batch], data.train_labels[batch]))
            seconds.append(time.perf_counter() - start)
            done = len(seconds)
            line = done == total or (not terminal and done % math.ceil(total / 10) == 0)  # a log gets ten lines
            bar.update(done, [("loss", loss)], finalize=line)
        sent.append((transmitted_bytes() - sent_before) / (hvd.local_size() * steps))

    logits = model(data.test_images[hvd.rank() :: hvd.size()], training=False)
    wrong = tf.constant(np.sum(np.argmax(logits, axis=1) != data.test_labels[hvd.rank() :: hvd.size()]), tf.float64)
    # Other programs' traffic is counted too, so the epoch with the least is the one to believe.
    least = float(hvd.allreduce(tf.constant(min(sent), tf.float64), op=hvd.Average, name="sent"))
    return {
        "compression": name,
        "seed": seed,
        "test_error": 100 * float(hvd.allreduce(wrong, op=hvd.Sum, name="wrong")) / len(data.test_labels),
        "seconds": float(np.median(seconds[WARM_UP:] or seconds)),
        "bytes": least if least > plausible_bytes(COMPRESSIONS[name] * model.count_params()) else None,
        "ranks_equal": equal_on_all_ranks(model.get_weights()),
        "parameters": model.count_params(),
    }


def tf_variables(variables) -> list[tf.Variable]:
    """The variables as TensorFlow's own: Horovod 0.28 does not know the class that Keras 3 wraps around them."""
    return [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]


def transmitted_bytes() -> float:
    """Bytes this host has sent by the time all ranks are here, over all interfaces; NaN without Linux's counters."""
    hvd.allreduce(tf.zeros([]), name="barrier")
    try:
        lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:
        return math.nan
    return float(sum(int(line.split(":")[1].split()[8]) for line in lines))


def plausible_bytes(size: int) -> float:
    """Half of what a rank must send to allreduce `size` bytes. Fewer counted: they went by shared memory or RDMA."""
    if hvd.size() == 1:
        return math.inf  # nothing is to be sent
    peers, sharing = (hvd.cross_size(), hvd.local_size()) if hvd.cross_size() > 1 else (hvd.size(), 1)
    return (peers - 1) / peers * size / sharing


def equal_on_all_ranks(weights: list[np.ndarray]) -> bool:
    """Whether the weights have the same bits everywhere."""
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).digest()
    digests = hvd.allgather(tf.constant([list(digest)], tf.uint8), name="digest").numpy()
    return bool((digests == digests[0]).all())


def summarize(runs: list[dict]) -> list[dict]:
    """One row per compression: mean and spread over the seeds, and bytes against those of `none`."""
    rows = {}
    for name in dict.fromkeys(run["compression"] for run in runs):
        mine = [run for run in runs if run["compression"] == name]
        errors = [run["test_error"] for run in mine]
        rows[name] = {
            "compression": name,
            "test_error": float(np.mean(errors)),
            "spread": float(np.std(errors, ddof=1)) if len(errors) > 1 else None,
            "seconds": float(np.median([run["seconds"] for run in mine])),
            "bytes": min((run["bytes"] for run in mine if run["bytes"]), default=None),
            "ranks_equal": all(run["ranks_equal"] for run in mine),
        }
    # Without a run of `none`: what float32 needs by arithmetic, a reduce-scatter and an allgather over a ring.
    float32 = rows.get("none", {}).get("bytes") or 8 * (hvd.size() - 1) / hvd.size() * runs[0]["parameters"]
    return [row | {"ratio": row["bytes"] and row["bytes"] / float32} for row in rows.values()]


def print_table(rows: list[dict]) -> None:
    print(f"\n{'compression':<14}{'test error %':>16}{'s a step':>10}{'bytes a step':>15}{'of none':>9}  ranks equal")
    for row in rows:
        error = f"{row['test_error']:.2f}" + ("" if row["spread"] is None else f" +- {row['spread']:.2f}")
        sent, ratio = (f"{row['bytes']:,.0f}", f"{row['ratio']:.3f}") if row["bytes"] else ("n/a", "n/a")
        equal = "yes" if row["ranks_equal"] else "NO"
        print(f"{row['compression']:<14}{error:>16}{row['seconds']:>10.4f}{sent:>15}{ratio:>9}  {equal}")
    print("Bytes a step: sent by a rank, as the network interfaces of its host counted them, headers and all.")
    if hvd.size() > 1 and not all(row["bytes"] for row in rows):
        print("n/a: no such counters here, or the bytes passed them by (shared memory, NVLink, RDMA).")


def parse_arguments() -> tuple[argparse.Namespace, images.Images, dict]:
    """The arguments, the data and the compressors, by name; ends the program with a message where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--compression", choices=COMPRESSIONS, default="dynamic_tree", help="dynamic_tree by default")
    what.add_argument("--compare", choices=COMPRESSIONS, nargs="*", metavar="NAME", help="several in turn, or all")
    option("--epochs", type=positive, help="10 by default; for the digits, which are few, 50")
    option("--batch-size", type=positive, default=128, help="images per rank and step, %(default)s by default")
    option("--lr", type=float, default=0.001, help="learning rate at the start, %(default)s by default")
    option("--hidden", type=positive, default=1024, help="units of a hidden layer, %(default)s by default")
    option("--seed", type=natural, default=0, help="of weights, order and dropout, %(default)s by default")
    option("--seeds", type=positive, default=1, help="train with so many seeds, from --seed on; %(default)s by default")
    option("--min-elements", type=int, default=16384, help="gradients below stay float32, %(default)s by default")
    option("--block-size", type=int, default=2048, help="elements that share a scale, %(default)s by default")
    option("--data", help="'digits', or a folder with Fashion-MNIST's IDX files; by default what this machine has")
    option("--json", type=pathlib.Path, metavar="FILE", help="write the results there as well")
    args = parser.parse_args()
    names = [args.compression] if args.compare is None else args.compare or list(COMPRESSIONS)
    try:
        compressors = {name: compressor(name, args) for name in names}
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    try:
        data = images.load(args.data)
    except (ImportError, OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    if args.batch_size * hvd.size() > len(data.train_images):
        parser.error(
            f"argument --batch-size: {args.batch_size} on {hvd.size()} ranks is more than the "
            f"{len(data.train_images)} training images"
        )
    if not args.lr > 0:
        parser.error(f"argument --lr: {args.lr} is not above 0")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"argument --json: the folder {str(args.json.parent)!r} does not exist")
    args.epochs = args.epochs or data.epochs
    return args, data, compressors


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def positive(text: str) -> int:
    if natural(text) == 0:
        raise argparse.ArgumentTypeError("0 is too small: at least 1")
    return int(text)


def main() -> None:
    hvd.init()  # Horovod: find the other ranks
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    args, data, compressors = parse_arguments()
    chief = hvd.rank() == 0
    if chief:
        print(f"Data: {data.name}; {len(data.train_images):,} to train, {len(data.test_images):,} to test.")
        print(f"{hvd.size()} ranks, {args.batch_size} images each a step.", flush=True)
        if hvd.size() == 1:
            print("WARNING: with one rank nothing is compressed or sent; try horovodrun -np 2 --gloo python ...")

    runs = []
    for seed in range(args.seed, args.seed + args.seeds):
        for name, compression in compressors.items():
            if chief:
                print(f"\n{name}, seed {seed}", flush=True)
            runs.append(train(name, compression, data, args, seed))
    table = summarize(runs)
    if chief:
        print_table(table)
        if args.json:
            args.json.write_text(json.dumps({"data": data.name, "ranks": hvd.size(), "runs": runs, "table": table}))
    if not all(row["ranks_equal"] for row in table):
        sys.exit("ERROR: the ranks ended with different weights: they did not train one model")


if __name__ == "__main__":
    main()
