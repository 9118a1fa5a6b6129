"""An engine job: one process that runs an engine and writes the outputs of its runs.

`rollout` and `train` document the fields of a job's `spec`; alignkit.bisect has jobs of its own. `execute` runs them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

DTYPES = ("bfloat16", "float32")
"""Names of the dtypes that engines of a job support."""


@dataclass(eq=False)
class Job:
    """One engine in one process, started as `python -m <module> <name>.json`."""

    name: str
    module: str
    spec: dict
    needs: list[Path] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Number of engine ranks."""
        sizes = [self.spec.get(name, 1) for name in ("tp", "dp", "pp", "cp")]
        return max(math.prod(sizes), self.spec.get("ep", 1))

    @property
    def outputs(self) -> list[Path]:
        return [Path(run["out"]) for run in self.spec["runs"]]

    def drop_runs(self, missing: set[Path]) -> None:
        """Remove the runs whose input is in `missing`."""
        self.spec["runs"] = [run for run in self.spec["runs"] if "in" not in run or Path(run["in"]) not in missing]

    def write(self, path: Path) -> None:
        """Write `spec` as JSON."""
        path.write_text(json.dumps(self.spec, indent=1) + "\n")


def draw_prompts(vocab: int, seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return random prompts of token ids, one per length, deterministic in the seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator, device="cpu").tolist() for n in lengths]
