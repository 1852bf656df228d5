"""Text to inputs with the bundle's own tokenizer file; needs the ``tokenizers`` package and no other."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.entries.tensor_spec import RANGES, TensorSpec
from ...bundle.manifest import TextEntry
from ...errors import BundleCorruptError, InputError
from ...outside import is_of_library, library_errors, said_by
from .arrays import Array

# One, or two that a model reads as a pair.
Text = str | tuple[str, str]
_POOLED_OUTPUT, _SHIFTED = "pooled", "shifted"
_SURROGATE = re.compile("[\ud800-\udfff]")
# Nothing, words and digits, and letters that few vocabularies have: where none stands for "unknown" they fail.
_PROBE_TEXTS = ("", "a", "The 2 words.", "\u1234", "\U00013000 \u2603\U0001f600")


def require_characters(what: str, text: str) -> None:
    """Raises InputError, which calls it ``what``, for a ``text`` that UTF-8 cannot say."""
    if _SURROGATE.search(text):
        raise InputError(f"{what}: half of a surrogate pair, which is no character")


@dataclass(frozen=True)
class Encoded:
    """Inputs of shape ``[texts, longest text]``, the rows that were truncated, and the length of each row unpadded."""

    feeds: dict[str, Array]
    truncated: tuple[int, ...]
    lengths: tuple[int, ...]


def open_tokenizer(file: Path, content: bytes | None = None) -> Any:
    """The ``tokenizers.Tokenizer`` of a file, neither truncating nor padding; ``content``, if given, is read in its
    place. Raises BundleCorruptError.
    """
    from tokenizers import Tokenizer

    with library_errors(lambda said: BundleCorruptError(f"{file}: not a tokenizer file ({said})")):
        # A tokenizer file may ask to truncate and pad; here both are the runtime's to do, and to report.
        tokenizer = Tokenizer.from_file(str(file)) if content is None else Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


class TextEncoder:
    """Texts to the inputs that ``TextEntry`` names; shorter rows are filled with each input's ``pad``. Thread-safe."""

    def __init__(
        self, tokenizer_file: Path, entry: TextEntry, inputs: Sequence[TensorSpec], content: bytes | None = None
    ) -> None:
        """``content``, if given, is read in the file's place. Raises BundleCorruptError if it is not a tokenizer or one
        that cannot encode every text, InputError if an input cannot come from text."""
        self.entry = entry
        fields = {
            entry.ids: "ids",
            entry.mask: "attention_mask",
            entry.type_ids: "type_ids",
            entry.pooled: _POOLED_OUTPUT,
            entry.shifted: _SHIFTED,
        }
        self._fields: list[tuple[TensorSpec, str]] = []
        for spec in inputs:
            if spec.name not in fields:
                raise InputError(f"input {spec.name}: does not come from text; pass arrays instead")
            self._fields.append((spec, fields[spec.name]))
        self._file = tokenizer_file
        self._tokenizer = open_tokenizer(tokenizer_file, content)
        with library_errors(lambda said: self._broken(f"cannot encode every text ({said})")):
            if entry.lowercase:
                _lower(self._tokenizer)
            added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        for row in self.encodings(_PROBE_TEXTS):
            for spec, name in self._fields:
                values = [] if name == _POOLED_OUTPUT else self._values([row], name, "")[0]
                if (most := max(values, default=0)) > _largest(spec):
                    raise self._broken(f"gives {most} for {spec.name}, which takes 0..{_largest(spec)}")

    def encode(self, texts: Sequence[Text], longest: int, truncate: bool = False, prompt: str | None = None) -> Encoded:
        """Inputs for ``texts``, each behind ``prompt``, or behind the model's default one for None. A pair is one row,
        as the tokenizer joins it.

        A text of more tokens than ``longest`` (a bucket's), or than the model takes, is refused with InputError, or
        truncated.
        """
        before = self.entry.prompt(prompt)
        whole = _prompted(texts, before)
        rows = self.encodings(whole)
        for number, row in enumerate(rows):
            if not len(row):
                raise InputError(f"text {number}: empty, and the tokenizer adds no tokens; nothing to answer for")
        most = min(longest, self.entry.max_tokens or longest)
        too_long = tuple(i for i, row in enumerate(rows) if len(row) > most)
        if too_long and not truncate:
            first = too_long[0]
            tokens = f"text {first}: {len(rows[first])} tokens{', the prompt included' if before else ''}"
            if most < longest:
                raise InputError(
                    f"{tokens}, the model takes {most} (its max_seq_length); shorten it or pass `truncate=True`"
                )
            raise InputError(
                f"{tokens}, the largest bucket takes {longest}; shorten it, pass `truncate=True`, or compile with a "
                "larger bucket"
            )
        for row, short in zip(too_long, self._truncated([whole[row] for row in too_long], most), strict=True):
            rows[row] = short
        feeds = {spec.name: _matrix(self._values(rows, name, before), spec) for spec, name in self._fields}
        return Encoded(feeds, too_long, tuple(map(len, rows)))

    @property
    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``; its settings are not to be changed."""
        return self._tokenizer

    def ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of one text, however long. Raises InputError."""
        return list(self.encodings([text], add_special_tokens)[0].ids)

    def lengths(self, texts: Sequence[str], prompt: str | None = None) -> list[int]:
        """How many tokens each text has behind ``prompt``, however long. Raises InputError."""
        return list(map(len, self.encodings(_prompted(texts, self.entry.prompt(prompt)))))

    def _values(self, rows: Sequence[Any], name: str, prompt: str) -> list[list[int]]:
        if name == _POOLED_OUTPUT:
            return self._pooled(rows, prompt)
        if name == _SHIFTED:
            start = [] if self.entry.start is None else [self.entry.start]
            return [[*start, *row.ids][: len(row.ids)] for row in rows]
        return [getattr(row, name) for row in rows]

    def _pooled(self, rows: Sequence[Any], prompt: str) -> list[list[int]]:
        """The attention mask of every row without the tokens of ``prompt``, which come first."""
        left_out = self.tokens_of(prompt) if prompt else 0
        pooled = [[int(place >= left_out and kept) for place, kept in enumerate(row.attention_mask)] for row in rows]
        for number, row in enumerate(pooled):
            if not any(row):
                raise InputError(
                    f"text {number}: the prompt takes all {len(row)} tokens, and the model pools those behind it; "
                    "shorten the prompt"
                )
        return pooled

    def tokens_of(self, prompt: str) -> int:
        """Tokens that ``prompt`` begins a row with: alone, without the special token that would end it."""
        ids = self.encodings([prompt])[0].ids
        return len(ids) - (bool(ids) and ids[-1] in self._special)

    def encodings(self, texts: Sequence[Text], add_special_tokens: bool = True) -> list[Any]:
        """The library's encoding of each text, however long. Raises InputError for what is no character."""
        try:
            rows: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as failure:  # panics of the tokenizer derive from it
            if not is_of_library(failure):
                raise
            for row, text in enumerate(texts):
                require_characters(f"text {row}", text if isinstance(text, str) else "".join(text))
            raise self._broken(f"cannot encode every text ({said_by(failure)})") from failure
        return rows

    def _truncated(self, texts: Sequence[Text], longest: int) -> list[Any]:
        """Encodings of ``longest`` tokens, with the tokens that the tokenizer adds to each text.

        Truncation is a setting of the tokenizer that it does not keep to everywhere, and that other threads would see;
        here it is done between its two steps.
        """
        if not texts:
            return []
        each = [(text,) if isinstance(text, str) else text for text in texts]
        encodings = iter(self.encodings([part for parts in each for part in parts], add_special_tokens=False))
        rows = []
        for own in ([next(encodings) for _ in parts] for parts in each):
            with library_errors(lambda said: self._broken(f"cannot truncate ({said})")):
                added = self._tokenizer.num_special_tokens_to_add(len(own) == 2)
            if longest < added:
                raise InputError(
                    f"text: the tokenizer adds {added} tokens to each, and the largest bucket takes {longest}; "
                    "compile with a larger bucket"
                )
            lengths = [longest - added] if len(own) == 1 else _kept(len(own[0]), len(own[1]), longest - added)
            with library_errors(lambda said: self._broken(f"cannot truncate ({said})")):
                for part, length in zip(own, lengths, strict=True):
                    part.truncate(length)
                rows.append(self._tokenizer.post_process(*own))
        if any(len(row) > longest for row in rows):
            raise self._broken("adds more tokens to a text than it states")
        return rows

    def _broken(self, problem: str) -> BundleCorruptError:
        return BundleCorruptError(f"{self._file}: {problem}; use the tokenizer that belongs to this model")


def _prompted(texts: Sequence[Text], prompt: str) -> list[Text]:
    if not texts or not all(isinstance(text, str) or _is_pair(text) for text in texts):
        raise InputError(f"text: expected a text or a non-empty list of texts, got {texts!r:.80}")
    require_characters("prompt", prompt)
    return [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(one, str) for one in text)


def _kept(first: int, second: int, most: int) -> tuple[int, int]:
    """How many tokens of a pair are left of so many, ``most`` together: the longer one is cut first, as transformers
    does (``longest_first``)."""
    shorter = min(first, second, most // 2)
    longer = most - shorter
    return (min(first, longer), shorter) if first > second else (shorter, min(second, longer))


def _lower(tokenizer: Any) -> None:
    """Lowers the case of every text before the tokenizer's own normalizers, unless one of them does."""
    from tokenizers import normalizers

    own: Any = tokenizer.normalizer
    several = isinstance(own, normalizers.Sequence)
    steps = list(own) if several else [own] if own is not None else []
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def _matrix(values: Sequence[Sequence[int]], spec: TensorSpec) -> Array:
    width = max(1, *map(len, values))
    if spec.pad is None and any(len(row) != width for row in values):
        raise InputError(f"input {spec.name}: texts of different lengths need padding, and it cannot be padded")
    matrix = np.full((len(values), width), spec.pad or 0, dtype=spec.dtype)
    for number, (target, row) in enumerate(zip(matrix, values, strict=True)):
        if (most := max(row, default=0)) > _largest(spec):
            raise InputError(
                f"text {number}: the tokenizer gives {most} for {spec.name}, which takes 0..{_largest(spec)}"
            )
        target[: len(row)] = row
    return matrix


def _largest(spec: TensorSpec) -> int:
    return RANGES[spec.dtype][1] if spec.high is None else spec.high - 1
