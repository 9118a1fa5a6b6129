"""The errors alignkit raises. Each names the argument or feature that caused it."""


class AlignkitError(Exception):
    """Base of every error that alignkit raises on purpose."""


class InputError(AlignkitError, ValueError):
    """An argument is out of its documented range; the message starts with its name."""


class UnsupportedError(AlignkitError, NotImplementedError):
    """A feature, version or device that alignkit cannot keep aligned, refused by name."""


class BackendError(AlignkitError, RuntimeError):
    """The requested backend does not exist for this op on this machine, or a call of its kernels or libraries failed."""


class DriftError(AlignkitError):
    """Logprobs of an aligned run that are not equal to the last bit.

    step, rank: where; token: the first one that differs, a `drift.TokenDifference`; replay: the file with the batch of
    the run's first difference, None if it could not be written.
    """

    def __init__(
        self, message: str, *, step: int | None = None, rank: int | None = None, token=None, replay=None
    ) -> None:
        super().__init__(message)  # the message alone: then the error can be pickled, as between Ray's workers
        self.step, self.rank, self.token, self.replay = step, rank, token, replay
