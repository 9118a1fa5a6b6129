"""Paths of recordings with planted faults, for `faulty.py` and `faulty_vllm.py`."""

from pathlib import Path


def redirected(job: dict, name: str) -> dict:
    """Return the job with its recording redirected to the sibling directory `name`."""
    out = Path(job["runs"][0]["out"])
    out = out.parent.parent / name / out.name
    out.parent.mkdir(exist_ok=True)
    return job | {"runs": [{"out": str(out)}]}
