"""The package: importing it imports no engine, and each half works where the other engine is not installed."""
import re
import subprocess
import sys

import pytest

from alignkit import native

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_alignkit_imports_no_engine():
    python("import sys, alignkit, alignkit.ops, alignkit.drift, alignkit.vllm, alignkit.cli, alignkit.doctor\n"
           "engines = {'vllm', 'megatron', 'transformers', 'matplotlib'} & set(sys.modules)\n"
           "assert not engines, engines")


@pytest.mark.parametrize("blocked,code", [
    ("megatron", "import alignkit.vllm\nwith alignkit.patch_vllm():\n    assert alignkit.vllm.status()['patched']"),
    ("vllm", "import alignkit.megatron\nwith alignkit.patch_megatron(2000):\n"
             "    assert alignkit.megatron.status()['patched']"),
])
def test_each_half_works_without_the_other_engine(blocked, code):
    python(BLOCK.format(blocked=blocked) + "import alignkit\n" + code)


def test_a_missing_engine_is_named():
    for blocked, call in (("vllm", "alignkit.patch_vllm()"), ("megatron", "alignkit.patch_megatron(2000)")):
        out = python(BLOCK.format(blocked=blocked) + f"import alignkit\ntry:\n    {call}\n"
                     "except (alignkit.UnsupportedError, ModuleNotFoundError) as e:\n    print(e)")
        assert blocked in out.lower(), out


def test_the_kernels_of_this_checkout_are_built():
    assert native.available()


def test_no_code_is_shared_between_instruction_sets():
    """A function that the linker merges runs on every processor, but was compiled for one."""
    symbols = subprocess.run(["nm", "--demangle", native.LIBRARY], capture_output=True, text=True, check=True).stdout
    shared = [line for line in symbols.splitlines() if re.match(r"[0-9a-f]+ [WVu] ", line)
              and not re.search(r"alignkit::(generic|avx2|avx512)::", line)]
    assert not shared, shared
