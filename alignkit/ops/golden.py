"""Golden bits: hashes of the ops' results, forward and backward, for fixed inputs.

golden_cpu.json and golden_sm90.json hold the hashes under the current contract id. The tests, `alignkit doctor`, and
`alignkit.runtime.validated` (for versions that are not validated) compare against them.

After a change of the contract and its id, rewrite them on a CPU and on a GPU of the family:
``python -m alignkit.ops.golden cpu`` and ``python -m alignkit.ops.golden cuda``. Under the same id this adds new cases
only. In the other family's file, a new case gets the hashes of the tensor-core model (linear/model.py) if the model
covers it, else null: no hashes yet. A null is skipped, and `alignkit doctor` reports it.

Names of cases are keys of these files. A change of a case's inputs needs a new name, or a new contract id.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from ..errors import BackendError
from ..runtime import dispatch, families, validated
from ..runtime.families import Family
from . import trials
from .inputs import Inputs
from .linear import model
from .registry import RECORDS

DTYPES = (torch.float32, torch.bfloat16)
CASES = {
    f"{case.function.__name__} {str(dtype).removeprefix('torch.')}": (case, dtype)
    for record in RECORDS
    for case in record.golden
    for dtype in DTYPES
}
"""Name of a case, a key of golden_*.json -> the case and the dtype of its inputs."""


def path(family: Family) -> Path:
    """Return the file of a family's golden hashes."""
    return Path(__file__).with_name(f"golden_{family.name}.json")


def load(family: Family) -> dict[str, list[str] | None]:
    """Return the hashes of each case's tensors, None for a case without hashes yet.

    Raises:
        BackendError: the file belongs to another contract id.
    """
    stored = json.loads(path(family).read_text())
    if stored["contract"] != family.contract_id:
        raise BackendError(
            f"{path(family)}: contract must be {family.contract_id}, got {stored['contract']}. Reinstall alignkit, "
            f"or run `python -m alignkit.ops.golden {family.device_type}` after a change of the contract"
        )
    return stored["sha256"]


def pending(family: Family) -> list[str]:
    """Return the cases that have no hashes of a family yet."""
    return [case for case, stored in load(family).items() if stored is None]


def predicted(case: str) -> list[str] | None:
    """Return the sm90 hashes of a case by the tensor-core model, on the CPU; None for a case that it does not cover."""
    if not CASES[case][0].modelled:
        return None
    with validated.unchecked(), dispatch.forced("linear", dispatch.Kernel("model", families.NATIVE, lambda: model)):
        return hashes(case, families.CPU.device_type)


def hashes(case: str, device: torch.device | str) -> list[str]:
    """Return the hashes of a case's tensors on `device`, computed by the selected backend."""
    golden, dtype = CASES[case]
    return [
        hashlib.sha256(t.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for t in golden.function(Inputs(device, dtype))
    ]


def digest(computed: dict[str, list[str]]) -> str:
    """Return the digest of the hashes of all cases, which `Family.set_digest` puts into a contract id."""
    return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:16]


def difference(device: torch.device, backend: str) -> str | None:
    """Return the first golden mismatch on `device`, or None; `backend` must be the selected one.

    Kernels that fail their trials (trials.py) are passed over first.
    """
    failure = trials.compare(device, backend)
    if failure is not None:
        return failure
    family = families.of_type(device)
    assert family is not None  # a device with a backend has a family
    stored = load(family)
    for case, (found, _) in CASES.items():
        if backend == families.REFERENCE and found.slow:
            continue
        if case not in stored:
            return (
                f"{case}: {path(family).name} of this installation has no golden bits for this case. Reinstall alignkit"
            )
        expected = stored[case]
        if expected is None:
            continue
        try:
            computed = hashes(case, device)
        except Exception as e:  # e.g. a compiler failure
            return f"{case}: {type(e).__name__}: {e}"
        wrong = [i for i, (a, b) in enumerate(zip(computed, expected, strict=True)) if a != b]
        if wrong:
            return f"{case}: tensor {wrong[0] + 1} of {len(computed)} differs from its golden hash"
    return None


def write(device: torch.device | str) -> None:
    """Write the golden hashes of the family of `device`, and add new cases to the files of the other families.

    Under a new contract id, all hashes are replaced. Under the id of the file, new cases are added.

    Raises:
        BackendError: under the id of the file, a stored hash differs.
    """
    with validated.unchecked():  # the stored hashes may not match
        own = dispatch.family(device)
        assert own in families.FAMILIES, f"{own.name} has no file of golden bits"
        computed = {case: hashes(case, device) for case in CASES}
    for family in families.FAMILIES:
        before = json.loads(path(family).read_text())
        kept = before["sha256"] if before["contract"] == family.contract_id else {}
        if family is own:
            for case in kept:
                if kept[case] not in (None, computed[case]):
                    raise BackendError(
                        f"{case}: hashes must equal those in {path(family).name} under {family.contract_id}, but "
                        "differ. Restore the bits, or change the contract id first"
                    )
            found = kept | computed
        elif not kept:
            continue  # a device of that family rewrites its file
        else:
            by_model = predicted if family is families.SM90 else lambda _: None
            found = kept | {case: by_model(case) for case in CASES if case not in kept}
        path(family).write_text(json.dumps({"contract": family.contract_id, "sha256": found}, indent=1) + "\n")


if __name__ == "__main__":
    assert len(sys.argv) == 2, __doc__
    write(sys.argv[1])
