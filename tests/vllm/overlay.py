"""A vLLM of another version on this CPU: Python code of an unpacked wheel, compiled kernels of the installed vLLM.

vLLM calls these kernels when its worker starts; alignkit does not. With the overlay first on PYTHONPATH, every process
of an engine imports it. ``python -m tests.vllm.overlay PACKAGE VERSION FOLDER`` makes one and prints its path.
"""

import importlib.util
import sys
from pathlib import Path


def make_overlay(package: Path, version: str, folder: Path, build: str = "+cpu") -> Path:
    """Write into the empty `folder` a vllm package of `package`'s Python code, and return `folder` for PYTHONPATH.

    build: the local part of the version in its metadata, where vLLM reads its build target; "" for CUDA.
    """
    (installed,) = importlib.util.find_spec("vllm").submodule_search_locations
    (folder / "vllm").mkdir(parents=True)
    for source in [*package.iterdir(), *Path(installed).glob("*.so")]:
        if source.name != "__pycache__":
            (folder / "vllm" / source.name).symlink_to(source.resolve())
    metadata = folder / f"vllm-{version}{build}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}{build}\n")
    return folder


if __name__ == "__main__":
    print(make_overlay(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
