"""The next tokens of a text, looked up in what it has already: a draft that costs next to nothing.

Texts that repeat their prompt (summaries, edited code, answers that quote) go on as they did before (Saxena 2023,
"prompt lookup decoding").
"""

from __future__ import annotations

import numpy as np

from .sampling import Ids

# What answers call it, beside drafts that are submodels.
NGRAM = "n-gram"
# Tokens at the end of the text that must be alike: one alone says too little of what follows.
_FEWEST_ALIKE, _MOST_ALIKE = 2, 3


def look_up(tokens: Ids, count: int) -> Ids:
    """``count`` tokens that followed where ``tokens`` ``[T]`` ended alike before: at the last such place, of those with
    the most tokens alike. What is found reaches into itself where it is shorter. None where there is no such place.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    alike = 1
    while len(ends) and alike < _MOST_ALIKE:
        longer = ends[ends >= alike]
        longer = longer[tokens[longer - alike] == tokens[-1 - alike]]
        if not len(longer):
            break
        ends, alike = longer, alike + 1
    if alike < _FEWEST_ALIKE:  # also where the last token was not there before
        return tokens[:0]
    start = ends[-1] + 1
    found: Ids = tokens[start + np.arange(count) % (len(tokens) - start)]
    return found
