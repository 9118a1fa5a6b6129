from .reference import combine, weigh  # noqa: F401
