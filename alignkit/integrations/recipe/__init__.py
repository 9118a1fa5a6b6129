"""What alignkit refuses of a framework's recipe, and what it does with the rest: `alignkit doctor --recipe`, and at a run's start."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from alignkit.errors import InputError, UnsupportedError

from .reading import Recipe, Setting, from_config, read

REFUSED, PASSES, ADD, UNKNOWN = "refused", "passes", "add", "unknown"
_TABLES = {"verl": "verl", "NeMo-RL": "nemo_rl", "slime": "slime"}


@dataclass(frozen=True)
class Finding:
    """What is said of one setting. verdict: one of the words above. change: what to do about it, if anything can be done."""

    setting: Setting
    verdict: str
    why: str
    change: str = ""

    def __str__(self) -> str:
        where = f"{self.setting.where}: " if self.setting.where else ""
        says = f"{where}{self.setting}: {self.verdict}"
        return says + (f": {self.why}" if self.why else "") + (f" ({self.change})" if self.change else "")


def examine(recipe: Recipe) -> list[Finding]:
    """What alignkit says of the settings of a recipe that have to do with its numbers, in their order."""
    return list(_table(recipe).judge(recipe))


def check(framework: str, config: dict[str, Any]) -> None:
    """Raises UnsupportedError naming all that alignkit refuses of a configuration that `framework` has composed."""
    refused = [str(f) for f in examine(from_config(framework, config)) if f.verdict == REFUSED]
    if refused:
        raise UnsupportedError(f"alignkit cannot keep this recipe aligned: {'; '.join(refused)}")


def report(path: Path) -> tuple[list[str], bool]:
    """(what is said of the recipe in a file, whether nothing of it is refused)."""
    recipe = read(path)
    findings = examine(recipe)
    said = [f"{path}: a recipe of {recipe.framework}"]
    said += [f"  {f}" for verdict in (REFUSED, UNKNOWN, ADD, PASSES) for f in findings if f.verdict == verdict]
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in (REFUSED, PASSES)}
    rest = len(recipe.settings.keys() - {f.setting.key for f in findings})
    said.append(f"{counts[REFUSED]} refused, {counts[PASSES]} pass, {rest} have no part in the numbers")
    if (line := _missing(recipe, findings)) is not None:
        said.append(f"without {line} the run is stock")
    return said, not counts[REFUSED]


def survey(folder: Path) -> tuple[list[str], bool]:
    """(a line for each recipe below a folder that is trained by Megatron-core, and how many of them are served; whether all are)."""
    said, served, others = [], 0, 0
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".sh")):
        try:
            recipe = read(path)
        except InputError:  # no recipe
            continue
        if not _table(recipe).by_megatron(recipe):
            others += 1
            continue
        findings = examine(recipe)
        refused = [f for f in findings if f.verdict == REFUSED]
        served += not refused
        reasons = "; ".join(f"{f.setting}: {f.why}" for f in refused)
        line = _missing(recipe, findings)
        how = "served" if line is None else f"served, with {line}"
        said.append(f"{path.relative_to(folder)}: " + (f"refused: {reasons}" if refused else how))
    found = len(said)
    if not found + others:
        raise InputError(f"recipe: none of verl, NeMo-RL or slime below {folder}")
    said.append(f"{served} of {found} recipes that Megatron-core trains are served; {others} are trained otherwise")
    return said, served == found


def _missing(recipe: Recipe, findings: list[Finding]) -> Setting | None:
    """The line that aligns the framework, if there is one and the recipe does not show it."""
    line = getattr(_table(recipe), "LINE", None)
    return next((f.setting for f in findings if f.verdict == ADD and (f.setting.key, f.setting.value) == line), None)


def _table(recipe: Recipe) -> Any:
    return import_module(f"{__name__}.{_TABLES[recipe.framework]}")


__all__ = [
    "ADD",
    "PASSES",
    "REFUSED",
    "UNKNOWN",
    "Finding",
    "Recipe",
    "Setting",
    "check",
    "examine",
    "read",
    "report",
    "survey",
]
