"""Collection rule: test_verl.py needs ALIGNKIT_FRAMEWORKS, a folder that contains verl. `make test` sets it."""

import os
from pathlib import Path

if not (Path(os.environ.get("ALIGNKIT_FRAMEWORKS") or "-") / "verl").is_dir():
    collect_ignore = ["test_verl.py"]
