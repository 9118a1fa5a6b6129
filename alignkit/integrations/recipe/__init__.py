"""Check of a framework's recipe, for `alignkit recipe` and at the start of a run. No engine is imported.

A framework is a module here (`verl`, `nemo_rl`, `slime`) with functions `judge` and `uses_megatron` and the optional
`ENABLING_SETTING`, plus an entry in `_MODULES` and in `reading.FRAMEWORKS`. `judge` must yield a finding for every
setting that can affect numerics, because the other settings are reported as harmless. Only UNSUPPORTED rejects a
recipe; UNKNOWN is printed, and the engines decide when they start. `reading` parses the files, and `engines` checks the
settings of the engines. docs/verl.md and docs/nemo-rl.md show the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from alignkit.errors import InputError, UnsupportedError

from .reading import Recipe, Setting, from_config, read

UNSUPPORTED, SUPPORTED, ADD, UNKNOWN = "unsupported", "supported", "add", "unknown"
"""Verdicts on a setting, as printed."""
_MODULES = {"verl": "verl", "NeMo-RL": "nemo_rl", "slime": "slime"}
"""Framework -> its module in this package."""


@dataclass(frozen=True)
class Finding:
    """The verdict on one setting, with the reason (`why`) and the remedy (`change`), if any."""

    setting: Setting
    verdict: str
    why: str
    change: str = ""

    def __str__(self) -> str:
        where = f"{self.setting.where}: " if self.setting.where else ""
        says = f"{where}{self.setting}: {self.verdict}"
        return says + (f": {self.why}" if self.why else "") + (f" ({self.change})" if self.change else "")


def examine(recipe: Recipe) -> list[Finding]:
    """Return the findings on all settings of a recipe that affect numerics, in order."""
    return list(_table(recipe).judge(recipe))


def check(framework: str, config: dict[str, Any]) -> None:
    """Raise UnsupportedError with all unsupported settings of a configuration that `framework` has composed."""
    refused = [str(f) for f in examine(from_config(framework, config)) if f.verdict == UNSUPPORTED]
    if refused:
        raise UnsupportedError(f"recipe: unsupported settings: {'; '.join(refused)}")


def report(path: Path) -> tuple[list[str], bool]:
    """Check the recipe in a file; return (lines of text, whether all settings are supported)."""
    recipe = read(path)
    findings = examine(recipe)
    lines = [f"{path}: {recipe.framework} recipe"]
    lines += [f"  {f}" for verdict in (UNSUPPORTED, UNKNOWN, ADD, SUPPORTED) for f in findings if f.verdict == verdict]
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in (UNSUPPORTED, SUPPORTED)}
    rest = len(recipe.settings.keys() - {f.setting.key for f in findings})
    lines.append(f"{counts[UNSUPPORTED]} unsupported, {counts[SUPPORTED]} supported, {rest} do not affect numerics")
    if (setting := _missing(recipe, findings)) is not None:
        lines.append(f"without {setting} the run is not aligned")
    return lines, not counts[UNSUPPORTED]


def survey(folder: Path) -> tuple[list[str], bool]:
    """Check the Megatron-core recipes in a folder; return (lines of text, whether all recipes are supported)."""
    lines, supported, others = [], 0, 0
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".sh")):
        try:
            recipe = read(path)
        except InputError:  # not a recipe
            continue
        if not _table(recipe).uses_megatron(recipe):
            others += 1
            continue
        findings = examine(recipe)
        refused = [f for f in findings if f.verdict == UNSUPPORTED]
        supported += not refused
        reasons = "; ".join(f"{f.setting}: {f.why}" for f in refused)
        setting = _missing(recipe, findings)
        verdict = SUPPORTED if setting is None else f"{SUPPORTED}; add {setting}"
        lines.append(f"{path.relative_to(folder)}: " + (f"{UNSUPPORTED}: {reasons}" if refused else verdict))
    found = len(lines)
    if not found + others:
        raise InputError(f"recipe: {folder} contains no recipes of verl, NeMo-RL or slime (*.yaml, *.yml, *.sh)")
    lines.append(
        f"{supported} of {found} Megatron-core recipes are supported; {others} recipes use other training backends"
    )
    return lines, supported == found


def _missing(recipe: Recipe, findings: list[Finding]) -> Setting | None:
    """Return the setting that enables alignkit in the framework, if the recipe lacks it."""
    enabling = getattr(_table(recipe), "ENABLING_SETTING", None)
    return next(
        (f.setting for f in findings if f.verdict == ADD and (f.setting.key, f.setting.value) == enabling), None
    )


def _table(recipe: Recipe) -> Any:
    return import_module(f"{__name__}.{_MODULES[recipe.framework]}")


__all__ = [
    "ADD",
    "SUPPORTED",
    "UNKNOWN",
    "UNSUPPORTED",
    "Finding",
    "Recipe",
    "Setting",
    "check",
    "examine",
    "read",
    "report",
    "survey",
]
