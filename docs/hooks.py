"""Hooks of mkdocs: the home page is the README, links to sources work, and every public name is documented.

mkdocs.yml names this file; mkdocs calls the ``on_*`` functions by their names. New public modules go to `PUBLIC`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "alignkit",
    "alignkit.ops",
    "alignkit.drift",
    "alignkit.bisect",
    "alignkit.megatron",
    "alignkit.vllm",
    "alignkit.dist",
    "alignkit.identity",
)
"""Modules whose `__all__` is public API, as docs/stability.md lists them (tests/test_release.py)."""
LINK = re.compile(r"(?P<open>\]\(|src=\")(?P<target>[^)\s#\"]+)(?P<anchor>#[^)\s\"]*)?(?P<close>[)\"])")
SOURCES = "source"
"""Folder of the site that holds copies of the repository's files to which pages link."""


def on_config(config):
    """Raise PluginError unless every public name has a docstring and an entry in the API reference."""
    entries = "\n".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
    listed = {name.rsplit(".", 1)[-1] for name in re.findall(r"^::: (\S+)", entries, re.MULTILINE)}
    faults = []
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            item = getattr(importlib.import_module(module), name)
            if not (inspect.isclass(item) or inspect.isroutine(item)):
                continue
            if not inspect.getdoc(item):
                faults.append(f"{module}.{name}: needs a docstring")
            if name not in listed:
                faults.append(f"{module}.{name}: needs an entry (`::: ...{name}`) in docs/api")
    if faults:
        raise PluginError("\n".join(faults))
    return config


def on_files(files, config):
    """Add the README as the home page, and every file of the repository to which a page links."""
    files.append(File.generated(config, "index.md", content=_home((ROOT / "README.md").read_text())))
    pages = [(file, file.content_string) for file in files if file.is_documentation_page()]
    for file, content in pages:
        folder = Path("docs", file.src_uri).parent
        for match in LINK.finditer(content):
            if (path := _outside(folder, match["target"])) and not files.get_file_from_path(_uri(path)):
                files.append(File.generated(config, _uri(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links that leave docs/ to the copies of their targets."""
    folder = Path("docs", page.file.src_uri).parent
    up = "../" * page.file.src_uri.count("/")

    def replaced(match):
        path = _outside(folder, match["target"])
        return f"{match['open']}{up}{_uri(path)}{match['close']}" if path else match[0]

    return LINK.sub(replaced, markdown)


def _home(readme: str) -> str:
    """Return the README with its links relative to docs/."""

    def replaced(match):
        target = match["target"]
        if ":" in target:
            return match[0]
        target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"{match['open']}{target}{match['anchor'] or ''}{match['close']}"

    return LINK.sub(replaced, readme)


def _outside(folder: Path, target: str) -> Path | None:
    """Return the path from the root of a file outside docs/ to which a page in `folder` links; None for other links."""
    if ":" in target or target.startswith("#"):
        return None
    path = (ROOT / folder / target).resolve()
    if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT) or not path.is_file():
        return None  # mkdocs itself reports a link whose target does not exist
    return path.relative_to(ROOT)


def _uri(path: Path) -> str:
    """Return the place of a copied file in the site; pictures keep their suffix, sources are served as text."""
    suffix = "" if path.suffix in (".png", ".svg") else ".txt"
    return f"{SOURCES}/{path.as_posix()}{suffix}"
