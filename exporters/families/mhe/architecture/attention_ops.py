"""What attention of an MHE model costs, operation by operation, in each of its forms (no torch here).

Shapes: ``B`` rows, ``S`` tokens, ``T = B * S``, ``H`` hidden, ``n`` heads of size ``d``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .....bucket import Bucket
from .....workload import Op, elementwise, linear, self_attention
from .config import MheConfig

_FLOAT32_BYTES = 4
# Scores of so many bytes stay in the caches of a processor from one operation to the next. Of more, an operator that
# never writes them saves as much as two passes of the softmax take.
_IN_CACHES, _SOFTMAX_PASSES, _SAVED_PASSES = 4_000_000, 8, 2


class Sublayer(NamedTuple):
    """One attention sublayer, called ``at``, of a submodel that keeps ``heads`` of ``size``. Its queries read
    ``source`` tokens of each row, as many as there are queries unless stated."""

    config: MheConfig
    at: str
    bucket: Bucket
    heads: int
    size: int
    source: int | None = None

    @property
    def inner(self) -> int:
        return self.heads * self.size

    @property
    def pairs(self) -> int:
        """Numbers of one head's scores."""
        return self.bucket.tokens * (self.source or self.bucket.sequence)

    @property
    def scores(self) -> int:
        """Numbers of all heads' scores."""
        return self.heads * self.pairs

    def linear(self, part: str, outputs: int, bias: bool | None = None) -> Op:
        """A projection of the hidden state."""
        has_bias = self.config.attention_bias if bias is None else bias
        return linear(f"{self.at}.{part}", self.bucket.tokens, self.config.hidden_size, outputs, has_bias)

    def output(self) -> Op:
        tokens, bias = self.bucket.tokens, self.config.attention_bias
        return linear(f"{self.at}.output", tokens, self.inner, self.config.hidden_size, bias)

    def elementwise(self, part: str, elements: int, passes: int) -> Op:
        return elementwise(f"{self.at}.{part}", elements, passes)

    def product(self, part: str, heads: int) -> Op:
        """Scores of ``heads`` queries for each token, or what they mix."""
        size, pairs = self.size, heads * self.pairs
        read = self.bucket.batch * (self.source or self.bucket.sequence)
        moved = (heads * self.bucket.tokens * size + read * size + pairs) * _FLOAT32_BYTES
        return Op(f"{self.at}.{part}", "batched_gemm", 2 * pairs * size, 0, moved)


def plain_ops(of: Sublayer) -> list[Op]:
    """One sublayer of a kind without head embeddings (section 2.4)."""
    widths, heads = _plain_widths(of), _heads_of_scores(of)
    return [
        *(of.linear(f"projection.{number}", width) for number, width in enumerate(widths)),
        of.elementwise("split", of.bucket.tokens * sum(widths), passes=4),
        of.product("scores", heads),
        of.elementwise("softmax", heads * of.pairs, passes=_SOFTMAX_PASSES),
        of.product("context", heads),
        of.output(),
    ]


def kept_ops(of: Sublayer) -> list[Op]:
    """The keys and values that all queries of a generation read, in the form of engines that keep a cache."""
    one = of.size
    widths = (one, one) if of.config.has_tables else _plain_widths(of)[1:]
    return [of.linear(f"kept.{number}", width) for number, width in enumerate(widths)]


def reading_ops(of: Sublayer) -> list[Op]:
    """Queries over keys and values that are there, in the form of engines that keep a cache."""
    heads, config = _heads_of_scores(of), of.config
    fold = [of.elementwise("embeddings", of.bucket.tokens * of.inner, passes=2)] if config.has_tables else []
    return [
        of.linear("query", of.size if config.has_tables else _plain_widths(of)[0]),
        *fold,
        of.product("scores", heads),
        of.elementwise("softmax", heads * of.pairs, passes=_SOFTMAX_PASSES),
        of.product("context", heads),
        of.output(),
    ]


def _plain_widths(of: Sublayer) -> tuple[int, ...]:
    """Outputs of the projections of a kind without head embeddings, queries first."""
    size = of.size
    return {
        "mha": (of.inner,) * 3,
        "sha": (size,) * 3,
        "mqa": (of.inner, size, size),
        "skv": (of.inner,) * 2,
        "el_att": (of.inner,),
    }[of.config.attention]


def _heads_of_scores(of: Sublayer) -> int:
    return 1 if of.config.attention == "sha" else of.heads


def form_ops(of: Sublayer) -> Mapping[str, list[Op]]:
    """The operations of one sublayer with head embeddings, by form."""
    return {form: ops(of) for form, ops in _OPS_BY_FORM.items()}


def _literal(of: Sublayer) -> list[Op]:
    """Every head's queries, keys and values are made, then turned around as an MHA's are."""
    size, every = of.size, of.bucket.tokens * of.inner
    return [
        *(of.linear(part, size) for part in ("query", "key", "value")),
        of.elementwise("embeddings", 3 * every, passes=2),
        of.elementwise("split", 3 * every, passes=2),
        of.product("scores", of.heads),
        of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES),
        of.product("context", of.heads),
        of.output(),
    ]


def _expanded(of: Sublayer) -> list[Op]:
    """An MHA of as many heads; what mhe_add adds is its biases."""
    config, has_bias = of.config, of.config.attention_bias or of.config.attention == "mhe_add"
    return self_attention(of.at, of.bucket, config.hidden_size, of.heads, of.size, has_bias)


def _expanded_queries(of: Sublayer) -> list[Op]:
    has_bias = of.config.attention_bias or of.config.attention == "mhe_add"
    return [of.linear("query", of.inner, has_bias), *_over_shared_keys(of)]


def _normal(of: Sublayer) -> list[Op]:
    fold = of.elementwise("embeddings", of.bucket.tokens * of.inner, passes=2)
    return [of.linear("query", of.size), fold, *_over_shared_keys(of)]


def _one_head(of: Sublayer) -> list[Op]:
    """As the normal form, but that scores never leave the caches of a core, where many of them would."""
    saved = _SAVED_PASSES if of.scores * _FLOAT32_BYTES > _IN_CACHES else 0
    softmax = of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES - saved)
    return [softmax if op.name == softmax.name else op for op in _normal(of)]


def _shared_scores(of: Sublayer) -> list[Op]:
    size = of.size
    return [
        *(of.linear(part, size) for part in ("query", "key", "value")),
        of.product("scores", 1),
        of.elementwise("mask", of.pairs, passes=2),
        linear(f"{of.at}.key_bias", of.bucket.tokens, size, of.heads, bias=False),
        of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES),
        *_mixed(of),
    ]


def _one_exponential(of: Sublayer) -> list[Op]:
    size, tokens = of.size, of.bucket.tokens
    moved = (of.pairs + 2 * tokens * of.inner) * _FLOAT32_BYTES
    return [
        *(of.linear(part, size) for part in ("query", "key", "value")),
        of.product("scores", 1),
        of.elementwise("mask", of.pairs, passes=2),
        of.elementwise("softmax", of.pairs, passes=_SOFTMAX_PASSES),
        linear(f"{of.at}.key_bias", tokens, size, of.heads, bias=False),
        of.elementwise("weights", tokens * of.heads, passes=6),
        of.elementwise("weighed", tokens * of.inner, passes=2),
        Op(f"{of.at}.context", "batched_gemm", 2 * of.pairs * of.inner, 0, moved),
        Op(f"{of.at}.sums", "batched_gemm", 2 * of.scores, 0, of.pairs * _FLOAT32_BYTES),
        of.elementwise("divided", tokens * of.inner, passes=2),
        of.elementwise("value_shift", tokens * of.inner, passes=2),
        of.output(),
    ]


def _over_shared_keys(of: Sublayer) -> list[Op]:
    return [
        *(of.linear(part, of.size) for part in ("key", "value")),
        of.product("scores", of.heads),
        of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES),
        *_mixed(of),
    ]


def _mixed(of: Sublayer) -> list[Op]:
    """Values are the same for all heads; what mhe_add adds to them is added to what each head read."""
    shifts = of.config.attention == "mhe_add"
    shift = [of.elementwise("value_shift", of.bucket.tokens * of.inner, passes=2)] if shifts else []
    return [of.product("context", of.heads), *shift, of.output()]


_OPS_BY_FORM: Mapping[str, Callable[[Sublayer], list[Op]]] = {
    "normal": _normal,
    "one_head": _one_head,
    "shared_scores": _shared_scores,
    "one_exponential": _one_exponential,
    "expanded_queries": _expanded_queries,
    "expanded": _expanded,
    "literal": _literal,
}
