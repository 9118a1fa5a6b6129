"""Folder for PYTHONPATH, for frameworks whose processes inherit only the environment.

Python finds `sitecustomize.py` here by its name. Add no other file: every file here becomes a top-level module of the
processes. Users' recipes contain the module name of this package.
"""
