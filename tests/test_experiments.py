"""examples/experiments in small: every net and method runs, finished runs are skipped, the report adds up."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from launcher import launch

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "experiments"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import report

    return report


def run(out: pathlib.Path, *arguments: str) -> str:
    small = ["--data", "digits", "--epochs", "1", "--batch-size", "64", "--measure-every", "5", "--seeds", "1"]
    done = launch(2, [str(FOLDER / "run.py"), "--out", str(out), *small, *arguments], timeout=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_all_methods_in_small(tmp_path):
    pytest.importorskip("sklearn")
    run(tmp_path, "--hidden", "256")
    run(tmp_path, "--hidden", "256", "--parallelism", "model", "--methods", "float32", "linear")
    run(tmp_path, "--hidden", "512", "--model", "conv", "--methods", "float32", "one_bit")
    again = run(tmp_path, "--hidden", "512", "--model", "conv", "--methods", "float32", "one_bit")
    assert again.count("done before") == 2

    summary = tmp_path / "summary.json"
    command = [sys.executable, str(FOLDER / "report.py"), str(tmp_path), "--json", str(summary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    dense = next(e for e in json.loads(summary.read_text()) if (e["net"], e["parallelism"]) == ("dense", "data"))
    assert len(dense["rows"]) == 11
    error = {row["method"]: row["error_of_mean"] for row in dense["rows"]}
    assert error["float32"] == 0 < error["fp16"] < error["dynamic_tree"] < 0.03 < error["one_bit"] < 2
    assert 0 < error["stochastic"] < 0.03


def test_statistics(report):
    assert report.beyond(0.71, 4, 20) == pytest.approx(0.594637, abs=1e-5)  # scipy.stats.f.sf
    assert report.half_width(np.arange(5.0)) == pytest.approx(3.255587, abs=1e-5)  # scipy.stats.t
    groups = [np.array([1.0, 2, 3]), np.array([2.0, 3, 4])]
    assert report.f_test(groups) == {"F": pytest.approx(1.5), "degrees": [1, 4], "p": pytest.approx(0.28786, abs=1e-4)}
