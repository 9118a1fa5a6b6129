"""``python -m alignkit.integrations.startup`` prints the folder for PYTHONPATH; users' recipes contain this command."""

from pathlib import Path

print(Path(__file__).resolve().parent)
