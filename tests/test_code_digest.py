"""The source digest of measured results (benchmarks/lib/code.py) changes with the code alone.

Comments, docstrings and formatting of Python and CUDA files must not change it: stored rows would need new runs.
"""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks/lib/code.py"
SPEC = importlib.util.spec_from_file_location("code_digest", FILE)
code = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(code)

PYTHON = '''"""A module."""

X = 1  # one
"""A constant."""


def f(a, b):
    """Add."""
    # in order
    return g(
        a,
        f"{a} and {b!r:>{X}}",
    )
'''
CUDA = """// A kernel.
#define TWO(x) x, \\
               x
__global__ void add(float* y /* out */) {
  const char* text = "// not a comment";
  y[0] += 1.0f;
}
"""


def digest(folder: Path, name: str, source: str) -> str:
    path = folder / name
    path.write_text(source)
    return code.digest([path], folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# one", "# the first"),
        ("  # one", ""),
        ('"""A module."""', '"""A module.\n\nWith two paragraphs.\n"""'),
        ('"""A constant."""\n', ""),
        ('    """Add."""\n', ""),
        ("    # in order\n", "\n"),
        ("        a,\n", "        a,  # first\n"),
        ('g(\n        a,\n        f"{a} and {b!r:>{X}}",\n    )', 'g(a, f"{a} and {b!r:>{X}}")'),
    ],
)
def test_text_and_formatting_of_python_do_not_count(tmp_path, old, new):
    assert old in PYTHON
    assert digest(tmp_path, "a.py", PYTHON) == digest(tmp_path, "a.py", PYTHON.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("X = 1", "X = 2"),
        ("X = 1", "Y = 1"),
        (" and ", " or "),
        ("{b!r", "{b!s"),
        ("(a, b)", "(b, a)"),
        ("return g", "return\n    g"),
        ("    return", "    if a:\n        return"),
    ],
)
def test_code_of_python_counts(tmp_path, old, new):
    assert old in PYTHON
    assert digest(tmp_path, "a.py", PYTHON) != digest(tmp_path, "a.py", PYTHON.replace(old, new))


def test_indentation_counts(tmp_path):
    inside, outside = "if a:\n    b()\n    c()\n", "if a:\n    b()\nc()\n"
    assert digest(tmp_path, "a.py", inside) != digest(tmp_path, "a.py", outside)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// A kernel.\n", ""),
        (" /* out */", ""),
        ("  y[0] += 1.0f;", "\ty[0]  +=\n    1.0f ;"),
        ("x, \\\n               x", "x, x"),
    ],
)
def test_text_and_formatting_of_cuda_do_not_count(tmp_path, old, new):
    assert old in CUDA
    assert digest(tmp_path, "a.cu", CUDA) == digest(tmp_path, "a.cu", CUDA.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("1.0f", "2.0f"), ("// not a", "// no"), ("y[0]", "z[0]")])
def test_code_of_cuda_counts(tmp_path, old, new):
    assert old in CUDA
    assert digest(tmp_path, "a.cu", CUDA) != digest(tmp_path, "a.cu", CUDA.replace(old, new))


def test_the_name_of_a_file_counts(tmp_path):
    assert digest(tmp_path, "a.py", PYTHON) != digest(tmp_path, "b.py", PYTHON)
