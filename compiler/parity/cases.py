"""Inputs for the parity gate: random values under several seeds, whole and padded rows, real text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...exporters.signature import Signature
from ...exporters.source import ModelSource
from ...runtime.consistency.samples import text_at_bucket
from ...runtime.inputs.arrays import random_feeds
from ...runtime.inputs.text import TextEncoder

# Everyday text in several scripts, so that a real tokenizer is exercised even where the user gives no corpus.
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Wie spät ist es? Der letzte Zug fährt um 23:41 Uhr von Gleis 7 ab.",
    "def parity(a, b): return abs(a - b) <= 1e-5  # compare two engines",
    "北京的秋天很美，很多人去香山看红叶。",
    "Une requête peut dire ce qu'elle peut dépenser : mémoire, temps ou énergie.",
)
# Shapes of a range, beside its ends and the powers of two.
_RANDOM_SHAPES = 4
_MOST_TOKENS = 512
# The cases whose rows may end before their bucket does.
_PADDED, _TEXT = "padded", "text"
# Cases of one bucket; a range has twice as many.
_FEW = 8
# Tokens of what is asked again of a written engine.
_MOST_AGAIN = 128
# Numbers that are judged of an output that has some of every position, 32 MB in float64, but of no fewer positions.
MOST_JUDGED, _LEAST_PLACES = 2**22, 16
# For a large model no shape of a range has more tokens but its largest and its longest.
_MOST_BETWEEN = 16
# Tokens below which a shape of a range has no case of text: tokenizers add some of their own.
_LEAST_TEXT = 8


@dataclass(frozen=True)
class Case:
    """One set of inputs at a shape of a bucket, by input name, in the signature's order.

    ``rows`` are those of the request (None: all); what follows them is how the runtime fills a bucket, and nobody reads
    its answers. With ``picks``, ``judged_places`` alone are compared of outputs that have something of each position,
    and of these the ones ``in_text`` ``[B, S]``: a model without a mask answers behind the end of a text too, which
    nobody reads.
    """

    name: str
    feeds: Mapping[str, np.ndarray]
    rows: int | None = None
    picks: bool = False
    in_text: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Elements of its largest input, by which cases of one model compare."""
        return max(array.size for array in self.feeds.values())

    @property
    def request(self) -> dict[str, np.ndarray]:
        """The inputs as they are sent, before the runtime fills the bucket."""
        if self.rows is None:
            return dict(self.feeds)
        return {name: np.ascontiguousarray(array[: self.rows]) for name, array in self.feeds.items()}

    def read(self, outputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
        """Those of the ``outputs`` that ``specs`` describe, without the rows that filled the bucket, and of the
        positions that are compared."""
        by_row = {spec.name: spec.dims[:1] == ("batch",) for spec in specs if spec.name in outputs}
        judged = self.judged(outputs, specs)
        return {name: judged[name][: self.rows] if cut else judged[name] for name, cut in by_row.items()}

    def judged(self, outputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
        """The ``outputs``, perhaps of more than ``specs`` describe, at the positions that are compared."""
        found, rows = dict(outputs), len(next(iter(self.feeds.values())))  # of the filled bucket, whoever answered
        for spec in specs if self.picks else ():
            if spec.name in found and spec.dims[:2] == ("batch", "sequence"):
                found[spec.name] = self._picked(found[spec.name], rows)
        return found

    def _picked(self, array: np.ndarray, rows: int) -> np.ndarray:
        """``array`` ``[B, S, ...]`` of ``rows`` at the positions that are compared, 0 at those that nobody reads; of
        what was picked already the same."""
        tokens, numbers = array.shape[1], rows * math.prod(array.shape[2:])
        places = judged_places(tokens, numbers)
        picked = array[:, list(places)] if len(places) < tokens else array
        if self.in_text is None:
            return picked
        kept = self.in_text[: len(array), list(judged_places(self.in_text.shape[1], numbers))]
        return np.where(kept.reshape(*kept.shape, *[1] * (array.ndim - 2)), picked, 0)


def can_look(source: ModelSource) -> bool:
    """Whether a model is large, and nothing but the rule of its outputs is asked of PyTorch in float64."""
    return source.architecture.routing is None and source.exits is None and source.is_large


def judged_places(tokens: int, numbers: int) -> Sequence[int]:
    """The positions of so many ``tokens`` that are judged of an output with ``numbers`` of each: all, where these are
    not too many; else half are the last ones, where a text is given token by token and a run ends, and half lie evenly
    before. Keys and values are judged of every token, so that what is left out is what follows the last layer's.
    """
    most = max(_LEAST_PLACES, MOST_JUDGED // max(numbers, 1))
    if tokens <= most:
        return range(tokens)
    last = tokens - most // 2
    return [*np.linspace(0, last - 1, most - most // 2, dtype=np.int64).tolist(), *range(last, tokens)]


def unjudged(cases: Sequence[Case], specs: Sequence[TensorSpec]) -> str | None:
    """Receipt's note where some positions of a case were not judged, of the case with the least share; else None."""
    notes: list[tuple[float, str]] = []
    for case in cases:
        rows, *tokens = next(iter(case.feeds.values())).shape
        for spec in specs if case.picks and tokens else ():
            if spec.dims[:2] == ("batch", "sequence"):
                numbers = math.prod(dim for dim in spec.dims[2:] if isinstance(dim, int))
                judged = len(judged_places(tokens[0], rows * numbers))
                note = f"{spec.name} of {judged} of {tokens[0]} positions where fewest are judged"
                notes += [(judged / tokens[0], note)] if judged < tokens[0] else []
    return min(notes, default=(1.0, None))[1]


def parity_cases(
    signature: Signature, bucket: Bucket, encoder: TextEncoder | None, is_large: bool = False
) -> list[Case]:
    """The cases of one bucket: two fully random (masks with holes), one whole, one padded, one of real text; of a range
    one of them at each of several shapes, which are fewer for a large model.

    Every row has a token, since without one no answer is defined (``TensorSpec.row_needs``). The padded case has rows
    that end early and, in a static bucket, lacks its last row: what fills it must not reach the others.
    """
    if bucket.is_static:
        return [_judged(signature, case.name, case) for case in _cases_at(signature, bucket, encoder)]
    found: dict[str, Case] = {}
    kinds: set[str] = set()
    *shapes, last = shapes_to_prove(bucket, is_large)
    for number, shape in enumerate(shapes):
        own = _cases_at(signature, shape, None, bucket)
        case = own[number % len(own)]
        kinds.add(case.name)
        found[f"{case.name} at {shape}"] = case
    own = _cases_at(signature, last, encoder if last.sequence >= _LEAST_TEXT else None, bucket)
    for case in [own[0], *(case for case in own[1:] if case.name not in kinds)]:  # and the kinds that no other had
        found[f"{case.name} {'within' if case.name == _TEXT else 'at'} {last}"] = case
    least = bucket.smallest
    filled = _cases_at(signature, least, None) if bucket.min_batch is not None else []
    found |= {f"{case.name}, filled to {least}": case for case in filled if case.rows is not None}
    return [_judged(signature, name, case) for name, case in found.items()]


def _judged(signature: Signature, name: str, case: Case) -> Case:
    """``case`` under ``name``; of a model without a mask, which says what counts, with the positions that are read."""
    if signature.mask is not None:
        return replace(case, name=name)
    ids = [spec for spec in signature.inputs if spec.pad is not None and spec.dims[:2] == ("batch", "sequence")]
    in_text = None
    if len(ids) == 1 and case.name in (_PADDED, _TEXT):
        array = case.feeds[ids[0].name]
        places = np.arange(1, array.shape[1] + 1)
        in_text = places <= np.where(array != ids[0].pad, places, 0).max(axis=1, keepdims=True)
    return replace(case, name=name, picks=True, in_text=in_text)


def few(cases: Sequence[Case]) -> list[int]:
    """By number the smaller of many cases, as those of a range are, and the largest that is not long; all where they
    are few."""
    by_size = sorted(range(len(cases)), key=lambda number: cases[number].tokens)
    short = [number for number in by_size if cases[number].tokens <= _MOST_AGAIN]
    return sorted({*by_size[:_FEW], *short[-1:]})


def shapes_to_prove(bucket: Bucket, is_large: bool = False) -> list[Bucket]:
    """Shapes all over a range: the ends of each dimension, the powers of two of its sequence, and some at random, whose
    lengths are one in each of as many parts of the range that are equal on a logarithmic scale.

    With many rows at once the sequence is as long as ``_MOST_TOKENS`` allow. A large model, whose every
    token is dear, has of those that are not short the ones at its longest sequence and of most rows alone. Always the
    same for the same range and model.
    """
    least, most = bucket.smallest, bucket.largest
    shapes = [Bucket(least.batch, sequence) for sequence in bucket.doublings]
    rng = np.random.default_rng(most.tokens)
    batches = [*rng.integers(least.batch, most.batch + 1, _RANDOM_SHAPES - 1).tolist(), most.batch]
    for number, batch in enumerate(batches):
        span = (_longest(bucket, batch) + 1) / least.sequence
        length = least.sequence * span ** ((number + rng.random()) / _RANDOM_SHAPES)
        shapes.append(Bucket(batch, min(int(length), _longest(bucket, batch))))
    last = largest_proven(bucket)
    found = [*dict.fromkeys([*shapes, Bucket(most.batch, least.sequence)])]
    if is_large:
        limit = max(_MOST_BETWEEN, least.tokens)
        found = [shape for shape in found if shape.tokens <= limit or shape.sequence == most.sequence]
    return [*(shape for shape in found if shape != last), last]


def largest_proven(bucket: Bucket) -> Bucket:
    """The largest shape of ``bucket`` that engines are proven at."""
    return Bucket(bucket.batch, _longest(bucket, bucket.batch))


def _longest(bucket: Bucket, batch: int) -> int:
    """The longest sequence that so many rows are proven at."""
    return min(bucket.sequence, max(bucket.smallest.sequence, _MOST_TOKENS // batch))


def _cases_at(
    signature: Signature, bucket: Bucket, encoder: TextEncoder | None, free: Bucket | None = None
) -> list[Case]:
    """The cases at one shape; within the range ``free`` no row is filled, and texts have their own length."""
    own = None if free is None else Bucket(bucket.batch, bucket.sequence, free.min_batch, free.min_sequence)
    sentences = [_SENTENCES[row % len(_SENTENCES)] for row in range(bucket.batch)]
    text = [] if encoder is None else [text_at_bucket(encoder, signature.inputs, sentences, own or bucket)[0]]
    first, second, *others = (random_feeds(signature.inputs, bucket, seed) for seed in range(4))
    cases = [Case("random-0", first), Case("random-1", second)]
    whole = [_whole(signature, feeds) for feeds in others]
    has_sequence = any("sequence" in spec.dims for spec in signature.inputs)
    lacks_row = free is None and bucket.batch > 1 and all(spec.pad is not None for spec in signature.inputs)
    if has_sequence:
        cases.append(Case("whole", whole[0]))
    if has_sequence or lacks_row:
        padded, rows = _padded(signature, bucket, whole[1]), bucket.batch - 1 if lacks_row else None
        cases.append(Case(_PADDED, padded if rows is None else _without_last_row(signature, padded), rows))
    return [*cases, *(Case(_TEXT, feeds) for feeds in text)]


def _whole(signature: Signature, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every position counts."""
    return {name: np.ones_like(array) if name == signature.mask else array for name, array in feeds.items()}


def _padded(signature: Signature, bucket: Bucket, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fills the tail of every row with padding: a third of the first row, less of the later ones."""
    for spec in signature.inputs:
        if spec.pad is not None and spec.dims[:2] == ("batch", "sequence"):
            for row in range(bucket.batch):
                feeds[spec.name][row, max(1, bucket.sequence - max(1, bucket.sequence // (3 + row))) :] = spec.pad
    return feeds


def _without_last_row(signature: Signature, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As a request of one row less arrives at the engine."""
    for spec in signature.inputs:
        if spec.dims[:1] == ("batch",):
            feeds[spec.name][-1] = spec.pad
    return feeds
