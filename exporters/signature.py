"""Inputs and outputs of a universal model (no torch here)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..bucket import Bucket
from ..bundle.entries.tensor_spec import RowNeed, TensorSpec
from ..bundle.manifest import TextEntry
from ..errors import ExportError
from .checkpoints.checkpoint import Checkpoint

IDS, MASK, TYPE_IDS, WRITTEN_IDS = "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"
TOKENS = ("batch", "sequence")
# Sequences of static buckets in place of a range.
_USUAL_SEQUENCES = (32, 128)


class Interface(Protocol):
    """Inputs and outputs of a traced module, by position: those of a whole model or of a segment."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a universal model.

    ``mask`` names the input that says which positions count; ``text`` says how text feeds the inputs. ``max_sequence``
    is None where no input has a sequence. ``bound`` names what takes ``max_sequence`` tokens and no others, if a part
    of the model does. ``static`` says why the model is another one at every shape, so that buckets leave none free.
    ``min_sequence`` is the least that it takes. ``shortened`` says why ``max_sequence`` is less than the model's
    configuration states, ``left_out`` which inputs and outputs of the class engines do not have, and why.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_sequence: int | None = None
    mask: str | None = None
    text: TextEntry | None = None
    bound: str | None = None
    static: str | None = None
    shortened: str | None = None
    left_out: str | None = None
    min_sequence: int = 1

    def buckets(self, requested: Sequence[Bucket] | None, usual: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets that were ``requested``, else the profile's ``usual`` ones, as this model has them.

        Without a sequence only batches differ. Usual ranges end where the model does; of a model that cannot have them,
        there are some shapes of the range up to its end. Raises ExportError for a sequence that is longer than the
        model takes or another than it is bound to, and for a range that it cannot have.
        """
        if requested:
            wanted = list(requested)
            for bucket in wanted:
                self._require(bucket)
        else:
            wanted = [shape for bucket in usual for shape in self._usual(bucket)]
        if self.max_sequence is None:
            wanted = [Bucket(bucket.batch, 1, bucket.min_batch) for bucket in wanted]
        return tuple(dict.fromkeys(wanted))

    def _require(self, bucket: Bucket) -> None:
        if not bucket.is_static and self.static is not None:
            raise ExportError(f"bucket {bucket}: {self.static}; ask for static buckets, such as {bucket.largest}")
        if self.max_sequence is None:
            return
        self._require_least(bucket)
        if bucket.sequence > self.max_sequence:
            reason = "" if self.shortened is None else f": {self.shortened}"
            raise ExportError(f"bucket {bucket.label}: the model takes at most {self.max_sequence} tokens{reason}")
        if self.bound is not None and bucket.smallest.sequence != self.max_sequence:
            fitting = replace(bucket, sequence=self.max_sequence, min_sequence=None)
            raise ExportError(
                f"bucket {bucket.label}: {self.bound} is bound to {self.max_sequence} tokens; ask for bucket "
                f"{fitting.label}, to which shorter texts are padded"
            )

    def _require_least(self, bucket: Bucket) -> None:
        if bucket.smallest.sequence < self.min_sequence:
            longest = max(bucket.sequence, self.min_sequence)
            start = self.min_sequence if bucket.min_sequence is not None and longest > self.min_sequence else None
            raise ExportError(
                f"bucket {bucket}: the model takes at least {self.min_sequence} tokens; ask for "
                f"{replace(bucket, sequence=longest, min_sequence=start)}"
            )

    def _usual(self, bucket: Bucket) -> list[Bucket]:
        """This model's version of a profile's own ``bucket``."""
        if self.max_sequence is not None:
            if self.bound is not None:
                bucket = replace(bucket, sequence=self.max_sequence, min_sequence=None)
            elif bucket.sequence > self.max_sequence:
                if bucket.min_sequence is None:
                    self._require(bucket)
                start = bucket.min_sequence if bucket.smallest.sequence < self.max_sequence else None
                bucket = replace(bucket, sequence=self.max_sequence, min_sequence=start)
            if bucket.min_sequence is not None and bucket.min_sequence < self.min_sequence < bucket.sequence:
                bucket = replace(bucket, min_sequence=self.min_sequence)
            self._require_least(bucket)
        if bucket.is_static or self.static is None:
            return [bucket]
        least, most = bucket.smallest, bucket.largest
        between = [sequence for sequence in _USUAL_SEQUENCES if least.sequence <= sequence < most.sequence]
        return [Bucket(batch, length) for batch in (least.batch, most.batch) for length in (*between, most.sequence)]


def text_signature(
    checkpoint: Checkpoint,
    outputs: Sequence[TensorSpec],
    positions: int,
    vocabulary: int,
    pad: int = 0,
    needs: RowNeed | None = None,
    types: int = 1,
    shortened: str | None = None,
    *,
    start: int | None = None,
    bound: str | None = None,
    static: str | None = None,
) -> Signature:
    """Signature of a model of texts of at most ``positions`` tokens, which ``pad`` fills and that are of so many
    ``types``; ``needs`` is the token that a row must have, of a model that takes a mask.

    A decoder behind an encoder also takes the text that is written, which begins with the token ``start``. The rest as
    of ``Signature``.
    """
    inputs, mask, type_ids = [TensorSpec(IDS, "int64", TOKENS, pad=pad, high=vocabulary)], None, None
    if needs is not None:
        mask = MASK
        inputs.append(TensorSpec(mask, "int64", TOKENS, pad=0, high=2, row_needs=needs))
    if types > 1:
        type_ids = TYPE_IDS
        inputs.append(TensorSpec(type_ids, "int64", TOKENS, pad=0, high=types))
    text = TextEntry("tokenizer.json", IDS, mask, type_ids, None) if checkpoint.tokenizer_files else None
    if start is not None:
        inputs.append(replace(inputs[0], name=WRITTEN_IDS))
        text = text and replace(text, shifted=WRITTEN_IDS, start=start)
    return Signature(tuple(inputs), tuple(outputs), positions, mask, text, bound, static, shortened)


def with_texts(signature: Signature, checkpoint: Checkpoint, start: int | None = None) -> Signature:
    """``signature`` of a model that reads tokens, with the tokenizer of its folder if there is one; of a decoder behind
    an encoder it gets the same text behind the token ``start``."""
    names = [spec.name for spec in signature.inputs]
    if IDS not in names or not checkpoint.tokenizer_files:
        return signature
    mask, types = (name if name in names else None for name in (MASK, TYPE_IDS))
    shifted = None if start is None else WRITTEN_IDS
    return replace(signature, text=TextEntry("tokenizer.json", IDS, mask, types, None, shifted=shifted, start=start))


def next_token_logits(vocabulary: int) -> TensorSpec:
    """Output of a language model: the logits of the token behind each one."""
    return TensorSpec("logits", "float32", (*TOKENS, vocabulary), role="next_tokens")
