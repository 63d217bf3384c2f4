"""Builds the TensorFlow op library against the TensorFlow that is installed; all else is in pyproject.toml."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = pathlib.Path("tf_ops")
PACKAGE = "hvd_eightbit"
BUILD_RECORD = "_build.json"  # beside the library; the loader compares it with the TensorFlow that is running

# Products and sums are single float32 operations, the same on every machine: no contraction, no fast math.
COMPILE_FLAGS = ["-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-sign-compare"]

ASK_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps({
    "version": tf.__version__,
    "compile": tf.sysconfig.get_compile_flags(),
    "link": tf.sysconfig.get_link_flags(),
}))
"""


def target_tensorflow() -> dict:
    """Version and flags of the TensorFlow of the environment that is installed into.

    pip builds in an isolated environment that hides it, by means of PYTHONPATH: without that it can be seen.
    """
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    environment = {key: value for key, value in os.environ.items() if key not in hiding}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    asked = subprocess.run(
        [sys.executable, "-c", ASK_TENSORFLOW], capture_output=True, text=True, env=environment, cwd="/"
    )
    if asked.returncode != 0:
        why = asked.stderr.strip().splitlines()[-1:]
        sys.exit(
            f"hvd_eightbit is built against the TensorFlow that you use, but {sys.executable} cannot import one "
            f"({' '.join(why)}).\nInstall TensorFlow 2.15 to 2.18 and Horovod first. If it is installed, your "
            "installer builds in an environment of its own: add --no-build-isolation (and have setuptools and wheel)."
        )
    return json.loads(asked.stdout.strip().splitlines()[-1])


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        sys.exit(
            f"hvd_eightbit needs a C++ compiler, and {command[0]!r} is not there: install Debian's g++, or set CXX"
        )
    return command


def run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    if subprocess.run(command).returncode != 0:
        sys.exit(f"hvd_eightbit: this command failed: {shlex.join(command)}")


class BuildOps(build_ext):
    """Compiles tf_ops/*.cc and links them to _tf_ops.so, which TensorFlow loads; it is no Python extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, extension: Extension) -> None:
        tensorflow, cxx = target_tensorflow(), compiler()
        print(f"building the ops of {PACKAGE} for TensorFlow {tensorflow['version']}", flush=True)
        objects = pathlib.Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        # TensorFlow's headers as system headers: their warnings are not ours.
        flags = [flag.replace("-I", "-isystem", 1) if flag.startswith("-I") else flag for flag in tensorflow["compile"]]
        flags = [*COMPILE_FLAGS, *flags, f"-I{SOURCES}"]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            built = [objects / f"{pathlib.Path(source).stem}.o" for source in extension.sources]
            commands = [
                [*cxx, *flags, "-c", source, "-o", str(target)] for source, target in zip(extension.sources, built)
            ]
            list(pool.map(run, commands))
        library = pathlib.Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run([*cxx, "-shared", "-o", str(library), *map(str, built), *tensorflow["link"]])
        version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
        record = {"tensorflow": tensorflow["version"], "compiler": version, "cuda": None}
        library.with_name(BUILD_RECORD).write_text(json.dumps(record, indent=2) + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        self.copy_file(os.path.join(self.build_lib, PACKAGE, BUILD_RECORD), os.path.join(PACKAGE, BUILD_RECORD))


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}._tf_ops",
            sources=sorted(str(path) for path in SOURCES.glob("*.cc")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
        )
    ],
    cmdclass={"build_ext": BuildOps},
)
