"""Versions of Megatron-core, one row each; no other file depends on a version.

A new row needs a run of tests/megatron with that version. docs/megatron.md lists the versions. The features of a row
select hook points: "output_processor", "hybrid" (HybridModel), "cross_entropy_group" (the loss takes its group).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alignkit.engines.versions import Row, Versions


@dataclass(frozen=True)
class Version:
    """Facts of a supported version.

    hook: GPTModel.forward accepts `output_processor`. Without it `logprobs` passes its request by a context variable.
    """

    hook: bool

    def __str__(self) -> str:
        """Return the text that error messages append to a version: nothing, as rows are full versions."""
        return ""


VERSIONS: Versions[Version] = Versions(
    "megatron-core",
    "megatron.core",
    Path(__file__).parent,
    {
        "0.16.1": Row("", Version(hook=False)),
        "0.17.1": Row("", Version(hook=False)),
        "0.18.2": Row("output_processor hybrid", Version(hook=True)),
        "0.19.2": Row("output_processor hybrid cross_entropy_group", Version(hook=True)),
    },
)
