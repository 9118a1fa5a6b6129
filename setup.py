"""Builds the kernels. They have a plain C interface and no torch headers, so neither torch nor Python is needed to
compile them. Those for the CPU take a C++17 compiler, those for Hopper GPUs nvcc. Where one of the two is missing the
package installs all the same; `alignkit doctor` says what is missing. An nvcc that is there but fails, fails the
installation.

A library is built again when it is not of the sources that are here: it says of which it is, by their hash."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OLDEST_NVCC = (12, 8)
# As a file: to import the package takes torch.
SPEC = importlib.util.spec_from_file_location("alignkit_sources", "alignkit/_sources.py")
hashes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hashes)

CPU = Extension(
    "alignkit._cpu",
    sources=[f"csrc/cpu/{name}.cpp" for name in ("api", "isa_generic", "isa_avx2", "isa_avx512")],
    # No contraction: a multiply-add is fused where the source says so and nowhere else.
    extra_compile_args=[
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
        "-gencode=arch=compute_90a,code=sm_90a",
        "-O3",
        "-std=c++17",
        "-lineinfo",
        "--fmad=false",  # no contraction, as above
        "-Xcompiler",
        "-fPIC",
        "-shared",
        "-cudart",
        "static",
    ],  # beside the runtime of any torch
)


def nvcc_places() -> list[str]:
    """Where an nvcc may be, the one to prefer first; not all are there."""
    home = os.environ.get("CUDA_HOME")
    return [
        os.environ.get("CUDACXX", ""),
        f"{home}/bin/nvcc" if home else "",
        "nvcc",  # on the PATH
        "/usr/local/cuda/bin/nvcc",
        f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin/nvcc",  # of the package nvidia-cuda-nvcc
    ]


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """(0, 0) for what is not an nvcc, or a broken one."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found and done.returncode == 0 else (0, 0)


def find_nvcc() -> str | None:
    """The first nvcc that is new enough."""
    found = (shutil.which(place) for place in nvcc_places() if place)
    return next((nvcc for nvcc in found if nvcc and nvcc_version(nvcc) >= OLDEST_NVCC), None)


def nvcc_command(nvcc: str, sources: list[str], library: str) -> list[str]:
    """Compiles `sources` to the shared library `library`."""
    libraries = Path(nvcc).resolve().parents[1] / "lib"  # the packages have no lib64, the only one where nvcc looks
    found = [f"-L{libraries}"] if (libraries / "libcudart_static.a").exists() else []
    return [nvcc, *SM90.extra_compile_args, *found, *sources, "-o", library]


def part(ext: Extension) -> str:
    """The folder of csrc that a library is built from."""
    return ext.name.rpartition("._")[2]


def current(library: Path, ext: Extension) -> bool:
    """Whether `library` is there, and of the sources that are here."""
    return library.exists() and hashes.of(part(ext)).encode() in library.read_bytes()


class BuildKernels(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.nvcc = find_nvcc()
        if self.nvcc is None:
            self.extensions = [ext for ext in self.extensions if ext.name != SM90.name]

    def run(self):
        if self.nvcc is None:
            oldest = ".".join(map(str, OLDEST_NVCC))
            print(f"alignkit: no nvcc {oldest} or newer was found; the CUDA kernels are not built")
        for ext in (CPU, SM90):  # what is of other sources must not stay where nothing takes its place
            library = Path(self.get_ext_fullpath(ext.name))
            if not current(library, ext):
                library.unlink(missing_ok=True)
        super().run()
        if not self.inplace:  # the package goes where no sources are
            built = Path(self.get_ext_fullpath(CPU.name)).with_name(hashes.BUILT)
            built.parent.mkdir(parents=True, exist_ok=True)
            built.write_text(json.dumps({part(ext): hashes.of(part(ext)) for ext in (CPU, SM90)}) + "\n")

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        if not self.force and current(library, ext):
            return
        sources = f"ALIGNKIT_SOURCES={hashes.of(part(ext))}"
        library.parent.mkdir(parents=True, exist_ok=True)
        if ext.name == SM90.name:
            self.spawn([*nvcc_command(self.nvcc, ext.sources, str(library)), f"-D{sources}"])
        else:
            library.unlink(missing_ok=True)  # else one that is newer than the sources would stay
            ext.define_macros = [tuple(sources.split("="))]
            super().build_extension(ext)

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"  # one for every version of Python

    def get_export_symbols(self, ext):
        return []  # a shared library for ctypes, not a Python module


if __name__ == "__main__":
    setup(cmdclass={"build_ext": BuildKernels}, ext_modules=[CPU, SM90])
