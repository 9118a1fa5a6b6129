"""Where the recordings of planted faults go."""

from pathlib import Path


def named(job: dict, name: str) -> dict:
    """The job, with its recording in the directory `name` beside its own."""
    out = Path(job["runs"][0]["out"])
    out = out.parent.parent / name / out.name
    out.parent.mkdir(exist_ok=True)
    return job | {"runs": [{"out": str(out)}]}
