"""Versions of Megatron-core, one row each; no other file depends on a version.

A new row needs its hook points in `hook_points` and a run of tests/megatron with that version. docs/megatron.md lists
the versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignkit.engines.versions import Row, Versions
from alignkit.megatron.hook_points import COMMON, FROM_0_19, HOOK, HYBRID


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
    {
        "0.16.1": Row(COMMON, Version(hook=False)),
        "0.17.1": Row(COMMON, Version(hook=False)),
        "0.18.2": Row(COMMON + HOOK + HYBRID, Version(hook=True)),
        "0.19.2": Row(COMMON + HOOK + FROM_0_19 + HYBRID, Version(hook=True)),
    },
)
