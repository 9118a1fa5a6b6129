"""Directories of monitor records for the tests of `alignkit watch`, written by the real monitor."""

import json

import torch

from alignkit.drift import Monitor
from alignkit.drift.monitor.records import records_name

CONTRACT = "alignkit-3/cpu/v128/k8/kv32/leaf128"


def write(directory, steps, rank=0, off=None, tokens=None, **options):
    """Write records of `steps`. `off` maps steps to the drift of sequence 1, position 2."""
    options = {"contract": CONTRACT, "on_difference": lambda error: None, "sinks": [], **options}
    with Monitor(directory, rank=rank, **options) as monitor:
        for step in steps:
            rollout = torch.full((2, 4), -1.5)
            training = rollout.clone()
            training[1, 2] += (off or {}).get(step, 0.0)
            monitor.log(step, rollout, training, tokens=torch.full((2, 4), 4321) if tokens is None else tokens)


def append(directory, rank=0, **changes):
    """Append a copy of the rank's last record with `changes`."""
    path = directory / records_name(rank)
    record = json.loads(path.read_text().splitlines()[-1])
    with open(path, "a") as file:
        file.write(json.dumps({**record, **changes}) + "\n")
