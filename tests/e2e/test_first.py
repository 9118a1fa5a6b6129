"""The README's first example (examples/first.py): real vLLM and Megatron-core in one process on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "first.py"


@pytest.mark.slow
def test_the_first_example_prints_equal_bits(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "16 of 16 logprobs are bit-equal"
