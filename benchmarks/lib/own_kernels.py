"""A pytest plugin for ``sanitize.py``: matrix products without the providers, and ops without the CUDA kernels, that a
tool cannot follow. Their names are in ALIGNKIT_WITHOUT. Of the tests, those of ALIGNKIT_PART, "0/4" for every fourth."""

import os


def pytest_configure() -> None:
    from alignkit.runtime import dispatch, families

    without, every = os.environ.get("ALIGNKIT_WITHOUT", "").split(), dispatch.order

    def order(op: str):
        return tuple(
            kernel
            for kernel in every(op)
            if kernel.name not in without and not (kernel.backend == families.CUDA and kernel.folder in without)
        )

    dispatch.order = order


def pytest_collection_modifyitems(items: list) -> None:
    part, _, parts = os.environ.get("ALIGNKIT_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
