"""These tests run UNDER several ranks, each of which runs all of them in the same order (see test_distributed.py)."""

import os

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

PROCESS_SETS = [hvd.ProcessSet([0, 1])]


def pytest_configure(config):
    hvd.init(process_sets=PROCESS_SETS if hvd_size_from_environment() > 2 else None)


def pytest_sessionfinish(session, exitstatus):
    """No rank leaves before all are done: Horovod ends with the first, also for those that still work."""
    if exitstatus == 0:
        hvd.allreduce(tf.constant(0.0), name="all_tests_done")


def hvd_size_from_environment() -> int:
    return int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)


@pytest.fixture
def pair() -> hvd.ProcessSet:
    """The process set of ranks 0 and 1, where there are more."""
    if hvd.size() < 3:
        pytest.skip("needs a rank outside of the process set")
    return PROCESS_SETS[0]
