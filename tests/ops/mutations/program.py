"""Program that prints the hashes of golden cases, and for trials whether a kernel's tensors equal the last kernel's.

It runs with a copy of the package on PYTHONPATH: ``program.py DEVICE BACKEND LIBRARY [CASE ...]``. LIBRARY is the CPU's
kernels, or empty for those of the copy. Without names of cases, all golden cases whose sums round run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from alignkit.ops import golden, trials
from alignkit.ops.registry import RECORDS
from alignkit.runtime import built, dispatch, native, validated
from alignkit.testing import bitwise_equal


def main(device: str, backend: str, library: str, wanted: list[str]) -> dict[str, list[str]]:
    if library:
        kernels = built.Library(Path(library))
        assert kernels.alignkit_choose_isa(b"generic")
        native.library = lambda: kernels
    found: dict[str, list[str]] = {}
    with dispatch.use(backend), validated.unchecked():
        for case, (record, _) in golden.CASES.items():
            rounds = case.startswith(("rounding_", "subnormal_")) and not (backend == "reference" and record.slow)
            if (case in wanted or case.split()[0] in wanted) if wanted else rounds:
                found[case] = golden.hashes(case, device)
        for record in RECORDS:
            for op in record.kernels:
                *others, last = dispatch.kernels(op, backend)
                for kernel in others:
                    if f"trial {op}/{kernel.name}" not in wanted:
                        continue
                    for case in trials.cases(record, op, kernel):
                        got, want = (
                            trials.run(record, op, each, case, torch.device(device), backend) for each in (kernel, last)
                        )
                        if got is None and kernel.declines:
                            continue
                        assert got is not None and want is not None, f"{op}/{kernel.name}: not selected for {case[0]!r}"
                        key = f"trial {op}/{kernel.name} {str(case[1]).removeprefix('torch.')}"
                        equal = [str(bitwise_equal(a, b)) for a, b in zip(got, want, strict=True)]
                        found.setdefault(key, []).extend(equal)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4], sys.argv[4:])))
