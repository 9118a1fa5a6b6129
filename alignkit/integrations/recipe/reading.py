"""Parser of recipes: YAML files, and shell scripts that call a framework, as tables of settings with line numbers.

Scripts are not executed. Variables take the values that the script assigns, or the defaults in `${NAME:-default}`.
tests/integrations/test_recipe.py holds the supported forms of scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignkit.errors import InputError

FRAMEWORKS = {"verl": "actor_rollout_ref.", "NeMo-RL": "policy.", "slime": "--"}
"""Framework -> prefix of its settings."""
MODEL_OF_SLIME = "--hf-checkpoint"
"""slime's argument for the model, which distinguishes slime's scripts from those of other programs."""


@dataclass(frozen=True)
class Setting:
    """One setting with its YAML value. where: ``file:line``, or empty if it comes from no file."""

    key: str
    value: Any
    where: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Recipe:
    """The settings of a recipe by key; for a repeated key, the one in effect."""

    framework: str
    settings: dict[str, Setting]

    def get(self, key: str, default: Any = None) -> Any:
        found = self.settings.get(key)
        return default if found is None else found.value


def from_config(framework: str, config: dict[str, Any]) -> Recipe:
    """Return the recipe for a configuration that a framework has composed."""
    return Recipe(framework, {key: Setting(key, value) for key, value in _flat(config)})


def read(path: Path) -> Recipe:
    """Return the recipe in a file; raise InputError if the file is not a recipe of a supported framework."""
    try:
        settings = _yaml(path) if path.suffix in (".yaml", ".yml") else _shell(path)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"recipe: cannot read {path}: {e}") from None
    counts = {name: sum(key.startswith(begins) for key in settings) for name, begins in FRAMEWORKS.items()}
    # Scripts of other programs have options too, and some slime files contain only model sizes.
    if MODEL_OF_SLIME not in settings:
        del counts["slime"]
    framework = max(counts, key=lambda name: counts[name])
    if not counts[framework]:
        raise InputError(
            f"recipe: {path}: must contain settings of verl (actor_rollout_ref.*), NeMo-RL (policy.*) or slime "
            f"({MODEL_OF_SLIME}), got {len(settings)} other settings"
        )
    return Recipe(framework, settings)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _parsed(text: str) -> Any:
    """Return a value parsed as YAML, or the text itself if it is not valid YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Setting]:
    import yaml

    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except yaml.YAMLError as e:
        raise InputError(f"recipe: {path} is not valid YAML: {e}") from None
    own: dict[str, Setting] = {}

    def walk(node, key: str) -> None:
        if isinstance(node, yaml.MappingNode) and node.value:
            for name, inner in node.value:
                walk(inner, f"{key}.{name.value}" if key else str(name.value))
        else:
            value = _parsed(yaml.serialize(node, Dumper=yaml.SafeDumper))
            own[key] = Setting(key, value, f"{path}:{node.start_mark.line + 1}")

    if root is not None:
        walk(root, "")
    parents = own.pop("defaults", Setting("", [])).value
    found: dict[str, Setting] = {}
    for parent in [parents] if isinstance(parents, str) else parents or []:
        if not isinstance(parent, str) or parent == "_self_":
            continue
        file = path.parent / (parent if parent.endswith((".yaml", ".yml")) else f"{parent}.yaml")
        found["defaults." + parent] = Setting("defaults." + parent, parent, str(path))
        if file.is_file() and file.resolve() not in seen:
            found |= _yaml(file, (*seen, path.resolve()))
    return {key: _resolved(setting, found | own) for key, setting in (found | own).items()}


# Patterns of YAML values and of shell lines; tests/integrations/test_recipe.py has an example of each form.
_WHOLE = re.compile(r"\$\{([\w.]+)\}")


def _resolved(setting: Setting, settings: dict[str, Setting], depth: int = 8) -> Setting:
    """Return the setting with a value ``${other}`` replaced by that setting's value."""
    match = _WHOLE.fullmatch(setting.value) if isinstance(setting.value, str) else None
    if match is None or not depth or match[1] not in settings:
        return setting
    return Setting(setting.key, _resolved(settings[match[1]], settings, depth - 1).value, setting.where)


_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;(]*)\s*(?:#.*)?$")
_NAMED = re.compile(r"\$(?:\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
_OVERRIDE = re.compile(r"(?:^|[\s\"'(])[+~]*([A-Za-z_][\w]*(?:\.[\w]+)*)=((?:\"[^\"]*\"|'[^']*'|[^\s\"'\\)])*)")
_FLAG = re.compile(r"(?:^|\s)(--[a-z][\w-]*)(?:[=\s]+((?:\"[^\"]*\"|'[^']*'|(?!--)[^\s\\])+))?")
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+\"?(?:\$\{?\w+\}?/)?([^\s\"]+)")
_GROUPS = ("model_engine",)
"""Hydra overrides without a dot that select a configuration file."""


def _shell(path: Path, variables: dict[str, str] | None = None) -> dict[str, Setting]:
    variables = {} if variables is None else variables
    found: dict[str, Setting] = {}

    def value_of(text: str) -> str:
        for _ in range(8):
            new = _NAMED.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
            if new == text:
                break
            text = new
        return text

    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        where = f"{path}:{number}"
        if (sourced := _SOURCED.match(line)) and (path.parent / sourced[1]).is_file():
            found |= _shell(path.parent / sourced[1], variables)
        elif (assigned := _ASSIGNED.match(line)) and "." not in assigned[1] and assigned[1] not in _GROUPS:
            variables[assigned[1]] = value_of(assigned[2].strip("\"'"))
        else:
            for match in _OVERRIDE.finditer(line):
                if "." in match[1] or match[1] in _GROUPS:
                    key, value = match[1], value_of(match[2].strip("\"'"))
                    found[key] = Setting(key, _parsed(value), where)
            for match in _FLAG.finditer(line):
                value = True if match[2] is None else _parsed(value_of(match[2].strip("\"'")))
                found[match[1]] = Setting(match[1], value, where)
    return found
