"""Builds the kernels. They have a plain C interface and no torch headers, so neither torch nor Python is needed to
compile them. Those for the CPU take a C++17 compiler, those for Hopper GPUs nvcc. Where one of the two is missing the
package installs all the same; `alignkit doctor` says what is missing. An nvcc that is there but fails, fails the
installation."""
from __future__ import annotations

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

CPU = Extension(
    "alignkit._cpu",
    sources=[f"csrc/cpu/{name}.cpp" for name in ("api", "isa_generic", "isa_avx2", "isa_avx512")],
    depends=["csrc/cpu/prelude.h", "csrc/cpu/kernels.inl"],
    # No contraction: a multiply-add is fused where the source says so and nowhere else.
    extra_compile_args=["-O3", "-g0", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno",
                        "-fno-trapping-math"],
    extra_link_args=["-fopenmp"],
    language="c++",
    optional=True,
)
SM90 = Extension(
    "alignkit._sm90",
    sources=sorted(glob("csrc/sm90/*.cu")),
    depends=["setup.py", *sorted(glob("csrc/sm90/*.cuh"))],
    extra_compile_args=["-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-lineinfo",
                        "--fmad=false",  # no contraction, as above
                        "-Xcompiler", "-fPIC", "-shared",
                        "-cudart", "static"],  # beside the runtime of any torch
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
            # What was built before may be of other sources; it must not be taken for a library of these.
            Path(self.get_ext_fullpath(SM90.name)).unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext):
        if ext.name != SM90.name:
            super().build_extension(ext)
            return
        library = Path(self.get_ext_fullpath(ext.name))
        newest = max(Path(file).stat().st_mtime for file in (*ext.sources, *ext.depends))
        if self.force or not library.exists() or library.stat().st_mtime < newest:
            library.parent.mkdir(parents=True, exist_ok=True)
            self.spawn(nvcc_command(self.nvcc, ext.sources, str(library)))

    def get_ext_filename(self, fullname):
        if fullname.rpartition(".")[2] == SM90.name.rpartition(".")[2]:
            return os.path.join(*fullname.split(".")) + ".so"  # one for every version of Python
        return super().get_ext_filename(fullname)

    def get_export_symbols(self, ext):
        return []  # a shared library for ctypes, not a Python module


if __name__ == "__main__":
    setup(cmdclass={"build_ext": BuildKernels}, ext_modules=[CPU, SM90])
