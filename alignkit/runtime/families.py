"""The device families: whose bits are of one contract. What is known of one is said here and nowhere else: its id and the
constants of its contract, the versions it was shown with, its golden bits, its devices, its backends and its library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..contract.constants import K_LEAVES, VOCAB_TILE

PACKAGE = Path(__file__).parents[1]
NATIVE, REFERENCE, TRITON, CUDA = "cpu", "reference", "triton", "cuda"
"""Backends: kernels in C++, torch, Triton (and cuBLASLt, which is held to its bits), and in CUDA."""


@dataclass(eq=False)
class Family:
    name: str
    version: int
    """Of the contract: a change of bits on one family leaves the logprobs saved on the others comparable."""
    kv_block: int
    """Keys and values are visited in blocks of this many positions, from position 0."""
    kv_leaf: int
    """A softmax of its own has each leaf of this many positions, a whole number of blocks, from position 0."""
    reserve: float
    """By how much a score may exceed what a leaf's scores are measured by, nearly. As an exponent of e on the CPU, of 2 on GPUs."""
    head_rows: int | None
    """Gradient of the head's weight: rows of one chain; the chains of later rows are added in order. None: one chain."""
    shown: tuple[dict[str, str], ...]
    """The combinations of versions that its bits were shown with."""
    device_type: str
    """torch's name of its devices."""
    capability: tuple[int, int] | None
    """Which of these are its: by compute capability; None: all."""
    backends: tuple[str, ...]
    """Fastest first. What one lacks, those after it compute: the same bits."""
    part: str
    """Of csrc: the sources of its library."""
    multiprocessors: int
    """That its schedules were measured with. No bit depends on it."""

    @property
    def contract_id(self) -> str:
        return f"alignkit-{self.version}/{self.name}/v{VOCAB_TILE}/k{K_LEAVES}/kv{self.kv_block}/leaf{self.kv_leaf}"

    @property
    def golden(self) -> Path:
        return PACKAGE / f"golden_{self.name}.json"

    @property
    def library(self) -> Path:
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
    shown=({"torch": "2.13.0+cpu"}, {"torch": "2.13.0+cu130"}),
    device_type="cpu",
    capability=None,
    backends=(NATIVE, REFERENCE),
    part="cpu",
    multiprocessors=1,
)
SM90 = Family(
    name="sm90",
    version=6,
    kv_block=128,
    kv_leaf=512,
    reserve=31.0,
    head_rows=8192,
    shown=({"torch": "2.11.0+cu130", "triton": "3.6.0"},),
    device_type="cuda",
    capability=(9, 0),
    backends=(CUDA, TRITON),
    part="sm90",
    multiprocessors=132,
)
FAMILIES = (CPU, SM90)
BY_NAME = {family.name: family for family in FAMILIES}
_BY_TYPE = {family.device_type: family for family in FAMILIES}


def of_type(device: torch.device) -> Family | None:
    """The family that devices of this type may be of; None: of none."""
    return _BY_TYPE.get(device.type)


def of_backend(backend: str) -> Family:
    """The family whose bits it computes."""
    return next(family for family in FAMILIES if backend in family.backends)


def on_host(device: torch.device) -> bool:
    """Whether the values of its tensors can be looked at without waiting."""
    return device.type == CPU.device_type
