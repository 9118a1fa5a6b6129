"""The errors alignkit raises. Each names the argument or feature that caused it."""


class AlignkitError(Exception):
    """Base of every error that alignkit raises on purpose."""


class InputError(AlignkitError, ValueError):
    """An argument is out of its documented range; the message starts with its name."""


class UnsupportedError(AlignkitError, NotImplementedError):
    """A feature, version or device that alignkit cannot keep aligned, refused by name."""


class BackendError(AlignkitError, RuntimeError):
    """The requested backend does not exist for this op on this machine, or a call of its kernels or libraries failed."""
