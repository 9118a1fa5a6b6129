"""Device families: groups of devices that compute the same bits under one contract; GPUs by compute capability.

This is the only place with family-specific facts: contract version and constants, validated versions, devices, backends
and kernel library. docs/contract.md states the constants and the validated versions, csrc mirrors some constants
(tests/test_constants.py), and ops/golden_*.json hold the contract ids. `sm_count` changes the choice of kernels, which
tests/ops/choices.json holds, and no bit. README.md lists the GPUs (tests/ops/test_families.py).

Code that depends on a GPU's features asks its row of `GPUS`, not its family.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..contract.constants import K_LEAVES, VOCAB_TILE
from ..errors import BackendError

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
    backends: tuple[str, ...]
    """Backends, fastest first. A later backend computes what an earlier one lacks, to the same bits."""
    part: str
    """Subfolder of csrc with the sources of the kernel library."""
    sm_count: int
    """schedule: SMs of the GPU on which schedules were measured."""
    stored: bool = True
    """True if ops/golden_*.json holds the golden bits. False: each machine computes them, and their digest is part of
    the contract id, so machines with other bits are never compared."""
    digest: str = ""
    """Digest of the golden bits that this machine computed, from `set_digest`; empty if they are stored."""

    @property
    def contract_id(self) -> str:
        """The contract id of the family; raise BackendError if it needs a digest that this process does not have."""
        constants = f"v{VOCAB_TILE}/k{K_LEAVES}/kv{self.kv_block}/leaf{self.kv_leaf}"
        if not self.stored:
            if not self.digest:
                raise BackendError(
                    f"device: the contract id of family {self.name} needs the digest of the golden bits that this "
                    "machine computes, but this process has none"
                )
            constants += f"/golden-{self.digest}"
        return f"alignkit-{self.version}/{self.name}/{constants}"

    def set_digest(self, digest: str) -> None:
        """Complete the contract id by the digest of the golden bits that a device of this machine computed.

        Raises:
            BackendError: another device of this process computed other golden bits.
        """
        assert not self.stored and digest, self.name
        if self.digest not in ("", digest):
            raise BackendError(
                f"device: all {self.name} GPUs of a process must compute the same golden bits, got the digests "
                f"{self.digest} and {digest}"
            )
        self.digest = digest

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
    backends=(CUDA, TRITON),
    part="sm90",
    sm_count=132,
)
SM80 = replace(SM90, name="sm80", version=1, validated=(), backends=(TRITON,), stored=False)
"""Family whose tensor cores add 8 products a step instead of 16. The other constants are those of the kernels: sm90's.

`part` and `sm_count` are sm90's too: no kernel library exists, and schedules are not tuned.
"""
FAMILIES = (CPU, SM90)
"""Families with stored golden bits."""
GPU_FAMILIES = (SM90, SM80)
BY_NAME = {family.name: family for family in FAMILIES}
DEVICE_TYPES = (CPU.device_type, SM90.device_type)
"""Types of torch devices that have a backend."""


@dataclass(frozen=True)
class Gpu:
    """GPUs of one compute capability."""

    capability: tuple[int, int]
    family: Family
    models: str
    """Examples, as in README.md."""
    shared_memory: int
    """hardware: bytes of shared memory that a CTA may use."""
    shown: bool = False
    """True if all tests of the family passed on such GPUs. Others are rejected (validated.py:require_shown)."""

    @property
    def hopper(self) -> bool:
        """True if the kernels for Hopper run: csrc/sm90 and linear/hopper.py. cuBLASLt was validated there too."""
        return self.capability == (9, 0)

    @property
    def pdl(self) -> bool:
        """True if the GPU supports programmatic dependent launch."""
        return self.capability >= (9, 0)

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends, fastest first."""
        return self.family.backends if self.hopper else (TRITON,)

    def __str__(self) -> str:
        return f"{capability_text(self.capability)} ({self.models})"


HOPPER = Gpu((9, 0), SM90, "H100, H200", 227 << 10, shown=True)
GPUS = (
    Gpu((8, 0), SM80, "A100, A30", 163 << 10),
    Gpu((8, 6), SM80, "A10, A40, RTX A6000, RTX 3090", 99 << 10),
    Gpu((8, 9), SM80, "L4, L40S, RTX 4090", 99 << 10),
    HOPPER,
    Gpu((10, 0), SM90, "B200, GB200", 227 << 10),
    Gpu((10, 3), SM90, "B300, GB300", 227 << 10),
    Gpu((12, 0), SM90, "RTX 5090, RTX PRO 6000", 99 << 10),
)
"""Known GPUs. Those that are not shown have predicted arithmetic, by a published model of tensor cores
(arXiv 2511.10909), and kernels that compile and fit into their shared memory (tests/ops/test_targets.py)."""


def capability_text(capability: tuple[int, int]) -> str:
    """Return a compute capability as text, such as 9.0."""
    return ".".join(map(str, capability))


def indexed(device: torch.device) -> torch.device:
    """Return a device with its index: a GPU without an index is the current one."""
    if device.type != SM90.device_type or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def gpu(device: torch.device | int) -> Gpu:
    """Return the row of `GPUS` of a GPU, by device or index; raise BackendError if there is none."""
    index = device if isinstance(device, int) else indexed(device).index
    return _gpu(index)


@functools.cache
def _gpu(index: int) -> Gpu:
    capability = torch.cuda.get_device_capability(index)
    for known in GPUS:
        if known.capability == capability:
            return known
    raise BackendError(
        f"device: must have compute capability {', '.join(map(str, GPUS))}, got {torch.cuda.get_device_name(index)} "
        f"with {capability_text(capability)}"
    )


def of_type(device: torch.device) -> Family | None:
    """Return the family of a device, for GPUs by compute capability; None if no family has devices of its type.

    Raises:
        BackendError: no family has GPUs of this compute capability.
    """
    if on_host(device):
        return CPU
    return gpu(device).family if device.type in DEVICE_TYPES else None


def of_backend(backend: str) -> Family:
    """Return the first family of `FAMILIES` with a backend; all families with it have the same slower backends."""
    return next(family for family in FAMILIES if backend in family.backends)


def on_host(device: torch.device) -> bool:
    """Return whether the host can read tensor values on `device` without synchronization."""
    return device.type == CPU.device_type
