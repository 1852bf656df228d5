"""Which parameters of a submodel are embedding tables, which are feed-forward, and which are neither (no torch here).

Papers state sizes in these groups: the embeddings of a large vocabulary never shrink, the feed-forward networks are
what nested models slice. ``ModelSource.parameter_groups`` is the way in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from ..elastic import ElasticSpec, Submodel

# The last module, or the parameter itself, of a table: word_embeddings, embed_tokens, wte, lm_head...
_TABLE_NAME = re.compile(r"(?:.+\.)?(?:(?:\w+_)?embeddings?|embed_\w+|wte|wpe|lm_head)(?:\.weight)?")
_FFN_KIND = "ffn"


@dataclass(frozen=True)
class ParameterGroups:
    """Counts of one submodel. ``embedding`` and ``ffn`` share no parameter; attention, norms... are in neither."""

    total: int
    embedding: int
    ffn: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


def is_table(parameter: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter looks like a table of tokens or positions, or like the matrix back to the vocabulary.

    The rule goes by name: ``embeddings``, ``embed_...``, ``wte``, ``wpe`` or ``lm_head``, with two dimensions or more.
    A tied matrix back to the vocabulary is no parameter of its own; an untied one counts as a table, so that the
    non-embedding size of a model does not depend on tying.
    """
    return len(shape) > 1 and _TABLE_NAME.fullmatch(parameter) is not None


def parameter_groups(
    spec: ElasticSpec,
    shapes: Mapping[str, tuple[int, ...]],
    submodel: Submodel,
    is_embedding: Callable[[str, tuple[int, ...]], bool] = is_table,
) -> ParameterGroups:
    """Counts of ``submodel``, given the ``shapes`` of the universal model's parameters by name.

    ``ffn`` are the parameters that an axis of kind ``ffn`` slices, weights and biases alike; a bias that no slice
    changes, such as that of the down-projection, is not among them. ``is_embedding(parameter, full_shape)`` says which
    of the others are tables.
    """
    total = embedding = ffn = 0
    feed_forward = {axis.name for axis in spec.axes if axis.kind == _FFN_KIND}
    for name, shape in shapes.items():
        if not spec.has(name, submodel):
            continue
        count = prod(spec.shape_of(name, shape, submodel))
        total += count
        if any(cut.axis in feed_forward for cut in spec.slices_of(name)):
            ffn += count
        elif is_embedding(name, shape):
            embedding += count
    return ParameterGroups(total, embedding, ffn)
