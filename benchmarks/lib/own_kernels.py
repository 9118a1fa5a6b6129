"""A pytest plugin for ``sanitize.py``: matrix products without the providers, and ops without the CUDA kernels, that a
tool cannot follow. Their names are in ALIGNKIT_WITHOUT. Of the tests, those of ALIGNKIT_PART, "0/4" for every fourth."""

import os

from alignkit.runtime import dispatch, families


class LeftOut(dispatch.Kernel):
    """A kernel that is for no problem. It stays in the order, as a backend of one kernel is called without a choice."""

    def refuses(self, problem: object) -> str:
        return "left out under a tool"


def leave_out(names: list[str]) -> None:
    """Kernels of these names, and the CUDA kernels of these folders."""
    every = dispatch.order

    def order(op: str) -> tuple[dispatch.Kernel, ...]:
        kept = []
        for kernel in every(op):
            if kernel.name in names or (kernel.backend == families.CUDA and kernel.folder in names):
                if not kernel.rule:  # the only one of its backend
                    continue
                kernel = LeftOut(**vars(kernel))
            kept.append(kernel)
        return tuple(kept)

    dispatch.order = order


def write_runs() -> None:
    """Attention of few queries: a program that leaves nothing for the join says so in the first number of its run. The join reads
    the others too, as all are on their way at once, and does not use them: they are written here, so that initcheck does not
    stop at them."""
    from alignkit.ops.attention.sharing import Sharing

    memory = Sharing.memory

    def written(self, *args):
        states, runs = memory(self, *args)
        return states, runs.zero_()

    Sharing.memory = written


def pytest_configure() -> None:
    leave_out(os.environ.get("ALIGNKIT_WITHOUT", "").split())
    write_runs()


def pytest_collection_modifyitems(items: list) -> None:
    part, _, parts = os.environ.get("ALIGNKIT_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
