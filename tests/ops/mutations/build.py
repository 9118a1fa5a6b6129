"""Libraries of mutated CUDA kernels, built by setup.py in copies of the sources, and the archive that holds them.

A library embeds the hash of its mutated sources, so it loads in a copy of the package with the same mutation and
nowhere else. setup.py recompiles the mutated files alone, since a copy has the objects of ROOT/build/objects.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .mutation import ROOT, Mutation, copy_package

OBJECTS = "build/objects"
LIBRARY = "alignkit/_sm90.so"
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}]
"""Filters of the archive. The dictionary covers two libraries, so a library costs little more than its difference."""


def compile_library(folder: Path) -> None:
    """Build the CUDA library of a copy of the package in `folder`; a failure of nvcc raises CalledProcessError."""
    if (ROOT / OBJECTS).is_dir() and not (folder / OBJECTS).exists():
        shutil.copytree(ROOT / OBJECTS, folder / OBJECTS)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    assert (folder / LIBRARY).exists(), "nvcc must be installed"


def write_archive(file: Path, mutations: Iterable[Mutation]) -> None:
    """Build the library of each mutation and write them to a .tar.xz file.

    Libraries are cached in ROOT/build/mutations, by the hash of their sources.
    """
    built = []
    for mutation in mutations:
        built.append((mutation.file, library(mutation)))
        print(mutation.file, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(file, "wb", filters=COMPRESSION) as xz, tarfile.open(fileobj=xz, mode="w|") as archive:
        for name, path in built:
            archive.add(path, name)
    print(f"{file}: {file.stat().st_size >> 10} KiB")


def library(mutation: Mutation) -> Path:
    """Return the library of a mutation, which is built unless it is cached."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_package(folder, without="_sm90.so")
        mutation.apply(folder)
        code = "import runpy; print(runpy.run_path('alignkit/_sources.py')['of']('sm90'))"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True)
        cached = ROOT / "build/mutations" / f"{done.stdout.strip()}.so"
        if not cached.exists():
            compile_library(folder)
            cached.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / LIBRARY, cached)
    return cached


def read_archive(file: Path, folder: Path) -> None:
    """Extract the libraries of an archive."""
    with lzma.open(file) as xz, tarfile.open(fileobj=xz, mode="r|") as archive:
        archive.extractall(folder, filter="data")
