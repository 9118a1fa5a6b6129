"""Constants that the kernels share with Python, read from kernels.h, which csrc includes."""

import re
from pathlib import Path

KERNELS = {
    name: int(number) << int(shift or 0)
    for name, number, shift in re.findall(
        r"\b(\w+) = (\d+)(?: << (\d+))?(?=[;, ])", re.sub("//.*", "", Path(__file__).with_name("kernels.h").read_text())
    )
}
"""Name -> value."""
