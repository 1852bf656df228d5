"""Every error that nestforge raises on purpose, in one tree.

    NestforgeError
    ├── ProfileError                 a device profile is unreadable or says something impossible
    ├── CheckpointError              the source model's files are missing, damaged or refused
    │   └── UnsupportedModelError    no family reads this kind of model
    ├── PlanError                    no submodel satisfies a budget, or a submodel is not on the axes
    ├── ExportError                  the model could not be turned into a template
    │   └── SliceError               the template cannot be sliced at graph level (the compiler then traces)
    ├── BuildError                   a backend could not build an engine
    ├── ParityError                  an engine does not equal the PyTorch submodel
    ├── OutputError                  the result could not be written
    ├── BundleError                  a bundle cannot be opened
    │   ├── BundleFormatError        unknown schema, malformed or oversized manifest, a path that escapes
    │   ├── BundleCorruptError       a file is missing, or its size or hash differs
    │   └── BundleIncompatibleError  this host cannot run the bundle
    ├── MeasurementError             a host is too busy to measure
    ├── SelectionError               no engine in the bundle satisfies the request
    │   └── OverloadError            none does in time behind the requests that wait; another time one would
    └── InputError                   a request's inputs do not fit the model
        └── CapacityError            a text is longer than its cache has room for

A message is one line: where, what was expected, what was found, what to do. These are the user's to mend, so the
command line prints the message alone and exits 1; anything else is our bug and keeps its trace.
"""

from .outside import message


class NestforgeError(Exception):
    """Root of every error that nestforge raises on purpose; whatever its message quotes, it is one printable line."""

    def __init__(self, text: str = "") -> None:
        super().__init__(message(text))


class ProfileError(NestforgeError):
    """A device profile is unreadable or says something impossible."""


class CheckpointError(NestforgeError):
    """The source model's files are missing, damaged or refused."""


class UnsupportedModelError(CheckpointError):
    """No family reads this kind of model."""


class PlanError(NestforgeError):
    """No submodel satisfies a budget, or a submodel is not on the axes."""


class ExportError(NestforgeError):
    """The model could not be turned into a template."""


class SliceError(ExportError):
    """The template cannot be sliced at graph level."""


class BuildError(NestforgeError):
    """A backend could not build an engine."""


class ParityError(NestforgeError):
    """An engine does not equal the PyTorch submodel within the stated tolerance."""


class OutputError(NestforgeError):
    """The result could not be written; nothing was published."""


class BundleError(NestforgeError):
    """A bundle cannot be opened."""


class BundleFormatError(BundleError):
    """Unknown schema, malformed or oversized manifest, or a path that escapes the bundle."""


class BundleCorruptError(BundleError):
    """A file of the bundle is missing, or its size or hash differs from the manifest."""


class BundleIncompatibleError(BundleError):
    """This host cannot run the bundle."""


class MeasurementError(NestforgeError):
    """A host is too busy to measure; nothing was saved."""


class SelectionError(NestforgeError):
    """No engine in the bundle satisfies the request."""


class OverloadError(SelectionError):
    """No engine answers in time behind the requests that wait: with ``needs_ms`` from now on one would, or later."""

    def __init__(self, text: str, needs_ms: float) -> None:
        super().__init__(text)
        self.needs_ms = needs_ms


class InputError(NestforgeError):
    """A request's inputs do not fit the model."""


class CapacityError(InputError):
    """A text is longer than its cache has room for."""
