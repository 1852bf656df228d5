"""What goes into a universal model and what comes out of it (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..elastic import Bucket
from ..errors import ExportError
from ..runtime.bundle.manifest import TensorSpec, TextEntry


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a universal model.

    ``mask`` names the input that says which positions count; ``text`` says how text feeds the inputs. ``max_sequence``
    is None where no input has a sequence. ``bound`` names what takes ``max_sequence`` tokens and no others, if a part
    of the model does.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_sequence: int | None = None
    mask: str | None = None
    text: TextEntry | None = None
    bound: str | None = None

    def buckets(self, asked: Sequence[Bucket] | None, usual: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets that were ``asked`` for, else the profile's ``usual`` ones, as this model has them: without a
        sequence only batches differ, and of the usual ones no more where the model is bound to one.

        Raises ExportError for a sequence that is longer than the model takes, or another than it is bound to.
        """
        wanted = asked or usual
        if self.max_sequence is None:
            return tuple(dict.fromkeys(Bucket(bucket.batch, 1) for bucket in wanted))
        if not asked and self.bound is not None:
            wanted = [Bucket(bucket.batch, self.max_sequence) for bucket in usual]
        for bucket in wanted:
            if bucket.sequence > self.max_sequence:
                raise ExportError(f"bucket {bucket.label}: the model takes at most {self.max_sequence} tokens")
            if self.bound is not None and bucket.sequence != self.max_sequence:
                fitting = Bucket(bucket.batch, self.max_sequence).label
                raise ExportError(
                    f"bucket {bucket.label}: {self.bound} is bound to {self.max_sequence} tokens; ask for bucket "
                    f"{fitting}, to which shorter texts are padded"
                )
        return tuple(dict.fromkeys(wanted))
