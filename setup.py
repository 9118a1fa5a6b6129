"""Build of the kernel libraries.

The kernels have a plain C interface and include neither torch nor Python headers. The CPU library needs a C++17
compiler, the library for Hopper GPUs needs nvcc. If a compiler is missing, the package installs without that library;
`alignkit doctor` reports it. A failure of nvcc fails the installation.

Wheels are tagged ``py3-none-PLATFORM`` (class `PlatformWheel`).

A library embeds the hash of its sources and is rebuilt when the hash differs. The build recompiles an object only if
its source, a header, the options or the compiler changed (class `Object`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ModuleNotFoundError:  # `make kernels` with an installed setuptools older than 70.1
    from wheel.bdist_wheel import bdist_wheel

OLDEST_NVCC = (12, 8)
OBJECTS = Path("build/objects")
# Loaded as a file: importing the package would import torch.
SPEC = importlib.util.spec_from_file_location("alignkit_sources", "alignkit/_sources.py")
hashes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hashes)

CPU = Extension(
    "alignkit._cpu",
    sources=sorted(glob("csrc/cpu/*.cpp")),
    # No contraction: the compiler must not fuse multiply-adds; the source calls fma explicitly.
    extra_compile_args=[
        "-I.",
        "-O3",
        "-g0",
        "-std=c++17",
        "-fopenmp",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
    ],
    extra_link_args=["-fopenmp"],
    language="c++",
    optional=True,
)
SM90 = Extension(
    "alignkit._sm90",
    sources=sorted(glob("csrc/sm90/**/*.cu", recursive=True)),
    extra_compile_args=[
        "-I.",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-O3",
        "-std=c++17",
        "-lineinfo",
        "-Xptxas=-v",  # register and shared-memory use per kernel, into the .log file beside the object
        "--fmad=false",  # no contraction, as above
        "-Xcompiler",
        "-fPIC",
    ],
    extra_link_args=["-shared", "-cudart", "static"],  # independent of torch's CUDA runtime
)


def nvcc_places() -> list[str]:
    """Return the candidate paths of nvcc, in order of preference."""
    home = os.environ.get("CUDA_HOME")
    return [
        os.environ.get("CUDACXX", ""),
        f"{home}/bin/nvcc" if home else "",
        "nvcc",  # on the PATH
        "/usr/local/cuda/bin/nvcc",
        f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin/nvcc",  # package nvidia-cuda-nvcc
    ]


def version(compiler: str) -> str:
    """Return a compiler's --version output; empty if it is missing or fails."""
    if not shutil.which(compiler):
        return ""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Return nvcc's release as (major, minor); (0, 0) if it is missing or fails."""
    found = re.search(r"release (\d+)\.(\d+)", version(nvcc))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_nvcc() -> str | None:
    """Return the first nvcc of at least version OLDEST_NVCC, or None."""
    found = (shutil.which(place) for place in nvcc_places() if place)
    return next((nvcc for nvcc in found if nvcc and nvcc_version(nvcc) >= OLDEST_NVCC), None)


def nvcc_compile(nvcc: str, compiled: Object, more: list[str]) -> None:
    """Compile one object; nvcc's output is printed on failure, else written to the object's .log file."""
    command = [nvcc, *SM90.extra_compile_args, *more, "-c", compiled.source, "-o", str(compiled.path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        raise ExecError(f"{' '.join(command)}: exit status {done.returncode}")
    compiled.log.write_text(done.stdout)


def nvcc_link(nvcc: str, objects: list[str], library: Path) -> list[str]:
    libraries = Path(nvcc).resolve().parents[1] / "lib"  # nvcc searches lib64 alone, but the pip packages have lib
    found = [f"-L{libraries}"] if (libraries / "libcudart_static.a").exists() else []
    return [nvcc, *SM90.extra_compile_args, *SM90.extra_link_args, *found, *objects, "-o", str(library)]


def part(ext: Extension) -> str:
    """Return the folder of csrc that a library is built from."""
    return ext.name.rpartition("._")[2]


def current(library: Path, ext: Extension) -> bool:
    """Return whether `library` exists and embeds the hash of the present sources."""
    return library.exists() and hashes.of(part(ext)).encode() in library.read_bytes()


class Object:
    """A compiled source file.

    The files beside it are the compiler's dependency list (.d), a hash of dependencies, options and compiler (.hash),
    and nvcc's output (.log).
    """

    def __init__(self, source: str, options: list[str], compiler: list[str]):
        self.source, self.options, self.compiler = source, options, compiler
        self.path = OBJECTS / Path(source).relative_to(Path(source).anchor).with_suffix(".o")  # setuptools' naming
        self.dependencies, self.hash, self.log = (self.path.with_suffix(end) for end in (".d", ".hash", ".log"))

    def files(self) -> list[Path]:
        """Return the files that the compiler read, from its make rule; system headers may be missing."""
        _, _, files = self.dependencies.read_text().replace("\\\n", " ").partition(": ")
        return [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", files.strip())]

    def current_hash(self) -> str:
        total = hashlib.sha256(json.dumps([self.options, self.compiler]).encode())
        for file in self.files():
            total.update(hashlib.sha256(file.read_bytes()).digest())
        return total.hexdigest()

    def current(self) -> bool:
        try:
            return self.path.exists() and self.hash.read_text() == self.current_hash()
        except OSError:  # never compiled, interrupted, or a dependency was removed
            return False

    def compile(self, run: Callable[[Object, list[str]], None]) -> None:
        """Compile with `run(self, extra options)`."""
        self.hash.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        began = time.time_ns()
        run(self, [*self.options, "-MMD", "-MF", str(self.dependencies)])
        if all(file.stat().st_mtime_ns < began for file in self.files()):  # else a file may have changed meanwhile
            self.hash.write_text(self.current_hash())


def objects_of(ext: Extension, compiler: list[str]) -> list[Object]:
    """Return the objects of a library; `compiler` is the compiler's version and options."""
    identity = f"-DALIGNKIT_SOURCES={hashes.of(part(ext))}"
    return [Object(source, [identity] if Path(source).stem == "identity" else [], compiler) for source in ext.sources]


def cuda_objects(ext: Extension, nvcc: str) -> list[Object]:
    return objects_of(ext, [*SM90.extra_compile_args, version(nvcc)])


class BuildKernels(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.nvcc = find_nvcc()
        if self.nvcc is None:
            self.extensions = [ext for ext in self.extensions if ext.name != SM90.name]

    def run(self):
        if self.nvcc is None:
            oldest = ".".join(map(str, OLDEST_NVCC))
            print(f"alignkit: nvcc {oldest} or newer not found; the CUDA kernels are not built")
        for ext in (CPU, SM90):  # remove outdated libraries, also those that this build cannot replace
            library = Path(self.get_ext_fullpath(ext.name))
            if not current(library, ext):
                library.unlink(missing_ok=True)
        super().run()
        if not self.inplace:  # the installed package has no sources beside it
            built = Path(self.get_ext_fullpath(CPU.name)).with_name(hashes.BUILT)
            built.parent.mkdir(parents=True, exist_ok=True)
            built.write_text(json.dumps({part(ext): hashes.of(part(ext)) for ext in (CPU, SM90)}) + "\n")

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        if not self.force and current(library, ext):
            return
        library.parent.mkdir(parents=True, exist_ok=True)
        if ext.name == SM90.name:
            objects = self.compile(cuda_objects(ext, self.nvcc), self.compile_cuda)
            self.spawn(nvcc_link(self.nvcc, objects, library))
        else:
            program = self.compiler.compiler_so_cxx
            compiler = [*program, *CPU.extra_compile_args, version(program[0])]
            objects = self.compile(objects_of(ext, compiler), self.compile_cpp)
            self.compiler.link_shared_object(
                objects, str(library), extra_postargs=CPU.extra_link_args, target_lang=CPU.language
            )

    def compile_cuda(self, compiled, more):
        nvcc_compile(self.nvcc, compiled, more)

    def compile_cpp(self, compiled, more):
        options = [*CPU.extra_compile_args, *more]
        self.compiler.compile([compiled.source], output_dir=str(OBJECTS), extra_postargs=options)

    def compile(self, objects, run) -> list[str]:
        """Compile the outdated objects, one per core at a time, and return the paths of all objects."""
        stale = [each for each in objects if self.force or not each.current()]
        stale.sort(key=lambda each: -os.path.getsize(each.source))  # largest first, for load balance

        def one(i: int) -> None:
            print(f"alignkit: compiling {stale[i].source} ({i + 1} of {len(stale)})", flush=True)
            stale[i].compile(run)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(one, range(len(stale))))
        return [str(each.path) for each in objects]

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"  # independent of the Python version

    def get_export_symbols(self, ext):
        return []  # a shared library for ctypes, not a Python module


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 on one platform: ctypes loads the libraries, which use no Python ABI.

    `requires-python` in pyproject.toml states the supported versions.
    """

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


if __name__ == "__main__":
    setup(cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel}, ext_modules=[CPU, SM90])
