"""Errors that alignkit raises. Each message names the argument or feature that caused it.

Public: documented in docs/api/alignkit.md. `alignkit` commands derive their exit status from the class.
"""


class AlignkitError(Exception):
    """Base class of all errors that alignkit raises deliberately."""


class InputError(AlignkitError, ValueError):
    """An argument outside its documented range; the message starts with the argument's name."""


class UnsupportedError(AlignkitError, NotImplementedError):
    """A feature, version or device that alignkit cannot keep aligned; the message names it."""


class BackendError(AlignkitError, RuntimeError):
    """A backend that is unavailable for an op on this machine, or a failed call of a kernel or library."""


class DriftError(AlignkitError):
    """Logprobs of an aligned run that are not bit-equal.

    Attributes:
        step: Training step of the difference, or None.
        rank: Rank that found the difference, or None.
        token: First differing token, a `drift.TokenDifference`, or None.
        replay: Path of the file with the batch of the run's first difference; None if it could not be written.
    """

    def __init__(
        self, message: str, *, step: int | None = None, rank: int | None = None, token=None, replay=None
    ) -> None:
        super().__init__(message)  # only the message: the error must be picklable, e.g. between Ray workers
        self.step, self.rank, self.token, self.replay = step, rank, token, replay
