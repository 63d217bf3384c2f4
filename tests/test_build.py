"""Building and setting up: what cannot work is refused with a message that says what to do, and nothing is lost."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import venv

import pytest
import setuptools
import tensorflow as tf

import hvd_eightbit

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, **variables) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )


@pytest.fixture
def sources(tmp_path):
    """A copy of what is built, so that a test builds nothing in the checkout."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("hvd_eightbit", "tf_ops"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"))
    return copy


def build(sources, python=sys.executable, **variables) -> subprocess.CompletedProcess:
    return run(
        "sh", "-c", 'cd "$0" && exec "$1" setup.py build_ext', sources, python, HVD_EIGHTBIT_CUDA="0", **variables
    )


def test_the_library_records_what_it_was_built_against():
    record = json.loads(pathlib.Path(hvd_eightbit.__file__).with_name("_build.json").read_text())
    assert set(record) == {"tensorflow", "compiler", "cuda"}
    assert record["tensorflow"] == tf.__version__


def test_without_tensorflow(sources, tmp_path):
    """As in pip's isolated build: setuptools comes by PYTHONPATH, and the environment has no TensorFlow."""
    venv.create(tmp_path / "empty", with_pip=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for package in pathlib.Path(setuptools.__file__).parents[1].glob("*"):
        if package.name.split("-")[0] in ("setuptools", "pkg_resources", "_distutils_hack", "wheel"):
            (tools / package.name).symlink_to(package)
    built = build(sources, tmp_path / "empty" / "bin" / "python", PYTHONPATH=str(tools))
    assert built.returncode != 0
    assert "No module named 'tensorflow'" in built.stdout
    assert "Install TensorFlow 2.15 to 2.18" in built.stdout and "--no-build-isolation" in built.stdout


def test_without_a_compiler(sources):
    built = build(sources, CXX="no-such-compiler")
    assert built.returncode != 0
    assert "'no-such-compiler' is not there: install Debian's g++, or set CXX" in built.stdout


def test_source_distribution_is_complete(sources):
    made = run("sh", "-c", 'cd "$0" && exec "$1" setup.py -q sdist', sources, sys.executable)
    assert made.returncode == 0, made.stdout
    (archive,) = (sources / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = {str(path.relative_to(ROOT)) for path in (ROOT / "tf_ops").iterdir() if path.is_file()}
    needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "hvd_eightbit").rglob("*.py")}
    assert needed | {"setup.py", "pyproject.toml", "LICENSE"} <= names


@pytest.mark.parametrize("target", ["test", "clean"])
def test_make_keeps_a_folder_that_it_did_not_make(tmp_path, target):
    """In a copy, with a Python that passes the checks but makes no environment: nothing is installed."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    precious, python = tmp_path / "precious", tmp_path / "python"
    precious.mkdir()
    (precious / "file").write_text("kept")
    python.write_text('#!/bin/sh\n[ "$1" != -m ]\n')
    python.chmod(0o755)
    made = run("make", "-C", tmp_path, target, f"VENV={precious}", f"PYTHON={python}", MAKEFLAGS="")
    assert made.returncode != 0
    assert "was not made by this Makefile" in made.stdout
    assert (precious / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "python, tensorflow, message",
    [
        ("no-such-python", "2.18", "MISSING: no-such-python: install Debian's python3"),
        ("old-python", "2.18", "a Python from 3.9 to 3.12, for TensorFlow 2.18"),
        ("old-python", "2.15", "a Python from 3.9 to 3.11, for TensorFlow 2.15"),
    ],
)
def test_what_the_system_must_have(tmp_path, python, tensorflow, message):
    """On a PATH with a Python that is too old and nothing else."""
    (tmp_path / "old-python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "old-python").chmod(0o755)
    (tmp_path / "uname").symlink_to(shutil.which("uname"))
    checked = run(shutil.which("sh"), ROOT / "scripts" / "check-system", python, tensorflow, PATH=str(tmp_path))
    assert checked.returncode == 1
    assert message in checked.stdout
    assert "a C++ compiler: install Debian's g++" in checked.stdout
