"""What logits say in short: the best classes of a row, or the best tokens to follow its last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..bundle.open_bundle import Bundle
from ..bundle.roles import compared_outputs, continued_input, ids_input
from ..runtime.answer import Answer
from ..runtime.inputs.arrays import Array
from ..runtime.inputs.text import open_tokenizer

_ANSWERS_SHOWN = 3


@dataclass(frozen=True)
class Best:
    """One candidate: a class or token ``id``, its ``logit``, and its ``token`` where the bundle has a tokenizer."""

    id: int
    logit: float
    token: str | None = None

    def __str__(self) -> str:
        shown = str(self.id) if self.token is None else repr(self.token)
        return f"{shown} {self.logit:.2f}"


def best_answers(bundle: Bundle, answer: Answer, lengths: Sequence[int] | None) -> tuple[str, list[list[Best]]] | None:
    """What the candidates are, and per row the best of them, the best first; None for a model without such logits, or
    one whose decoder repeats the text that its encoder reads, so that nothing follows it.

    ``lengths`` are the tokens of each text; without them every step of an array counts.
    """
    roles = compared_outputs(bundle.manifest)
    if "classes" in roles and roles["classes"].dims[:-1] == ("batch",):
        return "class", [_best(row, None) for row in answer[roles["classes"].name]]
    if "next_tokens" in roles and continued_input(bundle.manifest) == ids_input(bundle.manifest):
        logits = answer[roles["next_tokens"].name]
        ends = [logits.shape[1]] * len(logits) if lengths is None else [min(n, logits.shape[1]) for n in lengths]
        token = _tokens(bundle)
        return "next token", [_best(row[end - 1], token) for row, end in zip(logits, ends, strict=True)]
    return None


def _best(logits: Array, token: Callable[[int], str | None] | None) -> list[Best]:
    ids = np.argsort(-logits, kind="stable")[:_ANSWERS_SHOWN].tolist()
    return [Best(i, float(logits[i]), token(i) if token else None) for i in ids]


def _tokens(bundle: Bundle) -> Callable[[int], str | None] | None:
    if bundle.manifest.text is None:
        return None
    found: Callable[[int], str | None] = open_tokenizer(bundle.file(bundle.manifest.text.file)).id_to_token
    return found
