"""Runs the tests of tests/distributed under 2, 3 and 4 ranks, over every transport that Horovod has here."""

import pathlib

import pytest
from launcher import backends, launch

FILES = pathlib.Path(__file__).parent / "distributed"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("file", ["test_allreduce.py"])
def test_on_ranks(file, backend, ranks):
    job = launch(
        ranks,
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(FILES), str(FILES / file)],
        backend=backend,
        timeout=240,
        env={"EIGHTBIT_TEST_BACKEND": backend, "EIGHTBIT_TEST_RANKS": str(ranks)},
    )
    assert job.returncode == 0, job.stdout
    assert job.stdout.count(" passed") == ranks, job.stdout
