"""Shape buckets: one static input shape of an engine, or a range of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

# Most tokens of a bucket, such as 1024 rows of 4096 steps: requests are padded to it.
MAX_TOKENS = 2**22
_BUCKET_LABEL = re.compile(
    r"b?(?:(?P<b0>\d{1,9})(?:\.\.|_))?(?P<b1>\d{1,9})(?:xs?|-s)(?:(?P<s0>\d{1,9})(?:\.\.|_))?(?P<s1>\d{1,9})", re.ASCII
)


@total_ordering
@dataclass(frozen=True)
class Bucket:
    """The input shapes of one engine: ``batch`` rows of ``sequence`` tokens, or from a least number up to that.

    A static bucket, whose least numbers are None, is also one shape: that of a request, say. Smaller inputs are padded
    to it; in a dimension that is free nothing is padded.
    """

    batch: int
    sequence: int
    min_batch: int | None = None
    min_sequence: int | None = None

    def __lt__(self, other: Bucket) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, ...]:
        return (self.batch, self.sequence, self.min_batch or self.batch, self.min_sequence or self.sequence)

    @property
    def is_static(self) -> bool:
        return self.min_batch is None and self.min_sequence is None

    @property
    def largest(self) -> Bucket:
        """Its largest shape."""
        return Bucket(self.batch, self.sequence)

    @property
    def smallest(self) -> Bucket:
        """Its smallest shape."""
        return Bucket(self.min_batch or self.batch, self.min_sequence or self.sequence)

    @property
    def doublings(self) -> tuple[int, ...]:
        """Its least sequence, the powers of two between, and its longest, rising; of a static bucket its only one."""
        least = self.smallest.sequence
        between = (2**power for power in range(self.sequence.bit_length()))
        return tuple(sorted({least, self.sequence, *(length for length in between if least < length < self.sequence)}))

    @property
    def free(self) -> tuple[str, ...]:
        """The names of the dimensions that a request decides."""
        least = (("batch", self.min_batch), ("sequence", self.min_sequence))
        return tuple(name for name, number in least if number is not None)

    def holds(self, shape: Bucket) -> bool:
        """Whether inputs of ``shape`` fit, padded if need be."""
        return shape.batch <= self.batch and shape.sequence <= self.sequence

    def filled(self, shape: Bucket) -> Bucket:
        """The shape that inputs of ``shape`` have once they are padded; ``shape`` itself where nothing is."""
        batch, sequence = self.min_batch or self.batch, self.min_sequence or self.sequence
        if shape.batch >= batch and shape.sequence >= sequence:
            return shape
        return Bucket(max(shape.batch, batch), max(shape.sequence, sequence))

    def nearest(self, shape: Bucket) -> Bucket:
        """The shape that engines run at which comes nearest to ``shape``."""
        filled = self.filled(shape)
        return Bucket(min(filled.batch, self.batch), min(filled.sequence, self.sequence))

    @property
    def label(self) -> str:
        """``b1-s128``, or ``b1_8-s1_512`` where both are free: for ids and names of files."""
        return f"b{_extent(self.min_batch, self.batch, '_')}-s{_extent(self.min_sequence, self.sequence, '_')}"

    def __str__(self) -> str:
        """``1x128`` or ``1..8x1..512``, as ``parse`` reads it."""
        return f"{_extent(self.min_batch, self.batch, '..')}x{_extent(self.min_sequence, self.sequence, '..')}"

    @property
    def tokens(self) -> int:
        """Tokens of its largest shape."""
        return self.batch * self.sequence

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """Reads ``1x128``, ``1..8x1..512`` or a label. Raises ValueError for anything else, an empty or reversed
        range, and more than ``MAX_TOKENS``."""
        match = _BUCKET_LABEL.fullmatch(text.strip())
        if not match or not int(match["b1"]) or not int(match["s1"]):
            raise ValueError(
                f"bucket {text[:80]!r}: expected BATCHxSEQUENCE, such as 1x128, or with a range, such as 1x1..128"
            )
        least: list[int | None] = []
        for low, high in ((match["b0"], match["b1"]), (match["s0"], match["s1"])):
            if low is not None and not 0 < int(low) < int(high):
                raise ValueError(
                    f"bucket {text[:80]!r}: range {low}..{high}; expected one that rises from 1 or more, such as 1..128"
                )
            least.append(None if low is None else int(low))
        bucket = cls(int(match["b1"]), int(match["s1"]), *least)
        if bucket.tokens > MAX_TOKENS:
            raise ValueError(f"bucket {text!r}: {bucket.tokens} tokens, more than the {MAX_TOKENS} allowed")
        return bucket


def _extent(least: int | None, largest: int, to: str) -> str:
    return str(largest) if least is None else f"{least}{to}{largest}"
