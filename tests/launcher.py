"""Starts a command on several ranks through Horovod's own launchers, with a time limit."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import shutil
import signal
import subprocess
import sys

BIN = pathlib.Path(sys.executable).parent


@functools.cache
def _own_network() -> list[str]:
    """Prefix for a job to have a loopback interface of its own, so that only its bytes count; empty if not allowed."""
    for unshare in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        prefix = [*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return []


def keras_2() -> dict[str, str]:
    """The environment in which tf.keras is Keras 2: it is in TensorFlow 2.15, later ones have it as tf_keras."""
    version = next(filter(None, map(_version_of, ("tensorflow-cpu", "tensorflow"))), "")
    return {} if version.startswith("2.15.") else {"TF_USE_LEGACY_KERAS": "1"}


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def backends() -> list[str]:
    """The transports to test: Gloo always, MPI where Horovod was built with it and mpirun is there."""
    built = subprocess.run(
        [sys.executable, "-c", "import horovod.tensorflow as hvd; print(hvd.mpi_built())"],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    has_mpi = built.returncode == 0 and "True" in built.stdout and shutil.which("mpirun") is not None
    return ["gloo", "mpi"] if has_mpi else ["gloo"]


def launch(
    ranks: int,
    command: list[str],
    *,
    backend: str = "gloo",
    timeout: float = 300,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs `command` (after the Python interpreter) on `ranks` ranks of this host and returns when all have ended.

    Args:
        ranks: number of processes.
        command: arguments of the Python interpreter, such as ["-m", "pytest", ...].
        backend: "gloo" or "mpi" (Open MPI over TCP, so that bytes can be counted).
        timeout: seconds after which every process is killed.
        env: variables added to the environment.

    Returns:
        The completed process; output of all ranks in `stdout`, errors included.

    Raises:
        TimeoutError: when the time limit passed, with the output so far: a deadlock fails the test.
    """
    if backend == "gloo":
        launcher = [str(BIN / "horovodrun"), "-np", str(ranks), "--gloo"]
    else:
        launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
        launcher += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "pml", "ob1"]
        launcher += ["--tag-output", "-x", "PATH"]
    process = subprocess.Popen(
        [*_own_network(), *launcher, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PATH": f"{BIN}:{os.environ['PATH']}", **(env or {})},
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise TimeoutError(f"{ranks} ranks over {backend} did not end within {timeout} s:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)
