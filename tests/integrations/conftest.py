"""Collection rule: the verl tests need ALIGNKIT_FRAMEWORKS, a folder that contains verl."""

import os
from pathlib import Path

if not (Path(os.environ.get("ALIGNKIT_FRAMEWORKS") or "-") / "verl").is_dir():
    collect_ignore = ["test_verl.py"]
