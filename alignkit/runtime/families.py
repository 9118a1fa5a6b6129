"""Device families: groups of devices that compute the same bits under one contract.

This is the only place with family-specific facts: contract version and constants, validated versions, devices, backends
and kernel library. docs/contract.md states the constants and the validated versions, csrc mirrors some constants
(tests/test_constants.py), and ops/golden_*.json hold the contract ids. `sm_count` changes the choice of kernels, which
tests/ops/choices.json holds, and no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..contract.constants import K_LEAVES, VOCAB_TILE

PACKAGE = Path(__file__).parents[1]
NATIVE, REFERENCE, TRITON, CUDA = "cpu", "reference", "triton", "cuda"
"""Backends: C++ kernels, torch reference code, Triton (and cuBLASLt, restricted to Triton's bits), CUDA kernels."""


@dataclass(eq=False)
class Family:
    """A device family: its contract, validated versions, backends and library.

    `version`, `kv_block`, `kv_leaf`, `reserve` and `head_rows` are contract constants: changing one changes bits.
    """

    name: str
    version: int
    """Contract version. A change of one family's bits leaves the logprobs saved on other families comparable."""
    kv_block: int
    """Positions per attention key block, counted from position 0."""
    kv_leaf: int
    """Positions per attention leaf (a separate online softmax); a multiple of `kv_block`, counted from position 0."""
    reserve: float
    """Softmax headroom: excess of scores over a leaf's reference level before rescaling; exponent of e (CPU) or 2."""
    head_rows: int | None
    """Rows per chain in the gradient of the LM head's weight; the chains are added in order. None: one chain."""
    validated: tuple[dict[str, str], ...]
    """Combinations of versions with which all tests of the family passed."""
    device_type: str
    """torch device type."""
    capability: tuple[int, int] | None
    """Required compute capability; None for CPUs."""
    backends: tuple[str, ...]
    """Backends, fastest first. A later backend computes what an earlier one lacks, to the same bits."""
    part: str
    """Subfolder of csrc with the sources of the kernel library."""
    sm_count: int
    """schedule: SMs of the GPU on which schedules were measured."""

    @property
    def contract_id(self) -> str:
        """The contract id of the family."""
        return f"alignkit-{self.version}/{self.name}/v{VOCAB_TILE}/k{K_LEAVES}/kv{self.kv_block}/leaf{self.kv_leaf}"

    @property
    def library(self) -> Path:
        """The file of the compiled kernels."""
        return PACKAGE / f"_{self.part}.so"

    @property
    def on_gpu(self) -> bool:
        return self is not CPU


CPU = Family(
    name="cpu",
    version=3,
    kv_block=32,
    kv_leaf=128,
    reserve=21.0,
    head_rows=None,
    validated=({"torch": "2.13.0+cpu"}, {"torch": "2.13.0+cu130"}),
    device_type="cpu",
    capability=None,
    backends=(NATIVE, REFERENCE),
    part="cpu",
    sm_count=1,
)
SM90 = Family(
    name="sm90",
    version=6,
    kv_block=128,
    kv_leaf=512,
    reserve=31.0,
    head_rows=8192,
    validated=({"torch": "2.11.0+cu130", "triton": "3.6.0"},),
    device_type="cuda",
    capability=(9, 0),
    backends=(CUDA, TRITON),
    part="sm90",
    sm_count=132,
)
FAMILIES = (CPU, SM90)
BY_NAME = {family.name: family for family in FAMILIES}
_BY_TYPE = {family.device_type: family for family in FAMILIES}
DEVICE_TYPES = tuple(_BY_TYPE)
"""Types of torch devices that have a backend."""


def of_type(device: torch.device) -> Family | None:
    """Return the family of the device's type, or None if no family has such devices."""
    return _BY_TYPE.get(device.type)


def of_backend(backend: str) -> Family:
    """Return the family of a backend."""
    return next(family for family in FAMILIES if backend in family.backends)


def on_host(device: torch.device) -> bool:
    """Return whether the host can read tensor values on `device` without synchronization."""
    return device.type == CPU.device_type
