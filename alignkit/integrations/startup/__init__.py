"""Folder for PYTHONPATH, for frameworks whose processes inherit only the environment.

Python finds `sitecustomize.py` here by its name. Every file here becomes a top-level module of those processes.
"""
