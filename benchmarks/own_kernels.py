"""A pytest plugin for ``sanitize.py``: matrix products without the providers, and ops without the CUDA kernels, that a
tool cannot follow. Their names are in ALIGNKIT_WITHOUT. Of the tests, those of ALIGNKIT_PART, "0/4" for every fourth."""

import os


def pytest_configure() -> None:
    from alignkit.ops.linear import cublaslt, hopper
    from alignkit.runtime import dispatch

    without = os.environ.get("ALIGNKIT_WITHOUT", "").split()
    if "cublaslt" in without:
        cublaslt._library = lambda: None
    if "hopper" in without:
        hopper.matmul = lambda *_: False
    dispatch.CUDA = tuple(op for op in dispatch.CUDA if op not in without)


def pytest_collection_modifyitems(items: list) -> None:
    part, _, parts = os.environ.get("ALIGNKIT_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
