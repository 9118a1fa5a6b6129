"""Builds the CPU kernels. They have a plain C interface and no torch headers, so neither torch nor Python is needed
to compile them. Without a C++17 compiler the package installs all the same; `alignkit doctor` says what is missing."""
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    def get_export_symbols(self, ext):
        return []  # a shared library for ctypes, not a Python module


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[Extension(
        "alignkit._cpu",
        sources=[f"csrc/cpu/{name}.cpp" for name in ("api", "isa_generic", "isa_avx2", "isa_avx512")],
        depends=["csrc/cpu/prelude.h", "csrc/cpu/kernels.inl"],
        # No contraction: a multiply-add is fused where the source says so and nowhere else.
        extra_compile_args=["-O3", "-g0", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno",
                            "-fno-trapping-math"],
        extra_link_args=["-fopenmp"],
        language="c++",
        optional=True,
    )],
)
