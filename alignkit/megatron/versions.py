"""The versions of Megatron-core: the one file that knows them. A release is a row."""

from __future__ import annotations

from dataclasses import dataclass

from alignkit.engines.versions import Row, Versions
from alignkit.megatron.seams import COMMON, HOOK, HYBRID, SINCE_0_19


@dataclass(frozen=True)
class Version:
    """What is different about a version that the adapter runs on.

    hook: whether GPTModel.forward takes `output_processor`; without it alignkit has a path of its own.
    """

    hook: bool

    def __str__(self) -> str:
        return ""


VERSIONS: Versions[Version] = Versions(
    "megatron-core",
    {
        "0.16.1": Row(COMMON, Version(hook=False)),
        "0.17.1": Row(COMMON, Version(hook=False)),
        "0.18.2": Row(COMMON + HOOK + HYBRID, Version(hook=True)),
        "0.19.2": Row(COMMON + HOOK + SINCE_0_19 + HYBRID, Version(hook=True)),
    },
)
