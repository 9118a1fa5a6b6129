"""Processes that tests start on a CPU are forks of one that has imported what they need: that takes longer than most tests."""

import multiprocessing

import torch

METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
"""CUDA cannot be used in a fork of a process that has looked for a device."""
_imported = []


def preload(*modules: str) -> None:
    """Has them imported there too. To be called where tests are collected: it is too late once a process has been started."""
    for module in ("tests.preload", *modules):
        if module not in _imported:
            _imported.append(module)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_imported)
