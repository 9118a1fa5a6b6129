"""The screenshot docs/bisect.png: `python -m tests.bisection.screenshot [FILE]`, or `make screenshots`.

It needs both engines and Chromium. It compares stock vLLM with stock Megatron-core on the small default model of
`alignkit bisect`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.watch import browser


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = subprocess.run(
            [sys.executable, "-m", "alignkit.cli", "bisect", "stock-vllm", "stock-megatron", "--out", scratch]
        )
        if found.returncode != 1:
            raise SystemExit(f"alignkit bisect: expected exit status 1 (the engines differ), got {found.returncode}")
        picture, url = f"{scratch}/report.png", f"file://{scratch}/report.html"
        browser.chromium(f"--screenshot={picture}", "--window-size=1040,1500", url=url)
        Image.open(picture).convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/bisect.png"))
