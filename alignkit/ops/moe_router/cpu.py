from .reference import backward, forward  # noqa: F401
