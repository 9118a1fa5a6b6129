"""Startup file of each Python process of a NeMo-RL run. Python finds this file by its name on PYTHONPATH.

At startup this file loads only `importing.py` of alignkit. Importing `nemo_rl` later imports
`alignkit.integrations.nemo_rl`, which patches NeMo-RL. At the end this file runs the next `sitecustomize` on the path,
which Python would otherwise skip.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _load(spec):
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_importing = _load(importlib.util.spec_from_file_location("_alignkit_importing", _HERE.parent / "importing.py"))
_importing.WhenImported({"nemo_rl": lambda _: importlib.import_module("alignkit.integrations.nemo_rl")}).begin()

_others = [entry for entry in sys.path if entry and Path(entry).resolve() != _HERE]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None:
    _load(_next)
