"""Data-parallel training with Keras 3 on Horovod, whose own Keras classes do not average gradients there.

    import hvd_eightbit.keras as eightbit_keras
    optimizer = eightbit_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=...)

With Keras 2 the same names hand over to Horovod, or do the same thing where Horovod's do not work.
"""

from hvd_eightbit.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    RankAgreement,
)
from hvd_eightbit.keras.layers import EightBitBoundary, ExchangeFeatures, GatherBatch, ModelParallelDense
from hvd_eightbit.keras.local import (
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
    gather_weights,
    local_layers,
    scatter_weights,
)
from hvd_eightbit.keras.optimizers import DistributedOptimizer, error_feedback_state

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedOptimizer",
    "EightBitBoundary",
    "ExchangeFeatures",
    "GatherBatch",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelParallelDense",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "RankAgreement",
    "error_feedback_state",
    "gather_weights",
    "local_layers",
    "scatter_weights",
]
