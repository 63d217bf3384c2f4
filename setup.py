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

CUDA_SOURCES = {"cuda_kernels.cu", "gpu_op_kernels.cc"}
CUDA_ARCHITECTURES = ("70", "75", "80", "86", "89", "90", "100", "120")  # as far as the nvcc found has them
# No contraction, no flushing of subnormals, IEEE division: as on the CPU.
CUDA_FLAGS = ["-O3", "-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "-Xcompiler", "-fPIC"]

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

    As things are, or else without PYTHONPATH: by that, pip's isolated build hides the environment it installs into.
    """
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    as_is = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for environment in (as_is, {key: value for key, value in as_is.items() if key not in hiding}):
        asked = subprocess.run(
            [sys.executable, "-c", ASK_TENSORFLOW], capture_output=True, text=True, env=environment, cwd="/"
        )
        if asked.returncode == 0:
            return json.loads(asked.stdout.strip().splitlines()[-1])
    why = asked.stderr.strip().splitlines()[-1:]
    sys.exit(
        f"hvd_eightbit is built against the TensorFlow that you use, but {sys.executable} cannot import one "
        f"({' '.join(why)}).\nInstall TensorFlow 2.15 to 2.18 and Horovod first. If it is installed, your "
        "installer builds in an environment of its own: add --no-build-isolation (and have setuptools and wheel)."
    )


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        sys.exit(
            f"hvd_eightbit needs a C++ compiler, and {command[0]!r} is not there: install Debian's g++, or set CXX"
        )
    return command


def find_nvcc() -> pathlib.Path | None:
    """nvcc: what CUDA_HOME says, or else PATH; None without one, or with HVD_EIGHTBIT_CUDA=0."""
    if os.environ.get("HVD_EIGHTBIT_CUDA", "1") == "0":
        print("HVD_EIGHTBIT_CUDA=0: building for the CPU only", flush=True)
        return None
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = pathlib.Path(home, "bin", "nvcc")
        if not nvcc.exists():
            sys.exit(f"CUDA_HOME={home!r}: there is no bin/nvcc; unset it to build for the CPU only")
        return nvcc
    found = shutil.which("nvcc")
    if found is None:
        print("no nvcc in CUDA_HOME or PATH: building for the CPU only", flush=True)
    return found and pathlib.Path(found)


def cuda_toolkit(nvcc: pathlib.Path) -> tuple[pathlib.Path, list[str], list[str]]:
    """Of this nvcc: the root of its toolkit, the architectures to build for, and the flags that say so."""
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = next(line.split("=", 1)[1] for line in dry.splitlines() if line.startswith("#$ TOP="))
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    known = [arch for arch in CUDA_ARCHITECTURES if f"compute_{arch}" in listed]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
    newest = known[-1]  # and its PTX, for what comes after
    flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return pathlib.Path(top).resolve(), known, flags


def run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    if subprocess.run(command).returncode != 0:
        sys.exit(f"hvd_eightbit: this command failed: {shlex.join(command)}")


class BuildOps(build_ext):
    """Compiles tf_ops and links it to _tf_ops.so, which TensorFlow loads; it is no Python extension module.

    With an nvcc, GPU kernels are built in; cudart is linked statically, so the library loads without CUDA too.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, extension: Extension) -> None:
        tensorflow, cxx, nvcc = target_tensorflow(), compiler(), find_nvcc()
        print(f"building the ops of {PACKAGE} for TensorFlow {tensorflow['version']}", flush=True)
        # TensorFlow's headers as system headers: their warnings are not ours.
        flags = [flag.replace("-I", "-isystem", 1) if flag.startswith("-I") else flag for flag in tensorflow["compile"]]
        flags, link, archs = [*COMPILE_FLAGS, *flags, f"-I{SOURCES}"], tensorflow["link"], None
        if nvcc:
            root, archs, arch_flags = cuda_toolkit(nvcc)
            print(f"with CUDA of {root}, for sm_{', sm_'.join(archs)} and PTX", flush=True)
            flags.append(f"-isystem{root / 'include'}")
            static = next(root.glob("lib*/libcudart_static.a"), None) or next(
                root.glob("targets/*/lib/libcudart_static.a")
            )
            link = [*link, str(static), "-ldl", "-lrt", "-lpthread"]

        objects = pathlib.Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        commands, built = [], []
        for source in map(pathlib.Path, extension.sources):
            if source.name in CUDA_SOURCES and not nvcc:
                continue
            compile_with = [str(nvcc), *CUDA_FLAGS, *arch_flags] if source.suffix == ".cu" else [*cxx, *flags]
            built.append(str(objects / f"{source.name}.o"))
            commands.append([*compile_with, "-c", str(source), "-o", built[-1]])
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        library = pathlib.Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run([*cxx, "-shared", "-o", str(library), *built, *link])
        version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
        record = {"tensorflow": tensorflow["version"], "compiler": version, "cuda": archs}
        library.with_name(BUILD_RECORD).write_text(json.dumps(record, indent=2) + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        self.copy_file(os.path.join(self.build_lib, PACKAGE, BUILD_RECORD), os.path.join(PACKAGE, BUILD_RECORD))


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}._tf_ops",
            # The CUDA sources first: they take longest.
            sources=sorted(
                (str(path) for path in [*SOURCES.glob("*.cc"), *SOURCES.glob("*.cu")]), key=lambda p: p[-3:] != ".cu"
            ),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
        )
    ],
    cmdclass={"build_ext": BuildOps},
)
