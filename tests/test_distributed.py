"""Runs the tests of tests/distributed under 2, 3 and 4 ranks, over every transport that Horovod has here."""

import pathlib

import pytest
from launcher import backends, keras_2, launch

FILES = pathlib.Path(__file__).parent / "distributed"


def run(file: str, backend: str, ranks: int, env: dict[str, str] | None = None) -> None:
    """Runs one file of tests/distributed on that many ranks; all must pass on each."""
    job = launch(
        ranks,
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(FILES), str(FILES / file)],
        backend=backend,
        timeout=600,
        env={"EIGHTBIT_TEST_BACKEND": backend, "EIGHTBIT_TEST_RANKS": str(ranks), **(env or {})},
    )
    assert job.returncode == 0, job.stdout
    assert job.stdout.count(" passed") == ranks, job.stdout


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("backend", backends())
def test_allreduce(backend, ranks):
    run("test_allreduce.py", backend, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_with_keras_2(ranks):
    run("test_training.py", "gloo", ranks, keras_2())


@pytest.mark.parametrize("ranks", [2, 3])
def test_error_feedback(ranks):
    run("test_feedback.py", "gloo", ranks)
