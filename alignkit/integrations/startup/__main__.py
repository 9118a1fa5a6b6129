"""Prints the folder for PYTHONPATH: ``python -m alignkit.integrations.startup``."""

from pathlib import Path

print(Path(__file__).resolve().parent)
