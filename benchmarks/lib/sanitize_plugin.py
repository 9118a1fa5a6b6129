"""A pytest plugin for ``sanitize.py``: exclude kernels that a tool cannot analyze, and run a part of the tests.

``ALIGNKIT_WITHOUT``: names of kernels, as `alignkit explain` prints them, and of op folders whose CUDA kernels
are excluded; separated by spaces. ``ALIGNKIT_PART``: the part of the tests to run; "0/4" is every fourth test, starting
with the first.
"""

import os

from alignkit.runtime import dispatch, families


class ExcludedKernel(dispatch.Kernel):
    """A kernel that rejects every problem.

    It takes the place of a kernel with a rule. If that kernel were removed, a kernel without a rule could become first,
    and dispatch would select it for every problem.
    """

    def rejects(self, problem: object) -> str:
        return "excluded under compute-sanitizer"


def exclude_kernels(names: list[str]) -> None:
    """Exclude the kernels with these names, and the CUDA kernels of these op folders."""
    original = dispatch.order

    def order(op: str) -> tuple[dispatch.Kernel, ...]:
        result = []
        for kernel in original(op):
            if kernel.name in names or (kernel.backend == families.CUDA and dispatch.OPS[op] in names):
                if not kernel.rule:  # without a rule: dispatch would not call `rejects`, so remove it
                    continue
                kernel = ExcludedKernel(**vars(kernel))
            result.append(kernel)
        return tuple(result)

    dispatch.order = order


def initialize_records() -> None:
    """Zero the records of decode attention at allocation, so that initcheck accepts the reads of unused fields.

    The first field of a record says whether the merge kernel uses the others. The kernel loads all fields at once.
    """
    from alignkit.ops.attention.sharing import Sharing

    memory = Sharing.memory

    def zeroed(self, *args):
        states, records = memory(self, *args)
        return states, records.zero_()

    Sharing.memory = zeroed


def pytest_configure() -> None:
    exclude_kernels(os.environ.get("ALIGNKIT_WITHOUT", "").split())
    initialize_records()


def pytest_collection_modifyitems(items: list) -> None:
    part, _, parts = os.environ.get("ALIGNKIT_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
