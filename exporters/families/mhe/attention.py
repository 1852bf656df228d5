"""Attention as the paper writes it (sections 2.1 to 2.4), for every kind that it compares.

The number of heads, or of their numbers, is read off the weights, so that a narrowed copy needs no attribute mended;
scores are multiplied by one number for all of them.

Shapes: ``B`` rows, ``S`` tokens, ``N`` tokens that they read, ``H`` hidden, ``n`` heads of size ``d``; ``K`` heads of
keys and values, ``n`` or one that all share.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from ...modules.attention import Attend, Positions
from ...modules.layers import Answering, on_same_weights
from .config import ROLES, MheConfig
from .forms import folded_shapes, places_of, table

# Keys and values [B, K, N, d] that queries read, of the same tokens or of others.
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class PerHead(torch.nn.Module):
    """A sublayer whose heads have queries of their own, and keys and values, or one pair that all share."""

    config: MheConfig
    output: torch.nn.Linear

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        turn: Positions | None = None,
        attend: Attend | None = None,
        keys_and_values: KeysAndValues | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]. ``turn`` turns queries and keys by their positions, after their head
        embeddings; ``attend`` takes the place of attention over these tokens alone. In cross-attention
        ``keys_and_values`` is what the method of that name made of what is read."""
        query = self._queries(hidden)
        key, value = keys_and_values or self.keys_and_values(hidden, turn)
        if turn is not None:
            query = turn(query)
        context = (attend or attend_to_all)(query, key, value, mask, self.config.scale)
        if self.config.attention == "sha":  # one head, which the output projection reads as often as it has blocks
            context = context.repeat(1, self.config.num_attention_heads, 1, 1)
        return self.output(joined(context.transpose(1, 2), self.config))

    @abstractmethod
    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, n, S, d]."""

    @abstractmethod
    def keys_and_values(self, hidden: torch.Tensor, turn: Positions | None = None) -> KeysAndValues:
        """The keys and values [B, K, S, d] of ``hidden`` [B, S, H], of which a cache has these."""


class Attention(PerHead):
    """One sublayer of the configured kind; projections and tables under the names that ``parameters`` has."""

    # Those of these that the kind has.
    query: torch.nn.Linear
    key: torch.nn.Linear
    value: torch.nn.Linear
    key_value: torch.nn.Linear
    embedding: torch.nn.ParameterDict
    factor: torch.nn.ParameterDict

    def __init__(self, config: MheConfig) -> None:
        super().__init__()
        self.config = config
        hidden, bias = config.hidden_size, config.attention_bias
        for part in config.projections:
            outputs = config.inner if part in config.own_projections else config.head_size
            setattr(self, part, torch.nn.Linear(hidden, outputs, bias))
        self.output = torch.nn.Linear(config.inner, hidden, bias)
        if config.has_tables:
            tables = {role: torch.nn.Parameter(torch.zeros(config.table_shape)) for role in ROLES}
            setattr(self, table(config), torch.nn.ParameterDict(tables))

    def keys_and_values(self, hidden: torch.Tensor, turn: Positions | None = None) -> KeysAndValues:
        match self.config.attention:
            case "skv":
                key = value = self._split(self.key_value(hidden), "key_value")
            case "el_att":
                key = value = self._split(hidden, "query")
            case _:
                key, value = self._split(self.key(hidden), "key"), self._split(self.value(hidden), "value")
        if self.config.has_tables:
            key, value = self._told_apart(key, "key"), self._told_apart(value, "value")
        return (key if turn is None else turn(key)), value

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self._split(self.query(hidden), "query")
        return self._told_apart(query, "query") if self.config.has_tables else query

    def factors(self, role: str) -> torch.Tensor:
        """``s = 1 + e`` of every head of mhe_mul, [n, d], however it is stored."""
        tables = getattr(self, table(self.config))
        factors = by_head(tables[role], self.config)
        return factors if self.config.factors == "1+e" else factors + 1

    def embeddings(self, role: str) -> torch.Tensor:
        """``e`` of every head of mhe_add, [n, d]."""
        return by_head(self.embedding[role], self.config)

    def _split(self, projected: torch.Tensor, part: str) -> torch.Tensor:
        """Output of the projection ``part``, [B, S, K * d], to [B, K, S, d]."""
        return split(projected, self.config, part not in self.config.own_projections).transpose(1, 2)

    def _told_apart(self, seed: torch.Tensor, role: str) -> torch.Tensor:
        """Section 2.2: ``seed`` [B, 1, S, d] with the head embeddings, [B, n, S, d]."""
        if self.config.attention == "mhe_mul":
            return seed * self.factors(role)[:, None]
        return seed + self.embeddings(role)[:, None]


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Scaled dot-product attention over these tokens: see ``Attend``."""
    scores = (query * scale) @ key.transpose(-1, -2)  # [B, n, S, S]
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def split(projected: torch.Tensor, config: MheConfig, is_shared: bool = False) -> torch.Tensor:
    """A projection's output, [B, S, K * d], as a vector of each of its heads, [B, S, K, d]; ``K`` is ``n``, or 1 of
    one that all heads share. A size that may shrink is read off the tensor."""
    if not config.width_first:
        return projected.view(*projected.shape[:2], -1, config.head_size)
    heads = 1 if is_shared else config.num_attention_heads
    return projected.view(*projected.shape[:2], -1, heads).transpose(2, 3)


def joined(context: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """Head outputs, [B, S, n, d], as the output projection takes it, [B, S, n * d]."""
    return (context.transpose(2, 3) if config.width_first else context).flatten(2)


def by_head(table: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """A table of head embeddings as [n, d], or such numbers as a table."""
    return table.T if config.width_first else table


def rows_of(by_heads: torch.Tensor, config: MheConfig) -> torch.Tensor:
    """[n, d, ...] as the rows of a projection, [n * d, ...]."""
    return (by_heads.transpose(0, 1) if config.width_first else by_heads).flatten(0, 1)


_OPERATOR, _FLOAT = "com.microsoft::MultiHeadAttention", 1


def lower(module: Any, forms: Mapping[str, str]) -> Answering:
    """A copy of ``module``, an ``Answering``, on the same weights whose attention has the ``forms``, by its role."""
    return Answering(in_forms(module.model, forms))


def in_forms(model: Any, forms: Mapping[str, str]) -> Any:
    """A copy of a model on the same weights whose attention has the ``forms``, by its role; each holds for it."""
    lowered = on_same_weights(model)
    for at, _, role in places_of(model.config):
        layer, _, name = at.rpartition(".")
        setattr(lowered.get_submodule(layer), name, in_form(lowered.get_submodule(at), forms[role]))
    return lowered


def in_form(literal: Attention, form: str) -> torch.nn.Module:
    """``literal`` in one of the forms that hold for its configuration."""
    if form == "literal":
        return literal
    return Expanded(literal) if form == "expanded" else SharedKeys(literal, form)


def folded_tensor(module: Any, name: str) -> torch.Tensor:
    """The tensor ``name`` of ``folded_shapes``, such as ``layers.3.attention.folded.query``."""
    at, _, part = name.partition("attention.")
    return fold(module.model.get_submodule(f"{at}attention"), part)


class SharedKeys(torch.nn.Module):
    """Forms C, D and E, and E's with one exponential, of ``literal``, on its parameters."""

    def __init__(self, literal: Attention, form: str) -> None:
        super().__init__()
        self.config, self.form = literal.config, form
        self.is_mul = literal.config.attention == "mhe_mul"
        self.query, self.key, self.value, self.output = literal.query, literal.key, literal.value, literal.output
        queries = "queries" if form == "expanded_queries" else "query"
        self.folded: Any = Folded(literal, "folded", (queries, "output" if self.is_mul else "key"))
        if not self.is_mul:
            self.embedding = literal.embedding

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        turn: Positions | None = None,
        attend: Attend | None = None,
        keys_and_values: KeysAndValues | None = None,
    ) -> torch.Tensor:
        """As ``PerHead.forward``; positions turn nothing in these forms."""
        assert turn is None
        if attend is not None:
            query = self._queries(hidden).transpose(1, 2)
            return self._output(
                attend(query, *(keys_and_values or self.keys_and_values(hidden)), mask, 1.0).transpose(1, 2)
            )
        key, value = (  # [B, N, d]
            (one.squeeze(1) for one in keys_and_values) if keys_and_values else (self._key(hidden), self.value(hidden))
        )
        if self.form == "one_exponential":
            return self._output(self._weighed(hidden, key, value, mask))
        if self.form == "one_head":
            query = self._queries(hidden, ones=mask is not None)
            return self._output(attend_as_one_head(query, key, value, mask))
        if self.form == "shared_scores":
            scores = self._seed_scores(hidden, key, mask)[:, :, None] + self._by_key(key).transpose(1, 2)[:, None]
        else:
            query = self._queries(hidden)  # [B, S, n, d]
            scores = (query.flatten(1, 2) @ key.transpose(1, 2)).view(*query.shape[:3], key.shape[1])  # [B, S, n, N]
            if mask is not None:
                scores = scores + mask.transpose(1, 2)
        context = scores.softmax(-1).flatten(1, 2) @ value
        return self._output(context.view(*scores.shape[:3], value.shape[2]))

    def keys_and_values(self, hidden: torch.Tensor, turn: Positions | None = None) -> KeysAndValues:
        """The keys and values [B, 1, S, d] that a cache has of ``hidden`` [B, S, H]."""
        assert turn is None
        return self._key(hidden)[:, :, None].transpose(1, 2), self.value(hidden)[:, :, None].transpose(1, 2)

    def _queries(self, hidden: torch.Tensor, ones: bool = False) -> torch.Tensor:
        """[B, S, n, d], with the softmax scale in them or in the keys; with ``ones`` a 1 behind the numbers of each."""
        if self.form == "expanded_queries":
            return _projected(hidden, self.folded.queries, self.config)
        seed: torch.Tensor = self.query(hidden).view(*hidden.shape[:2], 1, -1)
        own = by_head(self.folded.query if self.is_mul else self.embedding["query"], self.config)
        if ones:
            seed, own = functional.pad(seed, (0, 1), value=1.0), functional.pad(own, (0, 1), value=float(self.is_mul))
        return seed * own if self.is_mul else seed + own

    def _key(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, d]. A bias of keys, as what mhe_add adds to them, is the same for all keys of a query (6.4)."""
        return functional.linear(hidden, self.key.weight if self.is_mul else self.folded.key)

    def _seed_scores(self, hidden: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Section 6.4: the matrix of scores that all heads share, [B, S, N]."""
        scores: torch.Tensor = self.query(hidden) @ key.transpose(1, 2)
        return scores if mask is None else scores + mask[:, 0]

    def _by_key(self, key: torch.Tensor) -> torch.Tensor:
        """Each head's addend to the scores of each ``key`` [B, N, d]: [B, N, n]."""
        return functional.linear(key, by_head(self.embedding["query"], self.config))

    def _weighed(
        self, hidden: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Section 6.7, to [B, S, n, d]: a head's probabilities are the shared ones times ``exp`` of what it adds to a
        key, divided by their sum. Both exponentials are taken of what their largest leaves, so that none overflows; the
        smallest is bounded by ``key_spread``, so that no sum is lost."""
        shared, by_key = self._seed_scores(hidden, key, mask).softmax(-1), self._by_key(key)
        weights = (by_key - by_key.amax(1, keepdim=True)).exp()  # [B, N, n]
        weighed = weights[..., None] * value[:, :, None]  # [B, N, n, d]
        context = (shared @ weighed.flatten(2)).view(*hidden.shape[:2], *weighed.shape[2:])
        return context / (shared @ weights)[..., None]

    def _output(self, context: torch.Tensor) -> torch.Tensor:
        """Head outputs [B, S, n, d] to [B, S, H]. The embedding that mhe_add adds to values is added here: rows of
        probabilities sum to 1 (6.5)."""
        if self.is_mul:
            return functional.linear(joined(context, self.config), self.folded.output, self.output.bias)
        shifted = context + by_head(self.embedding["value"], self.config)
        return self.output(joined(shifted, self.config))


class Expanded(PerHead):
    """Form B of ``literal``: an ordinary MHA, with a projection of each role for each head."""

    def __init__(self, literal: Attention) -> None:
        super().__init__()
        self.config, self.output = literal.config, literal.output
        self.expanded: Any = Folded(literal, "expanded", ROLES)

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._of_heads(hidden, self.expanded.query)

    def keys_and_values(self, hidden: torch.Tensor, turn: Positions | None = None) -> KeysAndValues:
        key, value = (self._of_heads(hidden, part) for part in (self.expanded.key, self.expanded.value))
        return (key if turn is None else turn(key)), value

    def _of_heads(self, hidden: torch.Tensor, part: Any) -> torch.Tensor:
        """``hidden`` [B, S, H] to a vector of each head, [B, n, S, d]."""
        return _projected(hidden, part, self.config).transpose(1, 2)


class Folded(torch.nn.Module):
    """Tensors of ``folded_shapes`` as parameters under their names, those below ``prefix``."""

    def __init__(self, literal: Attention, prefix: str, parts: tuple[str, ...]) -> None:
        super().__init__()
        known = folded_shapes(literal.config, "")
        for part in parts:
            for name in (f"{prefix}.{part}", f"{prefix}.{part}.weight", f"{prefix}.{part}.bias"):
                if f".{name}" in known:
                    _set(self, name.removeprefix(f"{prefix}."), torch.nn.Parameter(fold(literal, name), False))


def attend_as_one_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of heads that share keys and values, by ONNX Runtime's operator that never writes scores to memory.

    ``com.microsoft::MultiHeadAttention`` does so on a processor where it is given neither mask nor bias: blocks of
    queries meet blocks of keys in the caches of a core (FlashAttention, arXiv 2205.14135). The queries of all heads are
    rows of one head. A mask of keys is a dimension more of queries, 1, and of keys, what is added to their scores.

    The sums of ``value`` [B, N, d] that ``query`` [B, S, n, d], with the softmax scale in it or in ``key`` [B, N, d],
    reads: [B, S, n, d]. With a ``mask`` [B, 1, 1, N] queries have a 1 behind their numbers, [B, S, n, d + 1]."""
    rows = query.flatten(1, 2)  # [B, S * n, d] or [B, S * n, d + 1]
    if mask is not None:
        key = torch.cat((key, mask[:, 0].transpose(1, 2)), 2)
    if torch.compiler.is_exporting():
        context = torch.onnx.ops.symbolic(
            _OPERATOR,
            [rows, key, value],
            {"num_heads": 1, "scale": 1.0},
            dtype=_FLOAT,
            shape=(*rows.shape[:2], value.shape[2]),
            version=1,
        )
    else:
        context = (rows @ key.transpose(1, 2)).softmax(-1) @ value
    return context.view(*query.shape[:3], value.shape[2])


def _projected(hidden: torch.Tensor, part: Any, config: MheConfig) -> torch.Tensor:
    """``hidden`` [B, S, H] to a vector of each head, [B, S, n, d]."""
    return split(functional.linear(hidden, part.weight, getattr(part, "bias", None)), config)


def _set(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """``parameter`` as ``name`` below ``module``, where the first part of a dotted name is a module of its own."""
    inside, _, own = name.rpartition(".")
    if inside and inside not in dict(module.named_children()):
        module.add_module(inside, torch.nn.Module())
    module.get_submodule(inside).register_parameter(own, parameter)


def fold(attention: Attention, name: str) -> torch.Tensor:
    """The tensor called ``name`` below ``attention``, in the dtype of its parameters; sums and products in float64,
    rounded once.

    Each element is made of one number of one head, and of what all share at its place, so the first heads of a fold, or
    the first numbers of all heads, are the fold of those, to the bit.
    """
    form, _, part = name.partition(".")
    made = _folded(attention, part) if form == "folded" else _expanded(attention, *part.split("."))
    return made.to(attention.output.weight.dtype).contiguous()


def _folded(attention: Attention, part: str) -> torch.Tensor:
    config = attention.config
    match part:
        case "query":  # section 6.3
            return by_head(_query_factors(attention), config)
        case "key":
            return _weight(attention, "key") * config.scale
        case "output":  # section 6.5
            return attention.output.weight.detach().double() * rows_of(_factors(attention, "value"), config)
    kind = part.rpartition(".")[2]
    if config.attention == "mhe_mul":
        return _scaled_rows(attention, "query", kind, _query_factors(attention))
    return _expanded(attention, "query", kind)


def _expanded(attention: Attention, role: str, kind: str) -> torch.Tensor:
    """Sections 6.1 and 6.2: the projection of ``role`` for each head, [n * d, H], or its bias [n * d]."""
    if attention.config.attention == "mhe_mul":
        return _scaled_rows(attention, role, kind, _factors(attention, role))
    added = attention.embeddings(role).detach().double()  # [n, d]
    if kind == "weight":
        return rows_of(_weight(attention, role).expand(len(added), -1, -1), attention.config)
    bias: torch.Tensor | None = getattr(attention, role).bias
    return rows_of(added if bias is None else added + bias.detach().double(), attention.config)


def _scaled_rows(attention: Attention, role: str, kind: str, factors: torch.Tensor) -> torch.Tensor:
    """The projection's weight [n * d, H] or bias [n * d] with each head's ``factors`` [n, d] on its rows."""
    if kind == "bias":
        bias: torch.Tensor = getattr(attention, role).bias
        return rows_of(bias.detach().double() * factors, attention.config)
    return rows_of(_weight(attention, role) * factors[..., None], attention.config)


def _weight(attention: Attention, role: str) -> torch.Tensor:
    weight: torch.Tensor = getattr(attention, role).weight
    return weight.detach().double()


def _query_factors(attention: Attention) -> torch.Tensor:
    """``c_i`` of section 6.3, [n, d]: both factors of a head, and the softmax scale."""
    return _factors(attention, "query") * _factors(attention, "key") * attention.config.scale


def _factors(attention: Attention, role: str) -> torch.Tensor:
    return attention.factors(role).detach().double()
