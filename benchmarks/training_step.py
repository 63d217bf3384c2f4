"""Times training steps of a multilayer perceptron; run under horovodrun by predicted_vs_measured.py.

    horovodrun -np 2 --gloo python benchmarks/training_step.py OUT.json

Writes {"widths": of the layers, "compute": seconds of a step without Horovod, "float32": ..., "fp16": ..., "flat": ..}:
the least of several steps.
"""

import json
import pathlib
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_eightbit as eightbit
from hvd_eightbit.speedup import measure

WIDTHS = (1024, 2048, 2048, 10)
BATCH = 64


def step_function(compression):
    """A training step; without Horovod where `compression` is None."""
    tf.random.set_seed(1)
    shapes = list(zip(WIDTHS, WIDTHS[1:]))
    weights = [tf.Variable(tf.random.normal(s, stddev=s[0] ** -0.5)) for s in shapes]
    biases = [tf.Variable(tf.zeros(s[1])) for s in shapes]
    inputs, labels = tf.random.normal([BATCH, WIDTHS[0]]), tf.zeros([BATCH], tf.int32)

    @tf.function
    def step():
        tape = tf.GradientTape()
        with tape:
            x = inputs
            for i, (w, b) in enumerate(zip(weights, biases)):
                x = x @ w + b
                x = tf.nn.relu(x) if i < len(shapes) - 1 else x
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x))
        if compression is not None:
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        variables = weights + biases
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.01 * gradient)
        return loss

    return step


def main(out: str) -> None:
    """Measures on all ranks; rank 0 writes."""
    hvd.init()
    compressions = {
        "compute": None,
        "float32": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "flat": eightbit.Compression.dynamic_tree,
    }
    times = {"widths": WIDTHS}
    for name, compression in compressions.items():
        step = step_function(compression)
        step()  # traces
        times[name] = measure.seconds(step)
    if hvd.rank() == 0:
        pathlib.Path(out).write_text(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1])
