"""The user's data, texts or arrays: part calibrates the ranking, the rest is held out to show quality."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...bundle.roles import Interface
from ...errors import CheckpointError, InputError
from ...exporters.source import ModelSource
from ...runtime.consistency.samples import (
    ArraySamples,
    Samples,
    TextSamples,
    different_rows,
    keyed_texts,
    read_array_samples,
)
from ...runtime.inputs.text import TextEncoder
from ...strict import unstructure

CALIBRATION = 128
# Tokens of a text by which axes are ranked: long texts cost time quadratically and change the order little.
MOST_RANKED = 64
# So few show what a submodel keeps to two digits; the standard error stands beside it.
HELD_OUT = 100
_MIN_EXAMPLES = 20
_HELD_OUT_ONE_IN = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Corpus:
    """One text per line; no text is in both parts."""

    calibration: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def key(self) -> Any:
        """Key that an interrupted compile shares with the one that goes on."""
        return unstructure(self)

    @property
    def seen(self) -> tuple[str, int]:
        """The digest and the number of the texts that calibrate, as the manifest states them."""
        return sha256("\n".join(self.calibration).encode()).hexdigest(), len(self.calibration)


@dataclass(frozen=True, eq=False)
class ArrayCorpus:
    """Rows of arrays; no row is in both parts. Labels, where there are any, judge the held-out part alone."""

    calibration: ArraySamples
    held_out: ArraySamples

    @property
    def key(self) -> Any:
        """Key that an interrupted compile shares with the one that goes on."""
        return [self.calibration.sha256, self.held_out.sha256]

    @property
    def seen(self) -> tuple[str, int]:
        """The digest and the number of the rows that calibrate, as the manifest states them."""
        return self.calibration.sha256, self.calibration.size


def samples_of(
    corpus: Corpus | ArrayCorpus | None, part: Literal["calibration", "held_out"], encoder: TextEncoder | None
) -> Samples | None:
    """The ``part`` of a corpus as a model with this ``encoder`` takes it; None without a corpus that it takes."""
    if isinstance(corpus, ArrayCorpus):
        return corpus.calibration if part == "calibration" else corpus.held_out
    if corpus is None or encoder is None:
        return None
    return TextSamples(encoder, corpus.calibration if part == "calibration" else corpus.held_out)


def read_corpus(path: Path) -> Corpus:
    """Reads a UTF-8 file with one text per line; blank and repeated lines are dropped.

    A text's own hash decides its part (about one in five is held out), so adding lines moves no other. The texts
    with the smallest hashes in each part are used, a sample spread over the whole file.
    Raises CheckpointError for a missing, oversized or undecodable file, or too few texts.
    """
    keyed = keyed_texts(path, CheckpointError)
    calibration, held_out = split_parts(keyed)
    if min(len(held_out), len(calibration)) < _MIN_EXAMPLES:
        raise CheckpointError(
            f"{path}: {len(keyed)} different texts; expected at least {10 * _MIN_EXAMPLES}, one per line"
        )
    return Corpus(tuple(calibration[:CALIBRATION]), tuple(held_out[:HELD_OUT]))


def read_array_corpus(path: Path, source: ModelSource) -> ArrayCorpus:
    """Reads an NPZ file with an array per input, rows first, and perhaps ``labels``; equal rows count once.

    A row's own hash decides its part as a text's does. Raises InputError for a file that does not fit the model, or
    with too few different rows.
    """
    signature, exits = source.signature, source.exits
    interface = Interface(signature.inputs, signature.outputs, signature.text, exits.entry if exits else None)
    samples = read_array_samples(path, interface)
    rows = different_rows(samples)
    calibration, held_out = split_parts(rows)
    if min(len(held_out), len(calibration)) < _MIN_EXAMPLES:
        raise InputError(f"{path}: {len(rows)} different rows; expected at least {10 * _MIN_EXAMPLES}")
    return ArrayCorpus(samples.take(calibration[:CALIBRATION]), samples.take(held_out[:HELD_OUT]))


def split_parts(keyed: Sequence[tuple[bytes, T]]) -> tuple[list[T], list[T]]:
    """Items to calibrate or train on, and those held out: each item's own key decides."""
    held_out = [item for key, item in keyed if key[-1] % _HELD_OUT_ONE_IN == 0]
    return [item for key, item in keyed if key[-1] % _HELD_OUT_ONE_IN], held_out
