"""The user's text file: part calibrates the ranking, the rest is held out to show quality."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

MAX_TEXT_BYTES = 256 * 2**20
_CALIBRATION_TEXTS = 128
_HELD_OUT_TEXTS = 200
_MINIMUM = 20


@dataclass(frozen=True)
class Corpus:
    """One text per line; no text is in both parts."""

    calibration: tuple[str, ...]
    held_out: tuple[str, ...]


def read_corpus(path: Path) -> Corpus:
    """Reads a UTF-8 file with one text per line; blank and repeated lines are dropped.

    A text's own hash decides its part (about one in five is held out), so adding lines moves no other. Of each part
    the texts with the smallest hashes are used, a sample spread over the whole file.
    Raises CheckpointError for a missing, oversized or undecodable file, or too few texts.
    """
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_TEXT_BYTES} allowed")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise CheckpointError(f"{path}: expected a UTF-8 text file with one text per line ({failure})") from failure
    keyed = sorted((hashlib.sha256(text.encode()).digest(), text) for text in {line.strip() for line in lines} - {""})
    held_out = [text for key, text in keyed if key[-1] % 5 == 0]
    calibration = [text for key, text in keyed if key[-1] % 5]
    if min(len(held_out), len(calibration)) < _MINIMUM:
        raise CheckpointError(f"{path}: {len(keyed)} different texts; expected at least {10 * _MINIMUM}, one per line")
    return Corpus(tuple(calibration[:_CALIBRATION_TEXTS]), tuple(held_out[:_HELD_OUT_TEXTS]))
