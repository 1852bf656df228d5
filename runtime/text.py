"""Text to inputs with the bundle's own tokenizer file; needs the ``tokenizers`` package and no other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleCorruptError, InputError
from .arrays import Array
from .manifest import TensorSpec, TextEntry

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Encoded:
    """Inputs of shape ``[texts, longest text]``, the rows that were truncated, and the length of each row unpadded."""

    feeds: dict[str, Array]
    truncated: tuple[int, ...]
    lengths: tuple[int, ...]


class TextEncoder:
    """Texts to the inputs that ``TextEntry`` names; shorter rows are filled with each input's ``pad``. Thread-safe."""

    def __init__(self, tokenizer_file: Path, entry: TextEntry, inputs: Sequence[TensorSpec]) -> None:
        """Raises BundleCorruptError if the file is not a tokenizer, InputError if an input cannot come from text."""
        from tokenizers import Tokenizer

        fields = {entry.ids: "ids", entry.mask: "attention_mask", entry.type_ids: "type_ids"}
        self._fields: list[tuple[TensorSpec, str]] = []
        self._truncating_at: dict[int, Any] = {}
        for spec in inputs:
            if spec.name not in fields:
                raise InputError(f"input {spec.name}: does not come from text; pass arrays instead")
            self._fields.append((spec, fields[spec.name]))
        try:
            # A tokenizer file may ask to truncate and pad; here both are the runtime's to do, and to tell.
            self._plain: Any = Tokenizer.from_file(str(tokenizer_file))
            self._plain.no_truncation()
            self._plain.no_padding()
        except Exception as failure:
            raise BundleCorruptError(f"{tokenizer_file}: not a tokenizer file ({failure})") from failure

    def encode(self, texts: Sequence[str], longest: int, truncate: bool = False) -> Encoded:
        """Inputs for ``texts``. One of more than ``longest`` tokens is refused with InputError, or truncated."""
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(f"text: expected a text or a non-empty list of texts, got {texts!r:.80}")
        try:
            rows = self._plain.encode_batch(list(texts))
        except TypeError as failure:  # of the tokenizer, which takes only what UTF-8 can say
            row = next((row for row, text in enumerate(texts) if _SURROGATE.search(text)), None)
            if row is None:
                raise
            raise InputError(f"text {row}: half of a surrogate pair, which is no character") from failure
        too_long = tuple(i for i, row in enumerate(rows) if len(row.ids) > longest)
        if too_long and not truncate:
            first = too_long[0]
            raise InputError(
                f"text {first}: {len(rows[first].ids)} tokens, the largest bucket takes {longest}; shorten it, pass "
                "truncate=True, or compile with a larger bucket"
            )
        if too_long:
            rows = self._truncating(longest).encode_batch(list(texts))
        feeds = {spec.name: _matrix(rows, name, spec) for spec, name in self._fields}
        return Encoded(feeds, too_long, tuple(len(row.ids) for row in rows))

    def _truncating(self, longest: int) -> Any:
        # Truncation is a setting of the tokenizer, so a copy has it: other threads go on with the plain one. Copying
        # reads a whole vocabulary, and there are as many lengths as the buckets have, so copies are kept.
        tokenizer = self._truncating_at.get(longest)
        if tokenizer is None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_str(self._plain.to_str())
            tokenizer.enable_truncation(longest)
            self._truncating_at[longest] = tokenizer
        return tokenizer


def _matrix(rows: Sequence[Any], name: str, spec: TensorSpec) -> Array:
    values = [getattr(row, name) for row in rows]
    width = max(1, *map(len, values))
    if spec.pad is None and any(len(row) != width for row in values):
        raise InputError(f"input {spec.name}: texts of different lengths need padding, and it cannot be padded")
    matrix = np.full((len(values), width), spec.pad or 0, dtype=spec.dtype)
    for target, row in zip(matrix, values, strict=True):
        target[: len(row)] = row
    return matrix
