"""Attention whose first ``k`` heads are an attention of their own, which keys a query sees, and rotary positions;
attention over a cache of keys and values that the caller holds, as one operation that an engine runs in place.

The number of heads is read off the weights, so a narrowed copy needs no attribute mended; the head size, and with it
the scale ``1 / sqrt(head_dim)``, never changes. Shapes: ``B`` rows, ``S`` new tokens, ``A`` query heads that share
``K`` heads of keys and values of size ``D``, ``C`` tokens of capacity.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .layers import View

ROTARY_BASE = 10_000.0

# A change of queries and keys [B, A, S, D] for their positions.
Positions = Callable[[torch.Tensor], torch.Tensor]


def additive_mask(is_seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``is_seen`` (bool, any shape) to the same shape in the dtype of ``like``: 0 where a key is seen.

    The lowest finite number of float32, or of a narrower ``like``, elsewhere: it takes up every score. Not minus
    infinity, so that a query that sees nothing gets the mean of all values and no graph needs a guard against NaN.
    """
    lowest = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)
    return torch.where(is_seen, 0.0, lowest).to(like.dtype)


def causal_mask(length: int, like: torch.Tensor) -> torch.Tensor:
    """``[S, S]`` in the dtype of ``like``, added to scores: 0 where a query may see a key."""
    place = torch.arange(length, device=like.device)
    return additive_mask(place[:, None] >= place[None, :], like)


def hidden_beyond(lengths: torch.Tensor, most: int) -> torch.Tensor:
    """Mask added to scores of ``most`` tokens, [B, 1, 1, most]: 0 for the first ``lengths`` [B] of a row, and the
    lowest number behind them."""
    is_seen = torch.arange(most) < lengths[:, None]
    return torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]


def rotary(places: torch.Tensor, head_dim: int) -> Positions:
    """Rotary positions at ``places`` [S], or [B, 1, S]: the first half of each head is turned against the second."""
    half = head_dim // 2
    rates = ROTARY_BASE ** -(torch.arange(half, device=places.device, dtype=torch.float32) / half)  # [D / 2]
    angles = places.to(torch.float32)[..., None] * rates  # [S, D / 2]
    cos, sin = angles.cos(), angles.sin()
    return partial(_turn, cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [B, A, S, D], turned by the angles of its positions: ``cos`` and signed ``sin`` [S, D] or [B, 1, S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((second, first), dim=-1) * sin.to(x.dtype)


# Attention of queries [B, A, S, D] over keys and values [B, K, N, D], given what is added to scores or nothing, and
# what scores are multiplied by: [B, A, S, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]


class NestedAttention(torch.nn.Module):
    """Projections ``query``, ``key``, ``value`` [A * D, H] and ``output`` [H, A * D]; heads are blocks of D rows."""

    def __init__(self, hidden: int, heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        inner = heads * head_dim
        self.query, self.key, self.value = (torch.nn.Linear(hidden, inner, bias=bias) for _ in range(3))
        self.output = torch.nn.Linear(inner, hidden, bias=bias)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: Positions | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H].

        ``mask``, [S, S] or what broadcasts to [B, A, S, S], is added to every score; ``positions`` turns queries and
        keys. ``attend`` takes the place of attention over these tokens alone.
        """
        query, key, value = (
            part(hidden).view(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)  # [B, A, S, D]
            for part in (self.query, self.key, self.value)
        )
        if positions is not None:
            query, key = positions(query), positions(key)
        if attend is not None:
            context = attend(query, key, value, mask, self.head_dim**-0.5)
        else:
            context = functional.scaled_dot_product_attention(query, key, value, mask, scale=self.head_dim**-0.5)
        return self.output(context.transpose(1, 2).flatten(2))  # [B, S, A * D]


_FLOAT, _OPERATOR, _ANYWHERE = 1, "com.microsoft::GroupQueryAttention", -1


class Cache(NamedTuple):
    """Keys and values ``[B, K, C, D]`` of one layer."""

    keys: torch.Tensor
    values: torch.Tensor


class CachePlaces(NamedTuple):
    """Where the new tokens go: the place of each row's last one ``[B]``, and the tokens of the longest row with them
    (both int32)."""

    last: torch.Tensor
    total: torch.Tensor


def cache_places(position_ids: torch.Tensor) -> CachePlaces:
    """The places of ``position_ids`` [B, S], which rise by one in every row."""
    places = position_ids.to(torch.int32)
    return CachePlaces(places[:, -1], places.max() + 1)


def places_in_window(first: torch.Tensor, tokens: int) -> CachePlaces:
    """The places of so many new ``tokens`` of each row in a buffer that a window slides through, from ``first`` [B]
    on."""
    return CachePlaces((first + (tokens - 1)).to(torch.int32), (first.max() + tokens).to(torch.int32))


def tokens_so_far(places: CachePlaces) -> torch.Tensor:
    """The places ``[T]`` int64 of all tokens of the longest row, those of ``places`` included."""
    total: Any = places.total.item()
    torch._check(total >= 1)  # type: ignore[no-untyped-call]
    return torch.arange(total, device=places.total.device)


def caches_of(past: Sequence[torch.Tensor]) -> list[Cache]:
    """The caches of all layers, given key and value in turn."""
    return [Cache(*pair) for pair in zip(past[::2], past[1::2], strict=True)]


def cached_attention(
    query: torch.Tensor,
    new: Cache,
    past: Cache,
    places: CachePlaces,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Cache]:
    """Attention of ``query`` [B, A, S, D] over the ``past`` and the ``new`` tokens [B, K, S, D], as [B, S, A, D], and
    the cache with those. Every token sees those up to itself, the last ``window`` of them where that is given; scores
    are bent to ``soft_cap``. ``bias`` [B, A, S, T] is added to scores, of all ``T`` tokens so far.

    For an export alone: ONNX Runtime's operator, which writes into the past where both are one buffer. With several
    rows each has one new token.
    """
    rows, heads, tokens, size = query.shape
    keys, values = new
    found, *present = torch.onnx.ops.symbolic_multi_out(
        _OPERATOR,
        [_flat(query), _flat(keys), _flat(values), *past, *places, *([None] * 3 + [bias] if bias is not None else [])],
        _attributes(heads, keys.shape[1], scale, soft_cap, window),
        dtypes=(_FLOAT,) * 3,
        shapes=((rows, tokens, heads * size), past.keys.shape, past.values.shape),
        version=1,
    )
    return found.view(rows, tokens, heads, size), Cache(*present)


def over_cache(before: Cache, new: CachePlaces, present: list[torch.Tensor]) -> Attend:
    """Attention of new tokens at ``new`` over what the cache has ``before`` them, given what is added to scores,
    [A, B, S, T], or nothing; appends to ``present`` the keys and values that the cache has with them."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        bias = None if added is None else added.transpose(0, 1)  # [B, A, S, T]
        found, after = cached_attention(query, Cache(key, value), before, new, scale, bias=bias)
        present.extend(after)
        return found.transpose(1, 2)

    return attend


class CachedLM(View):
    """A decoder of ours with the interface of ``GenerationEntry``; to be traced. Its ``begun`` makes of new tokens
    their first states, and what every layer is given beside them."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        model, new, present = self.model, cache_places(position_ids), list[torch.Tensor]()
        hidden, *given = model.begun(input_ids, position_ids, new)
        for layer, before in zip(model.layers, caches_of(past), strict=True):
            hidden = layer(hidden, *given, attend=over_cache(before, new, present))
        return (model.logits(hidden[:, logits_at]), *present)


def reading_attention(
    query: torch.Tensor,
    cache: Cache,
    places: CachePlaces,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of ``query`` [B, A, S, D] over a ``cache`` that has the new tokens already, as [B, S, A, D]; the rest
    as of ``cached_attention``. Nothing is written: to the operator there are no new keys and values."""
    rows, heads, tokens, size = query.shape
    shared, flat = cache.keys.shape[1], _flat(query)
    none = flat[:, :0, : shared * size]
    found = torch.onnx.ops.symbolic(
        _OPERATOR,
        [flat, none, none, *cache, *places],
        _attributes(heads, shared, scale, soft_cap, window),
        dtype=_FLOAT,
        shape=(rows, tokens, heads * size),
        version=1,
    )
    return found.view(rows, tokens, heads, size)


def _attributes(heads: int, shared: int, scale: float, soft_cap: float | None, window: int | None) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "kv_num_heads": shared,
        "scale": scale,
        "softcap": soft_cap or 0.0,
        "local_window_size": window or _ANYWHERE,
    }


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``[B, heads, S, D]`` as ``[B, S, heads * D]``."""
    return x.transpose(1, 2).flatten(2)
