"""The folder to put on PYTHONPATH, for frameworks whose processes inherit an environment and nothing else."""
