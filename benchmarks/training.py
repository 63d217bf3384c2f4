"""Training steps of networks of AlexNet's and ResNet-50's size between hosts: float32, float16, 8 bits and its groups.

    python benchmarks/training.py [--models alexnet resnet50] [--ranks 2] [--gbit 1] [--json FILE]

Every rank is a host of its own, as in allreduce.py. The networks have all their parameters; their images are few and
small, since the steps are computed by CPUs. `compute` is a step without Horovod. Everything takes turns in one run;
seconds are medians over the rounds. `8 bits, g` is with num_groups=g of hvd.DistributedGradientTape.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

import namespaces
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def alexnet():
    """Krizhevsky 2012 in one tower: 62 million parameters."""
    from tensorflow.keras import Sequential, layers

    return Sequential(
        [
            layers.Input((227, 227, 3)),
            layers.Conv2D(96, 11, 4, activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(256, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(384, 3, padding="same", activation="relu"),
            layers.Conv2D(384, 3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Flatten(),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(1000),
        ]
    )


def resnet50():
    """He 2015: 25.6 million parameters in 161 trainable tensors."""
    from tensorflow.keras.applications import ResNet50

    return ResNet50(weights=None, input_shape=(64, 64, 3), classes=1000, classifier_activation=None)


MODELS = {"alexnet": alexnet, "resnet50": resnet50}


def worker(args: argparse.Namespace) -> None:
    """On each rank; rank 0 writes."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd_eightbit as eightbit

    hvd.init()
    ours = eightbit.Compression.dynamic_tree
    kinds = {"compute": None, "float32": (hvd.Compression.none, 0), "float16": (hvd.Compression.fp16, 0)}
    kinds |= {f"8 bits, {groups or 'no groups'}": (ours, groups) for groups in args.groups}
    result = {}
    for model_name in args.models:
        tf.keras.utils.set_random_seed(0)
        model = MODELS[model_name]()
        images = tf.random.stateless_normal([args.batch_size, *model.input_shape[1:]], [hvd.rank(), 0])
        labels = tf.zeros([args.batch_size], tf.int32)
        variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]

        def make_step(kind, model=model, images=images, labels=labels, variables=variables):
            @tf.function
            def step():
                with tf.GradientTape() as tape:
                    logits = model(images, training=True)
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
                if kind is not None:
                    tape = hvd.DistributedGradientTape(tape, compression=kind[0], num_groups=kind[1])
                for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                    variable.assign_sub(1e-6 * gradient)

            return step

        steps = {name: make_step(kind) for name, kind in kinds.items()}
        seconds, sent = {name: [] for name in steps}, {}
        for i in range(args.rounds + 1):  # the first traces
            for name, run in steps.items():
                hvd.allreduce(tf.zeros([]), name="barrier")
                before, start = namespaces.bytes_through_card(), time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
                hvd.allreduce(tf.zeros([]), name="barrier")
                sent[name] = namespaces.bytes_through_card() - before
                if i == 0:
                    seconds[name].clear()
        result[model_name] = {"parameters": model.count_params(), "seconds": seconds, "bytes": sent}
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(result))


def measure(ranks: int, gbit: float, args: argparse.Namespace) -> list[dict]:
    """A row for each model on one network."""
    with tempfile.TemporaryDirectory() as folder, namespaces.hosts(ranks, gbit or None) as hosts:
        file = pathlib.Path(folder, "result.json")
        command = [__file__, "--worker", f"--json={file}", f"--rounds={args.rounds}", f"--batch-size={args.batch_size}"]
        command += ["--models", *args.models, "--groups", *map(str, args.groups)]
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        done = hosts.run([1] * ranks, command, backend=args.backend, timeout=args.timeout, env={"PYTHONPATH": path})
        if done.returncode:
            sys.exit(f"{ranks} ranks failed:\n{done.stdout}")
        result = json.loads(file.read_text())
    rows = []
    for model, figures in result.items():
        seconds = {name: float(np.median(of_rounds)) for name, of_rounds in figures.pop("seconds").items()}
        rows.append({"model": model, "ranks": ranks, "gbit": gbit, "seconds": seconds, **figures})
        link = f"{gbit:g} Gbit/s" if gbit else "no limit"
        print(f"\n{model}, {figures['parameters']:,} parameters; {ranks} hosts of one rank, {args.backend}, {link}")
        print(f"{'':<20}{'seconds':>10}{'of float32':>12}{'MB sent':>10}")
        for name, median in seconds.items():
            of_float32 = median / seconds["float32"]
            print(f"{name:<20}{median:>10.3f}{of_float32:>12.2f}{figures['bytes'][name] / 1e6:>10.1f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="hosts, %(default)s by default")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1], help="0: no limit; %(default)s by default")
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="%(default)s by default")
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="gloo", help="%(default)s by default")
    parser.add_argument("--batch-size", type=int, default=2, help="images of a rank, %(default)s by default")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s by default")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a network, %(default)s by default")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    problem = namespaces.why_not()
    if problem:
        parser.error(problem)
    load = os.getloadavg()[0]
    rows = [row for ranks in args.ranks for gbit in args.gbit for row in measure(ranks, gbit, args)]
    if args.json:
        facts = {"cpus": os.cpu_count(), "load_before": load, "backend": args.backend, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
