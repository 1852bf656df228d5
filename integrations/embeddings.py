"""Outputs of engines for texts, in the form in which ``encode`` of sentence-transformers returns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from ..errors import InputError
from ..optional import needed
from ..runtime.inputs.arrays import Array
from ..runtime.inputs.text import Encoded
from .quantise import Precision, quantised

OutputValue = Literal["sentence_embedding", "token_embeddings"]
OUTPUT_VALUES: tuple[OutputValue, ...] = get_args(OutputValue)
SENTENCE_EMBEDDING, TOKEN_EMBEDDINGS = OUTPUT_VALUES


def converted(vectors: Array, single: bool, to_numpy: bool, to_tensor: bool) -> Any:
    """``vectors`` as ``encode`` is asked to return them. Raises InputError where torch is needed and missing."""
    if to_numpy and not to_tensor:
        return vectors[0] if single else vectors
    torch = needed("torch", "convert_to_tensor, or not convert_to_numpy", "torch", "take numpy arrays")
    tensor = torch.from_numpy(vectors)
    if single:
        return tensor[0]
    return tensor if to_tensor else list(tensor)


def rows_of_tokens(tokens: Array, read: Encoded, left_out: str | None) -> Iterator[dict[str, Any]]:
    """A dict for each row of ``tokens`` ``[B, S, T]``, without padding: its tokens, and the inputs that were ``read``
    but the one called ``left_out``."""
    for row, length in enumerate(read.lengths):
        inputs = {name: array[row, :length].copy() for name, array in read.feeds.items() if name != left_out}
        yield {**inputs, TOKEN_EMBEDDINGS: tokens[row, :length].copy()}


def of_each_text(found: Sequence[Any], precision: Precision | None) -> list[Any]:
    """Tokens ``[tokens, T]`` of each text, or a dict of arrays, as the library returns them: tensors, and arrays of
    tokens that are quantised, by ranges of all of them. Raises InputError for a dict in another precision."""
    is_quantised = precision not in (None, "float32")
    if any(isinstance(row, Mapping) for row in found):
        if is_quantised:
            raise InputError(f"precision {precision!r}: expected None or 'float32' with the output_value None")
        torch = needed("torch", "output_value None", "torch", "ask for sentence_embedding")
        return [
            {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
            for row in found
        ]
    if is_quantised and found:
        ends = np.cumsum([len(row) for row in found])[:-1]
        return list(np.split(quantised(np.concatenate(found), precision), ends))
    torch = needed("torch", f"output_value {TOKEN_EMBEDDINGS!r}", "torch", f"ask for {SENTENCE_EMBEDDING}")
    return [torch.from_numpy(row) for row in found]
