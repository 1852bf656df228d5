"""Decoders of transformers as they generate with a KV cache, and as they show the keys and values that they keep.

Their classes call attention by a name in their configuration, with queries and keys already turned to their positions,
and masks by the same name; or they have attention of their own, over what an object of theirs for caches returns.
Shapes: ``B`` rows, ``S`` new tokens, ``A`` heads of size ``D``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from ...bundle.entries.generation_entry import CachedLayer, window_of
from ..checkpoints.config import offline_transformers
from ..modules.attention import (
    Cache,
    CachePlaces,
    cache_places,
    cached_attention,
    caches_of,
    hidden_beyond,
    places_in_window,
    reading_attention,
)
from ..modules.layers import View
from ..signature import WRITTEN_IDS
from .distances import BIAS, biased_at
from .passes import nothing_left
from .transformers_internals import attention_of, has_attention, masks_by_attention, set_attention

_NAME = "nestforge"
# Layers of transformers' cache that keep every token, by those that keep a window.
_EVERY = {
    "DynamicSlidingWindowLayer": "DynamicLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LinearAttentionAndFullAttentionLayer",
}
# Attention of every layer while a pass lasts, by its module, query, key, value, mask and the keywords of its class.
_attending: list[Callable[..., torch.Tensor]] = []


class State(NamedTuple):
    """A recurrent state of a row: the number of its layer in transformers' cache, the attribute there, its place in
    that and its shape."""

    layer: int
    kind: Literal["conv_states", "recurrent_states"]
    place: int
    shape: tuple[int, ...]

    def of(self, cache: Any) -> torch.Tensor:
        """Its value in ``cache``, ``[B, ...]``."""
        found: torch.Tensor = getattr(cache.layers[self.layer], self.kind)[self.place]
        return found


class CachedDecoder(torch.nn.Module):
    """``model``, a class with a head over the vocabulary, with the interface of ``GenerationEntry``; to be traced.
    ``layers`` are those that have keys and values of their own, of the ``numbers`` in transformers' cache, which has so
    ``many``; these are known where there are ``states``. Behind an encoder each ``reads`` keys and values of a
    prompt."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[CachedLayer],
        numbers: Sequence[int] = (),
        many: int = 0,
        states: Sequence[State] = (),
        reads: Sequence[CachedLayer] = (),
    ) -> None:
        super().__init__()
        self.model, self.layers, self.states = model, layers, states
        self.numbers, self.many, self.reads = numbers, many, reads

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *kept: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``kept``: where layers have a window the places of new tokens in their buffers; behind an encoder how many
        tokens of each row it read and what layers read of them; and the cache."""
        in_text = in_window = cache_places(position_ids)
        if window_of(self.layers) is not None:
            in_window, kept = places_in_window(kept[0], input_ids.shape[1]), kept[1:]
        cache, crossed = {}, list[tuple[torch.Tensor, Cache, torch.Tensor]]()
        if self.reads:  # keys as the caller has them [B, A, D, N], and as the class
            beyond, kept = hidden_beyond(kept[0], kept[1].shape[3]), kept[1:]
            sources, kept = caches_of(kept[: 2 * len(self.reads)]), kept[2 * len(self.reads) :]
            crossed = [(keys, Cache(keys.transpose(2, 3), values), beyond) for keys, values in sources]
            cache = behind(self.model, [own for _, own, _ in crossed])
        kept, states = kept[: 2 * len(self.layers)], kept[2 * len(self.layers) :]
        given = caches_of(kept)
        if self.states:
            cache = _cache(self.model, {n: _Passing() for n in self.numbers}, self.many, self.states, states)
        # Keys of new tokens, the cache with them, where they are in it, and the window.
        present: list[tuple[torch.Tensor, Cache, CachePlaces, int | None]] = []

        def attend(
            _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, how: dict[str, Any]
        ) -> torch.Tensor:
            scaling = how.get("scaling")
            bent = (query.shape[-1] ** -0.5 if scaling is None else scaling, how.get("softcap"))
            for keys, source, beyond in crossed:
                if source.keys is key:
                    return _source_attention(query, keys, value, beyond, *bent)
            for own, cache, places, window in present:
                if own is key:  # those of an earlier layer, which has written them
                    read = reading_attention(_wide(query, cache.keys.shape[-1]), cache, places, *bent, window)
                    return read[..., : value.shape[-1]]
            layer, past = self.layers[len(present)], given[len(present)]
            places = in_text if layer.window is None else in_window
            query, new = _wide(query, layer.size), Cache(_wide(key, layer.size), _wide(value, layer.size))
            found, after = cached_attention(query, new, past, places, *bent, layer.window, how.get(BIAS))
            present.append((key, after, places, layer.window))
            return found[..., : value.shape[-1]]

        with attention_by(self.model, attend), biased_at(self.model, position_ids, in_text):
            logits = self.scored(input_ids, position_ids, logits_at, **cache)
        return (logits, *(tensor for _, after, *_ in present for tensor in after), *_after(self.states, cache))

    def scored(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, **cache: Any
    ) -> torch.Tensor:
        """The logits of the model, given a ``cache`` as transformers has it."""
        found: torch.Tensor = asked(self.model, input_ids, position_ids, logits_at, **cache).logits
        return found


class BufferedDecoder(CachedDecoder):
    """As CachedDecoder, of a class whose attention is its own: it reads whole buffers, as of transformers' static
    cache, of which each token sees the places up to its own that the class's masks let it see."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *kept: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``kept``: the cache."""
        kept, states = kept[: 2 * len(self.layers)], kept[2 * len(self.layers) :]
        buffers = [_Buffer(past, position_ids) for past in caches_of(kept)]
        own = dict(zip(self.numbers, buffers, strict=True))
        cache = _cache(self.model, own, self.many, self.states, states)
        given = dict(cache)
        if "attention_mask" in inspect.signature(self.model.forward).parameters:
            given["attention_mask"] = input_ids.new_ones((input_ids.shape[0], buffers[0].places))
        with own_attention_masks(self.model, position_ids, buffers[0].places):
            logits = self.scored(input_ids, position_ids, logits_at, **given)
        return (logits, *(tensor for buffer in buffers for tensor in buffer.present), *_after(self.states, cache))


def _cache(
    model: Any, attention: Mapping[int, Any], many: int, states: Sequence[State], given: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """The arguments by which ``model`` takes a cache of so ``many`` layers: those of ``attention`` by number, and
    layers of transformers' own whose ``states`` are copies of those ``given``."""
    transformers = offline_transformers()
    utils = transformers.cache_utils
    utils.CacheLayerMixin.register(_Passing)  # as instances of which Cache counts attention
    usual = next(iter(attention.values()), utils.DummyLayer())
    layers = [attention.get(number, usual) for number in range(many)]
    for number in sorted({state.layer for state in states}):
        own = [(state, tensor) for state, tensor in zip(states, given, strict=True) if state.layer == number]
        layer = utils.LinearAttentionLayer(number_of_states=1 + max(state.place for state, _ in own))
        for state, tensor in own:
            getattr(layer, state.kind)[state.place] = tensor.clone()
            getattr(layer, f"is_{state.kind}_initialized")[state.place] = layer.has_previous_state[state.place] = True
            if state.kind == "conv_states":
                layer.conv_kernel_size[state.place] = tensor.shape[-1]
        if (both := attention.get(number)) is None:
            layers[number] = layer
        else:  # what it is given stays in the caller's hands
            both.__class__ = type("Both", (type(both), type(layer)), {})
            vars(both).update(vars(layer))
    return {cache_argument(model) or "": transformers.Cache(layers=layers), "use_cache": True}


def behind(model: Any, sources: Sequence[Cache]) -> dict[str, Any]:
    """The arguments by which the decoder of ``model`` reads ``sources``, keys and values ``[B, A, N, D]`` of a prompt
    for each layer, and passes keys of its own on."""
    transformers = offline_transformers()
    own, _ = _cache(model, {n: _Passing() for n in range(len(sources))}, len(sources), (), ()).values()
    read = [_Source() for _ in sources]
    for layer, source in zip(read, sources, strict=True):
        layer.keys, layer.values = source
    both = transformers.EncoderDecoderCache(own, transformers.Cache(layers=read))
    both.is_updated = dict.fromkeys(range(len(sources)), True)
    keys = sources[0].keys[:, 0]
    projection = getattr(model, "enc_to_dec_proj", None)
    if projection is not None:
        keys = keys.new_zeros((*keys.shape[:2], projection.in_features))
    hidden = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=keys)  # which none reads
    hidden.attention_mask = None  # which some encoders return
    return {"past_key_values": both, "encoder_outputs": hidden, "use_cache": True}


def encoded(model: Any, source: torch.Tensor) -> dict[str, Any]:
    """The arguments by which the decoder of ``model`` is given what its encoder makes of ``source``, tokens [B, N] or
    rows of the array that it takes, and an empty cache of transformers for both."""
    with nothing_left(model):
        answer = model.get_encoder()(source)
    return {"encoder_outputs": answer, "past_key_values": empty_cache(), "use_cache": True}


def empty_cache() -> Any:
    """A cache of transformers for a pass of a decoder behind an encoder."""
    transformers = offline_transformers()
    return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())


def source_keys(cache: Any) -> tuple[torch.Tensor, ...]:
    """Keys [1, A, D, N] and values [1, A, N, D] of an encoder's answer, by layer, as a pass left them in ``cache``."""
    layers = cache.cross_attention_cache.layers
    return tuple(each for layer in layers for each in (layer.keys.transpose(2, 3), layer.values))


class SourceKeys(View):
    """An encoder-decoder ``model`` up to what its decoder reads of a prompt, with the interface of ``EncoderEntry``."""

    def forward(self, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``source`` [1, ...] to keys [1, A, D, N] and values [1, A, N, D] of each layer of the decoder in turn."""
        given = encoded(self.model, source)
        asked(self.model, _one_token(source), None, None, **given)  # of it nothing is left in a graph
        return source_keys(given["past_key_values"])

    def step(self, source: torch.Tensor) -> Any:
        """Answer of the decoder to one token behind ``source``, after ``forward``."""
        read = caches_of(self(source))
        given = behind(self.model, [Cache(keys.transpose(2, 3), values) for keys, values in read])
        return asked(self.model, _one_token(source), None, None, **given)


def _one_token(source: torch.Tensor) -> torch.Tensor:
    """Any token for each row of ``source``."""
    return source.new_zeros((source.shape[0], 1), dtype=torch.int64)


def _source_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    beyond: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of ``query`` [B, A, S, D] to ``keys`` [B, K, D, N] and ``values`` [B, K, N, D] of a prompt, whose room
    is hidden ``beyond`` its end, as [B, S, A, D]."""
    shape = query.shape
    is_shared = shape[1] != keys.shape[1]
    if is_shared:  # heads that share keys stand behind each other
        query = query.reshape(shape[0], keys.shape[1], -1, shape[3])
    scores = torch.matmul(query if scale == 1.0 else query * scale, keys)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = torch.matmul(torch.softmax(scores + beyond, dim=-1), values)
    return (seen.reshape(shape) if is_shared else seen).transpose(1, 2)


def _after(states: Sequence[State], given: Mapping[str, Any]) -> list[torch.Tensor]:
    """The ``states`` of the cache that a pass was ``given``."""
    return [state.of(next(iter(given.values()))) for state in states]


def is_encoder_decoder(model: Any) -> bool:
    return WRITTEN_IDS in inspect.signature(model.forward).parameters and model.config.is_encoder_decoder is True


def cache_argument(model: Any) -> str | None:
    """The parameter by which ``model`` takes a cache of transformers', None where it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in taken), None)


class _Passing:
    """A layer of transformers' cache that keeps nothing: attention reads a cache of its own."""

    is_compileable, is_sliding, is_initialized = True, False, True

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self) -> int:
        """Places of new tokens are given, not counted from those before."""
        return 0

    def get_mask_sizes(self, tokens: int) -> tuple[int, int]:
        """Keys in all, and the place of the first."""
        return tokens, 0

    def get_max_length(self) -> int:
        return -1


class _Source(_Passing):
    """A layer of transformers' cache that has ``keys`` and ``values`` of what an encoder read."""

    keys: torch.Tensor
    values: torch.Tensor


class _Buffer(_Passing):
    """A layer of transformers' cache whose keys and values are a caller's ``past``, at ``places`` of it."""

    def __init__(self, past: Cache, position_ids: torch.Tensor) -> None:
        self.present, self._places = past, position_ids

    @property
    def places(self) -> int:
        return self.present.keys.shape[2]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """New ``keys`` and ``values`` ``[B, heads, S, D]`` at their places, and all that are there then."""
        at = self._places[:, None, :, None]
        self.present = Cache(
            *(
                past.scatter(2, at.expand(-1, past.shape[1], -1, past.shape[3]), _wide(new, past.shape[3]))
                for past, new in zip(self.present, (keys, values), strict=True)
            )
        )
        whole = zip(self.present, (keys, values), strict=True)
        found, read = (tensor[..., : new.shape[-1]] for tensor, new in whole)
        return found, read

    def get_mask_sizes(self, _: int) -> tuple[int, int]:
        return self.places, 0

    def get_max_length(self) -> int:
        return self.places


class RecordedDecoder(torch.nn.Module):
    """One pass of ``model`` over whole texts, as transformers makes it; ``layers`` and ``states`` as of
    CachedDecoder."""

    def __init__(self, model: Any, layers: Sequence[CachedLayer], states: Sequence[State] = ()) -> None:
        super().__init__()
        self.model, self.layers, self.states = model, layers, states

    def forward(self, input_ids: torch.Tensor, source: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S], behind ``source`` [B, ...] of an encoder, to logits [B, S, V], and keys and
        values [B, heads, S, size] of each layer that has its own; of one with a window those of the last tokens that it
        sees; and the states behind the last token."""
        transformers = offline_transformers()
        cache = transformers.DynamicCache()  # without a configuration: every layer keeps every token
        if self.states:
            cache = transformers.DynamicCache(config=self.model.config.get_text_config())
            for layer in cache.layers:  # as a layer without a window
                layer.__class__ = getattr(transformers.cache_utils, _EVERY.get(type(layer).__name__, ""), type(layer))
        # Places from 0 on are what transformers gives a class that generates, also one that would count from elsewhere.
        places = torch.arange(input_ids.shape[1])[None]
        given = {cache_argument(self.model) or "": cache, "use_cache": True}
        if source is not None:
            given = encoded(self.model, source)
            cache = given["past_key_values"].self_attention_cache
        answer = asked(self.model, input_ids, places, None, **given)
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        kept = [
            _wide(tensor if own.window is None else tensor[:, :, -own.window :], own.size)
            for own, layer in zip(self.layers, layers, strict=False)  # of fewer layers the first
            for tensor in (layer.keys, layer.values)
        ]
        return (answer.logits, *kept, *(state.of(cache) for state in self.states))


def asked(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor | None, logits_at: torch.Tensor | None, **more: Any
) -> Any:
    """Answer of ``model``, given what of these its class takes, an encoder-decoder for its decoder."""
    of, taken = "decoder_" if is_encoder_decoder(model) else "", set(inspect.signature(model.forward).parameters)
    if of and "kwargs" in taken and hasattr(model, "decoder"):  # which a class of any two parts hands on
        taken |= {of + name for name in inspect.signature(model.decoder.forward).parameters}
    counts, keeps = f"{of}position_ids" not in taken, "logits_to_keep" in taken
    if position_ids is not None and not counts:
        more[f"{of}position_ids"] = position_ids
    if logits_at is not None and keeps:
        more["logits_to_keep"] = logits_at
    counted = nullcontext() if not counts or position_ids is None else _counted_from(model, position_ids)
    scaled = nullcontext() if position_ids is None or logits_at is None else _scaled_at(model, position_ids)
    scored = nullcontext() if keeps or logits_at is None else _scored_at(model, logits_at)
    with nothing_left(model), counted, scaled, scored:
        return model(**{f"{of}input_ids": input_ids}, **more)


@contextmanager
def _scored_at(model: Any, logits_at: torch.Tensor) -> Iterator[None]:
    """Within it the head of ``model`` scores the tokens ``logits_at`` alone."""
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0][:, logits_at],))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _counted_from(model: Any, position_ids: torch.Tensor) -> Iterator[None]:
    """Within it tables of positions, which are embeddings of a class of their own, are read at ``position_ids`` [B, S]
    where ``model`` counts from 0; a class that counts tokens but those of padding (M2M100) counts as transformers'
    ``generate`` does step by step."""
    decoder = model.get_decoder() if is_encoder_decoder(model) else model
    tokens, read = decoder.get_input_embeddings(), torch.nn.Embedding.forward

    def counted(ids: torch.Tensor, pad: int, *_: Any) -> torch.Tensor:
        return torch.where(ids == pad, pad, position_ids + pad + 1)

    for part in model.modules():
        if hasattr(part, "create_position_ids_from_input_ids"):
            part.create_position_ids_from_input_ids = counted  # which nothing_left takes away again

    def forward(table: torch.nn.Embedding, places: torch.Tensor) -> torch.Tensor:
        if table is not tokens and type(table) is not torch.nn.Embedding:
            places = places - torch.arange(position_ids.shape[1]) + position_ids
        return read(table, places)

    table: Any = torch.nn.Embedding
    table.forward = forward
    try:
        yield
    finally:
        table.forward = read


@contextmanager
def _scaled_at(model: Any, position_ids: torch.Tensor) -> Iterator[None]:
    """Within it layers of Llama 4 that scale queries by their places, which they count from what a cache says of all
    rows at once, scale them at ``position_ids`` [B, S]."""
    hooks = []
    for part in model.modules():
        if getattr(part, "attn_temperature_tuning", False) and not part.use_rope:
            steps = torch.floor((position_ids[..., None].float() + 1.0) / part.floor_scale)
            scales = torch.log1p(steps) * part.attn_scale + 1.0
            part.attn_temperature_tuning = False
            hooks.append(part.q_proj.register_forward_hook(lambda *pass_, by=scales: pass_[-1] * by))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _wide(x: torch.Tensor, size: int) -> torch.Tensor:
    """``x`` [B, heads, S, D] with zeros behind its numbers, ``size`` in all, which change no score."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


@contextmanager
def attention_by(
    model: Any, attend: Callable[..., torch.Tensor], mask: Callable[..., torch.Tensor] | None = None
) -> Iterator[None]:
    """Within it attention of every layer of ``model`` is ``attend``, and masks are made by ``mask``, or not at all."""
    offline_transformers().AttentionInterface.register(_NAME, _attend)
    masks = masks_by_attention()
    # A side of an encoder-decoder may have a copy of its own.
    every: Iterator[Any] = (getattr(part, "config", None) for part in model.modules())
    configs = {id(each): each for each in every if has_attention(each)}
    own = [(each, attention_of(each)) for each in configs.values()]
    for each, _ in own:
        set_attention(each, _NAME)
    _attending.append(attend)
    if mask is not None:
        masks[_NAME] = mask
    try:
        yield
    finally:
        masks.pop(_NAME, None)
        _attending.pop()
        for each, name in own:
            set_attention(each, name)


@contextmanager
def own_attention_masks(model: Any, position_ids: torch.Tensor, places: int) -> Iterator[None]:
    """Within it the masks of ``model`` are of new tokens at ``position_ids`` [B, S] over buffers of so many
    ``places``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
    name = attention_of(model.config)

    def mask(*_: Any, mask_function: Callable[..., torch.Tensor], dtype: torch.dtype, **__: Any) -> torch.Tensor:
        rows = torch.arange(position_ids.shape[0])[:, None, None, None]
        at = position_ids[:, None, :, None]
        seen = mask_function(rows, torch.zeros_like(at[:1, :, :1]), at, torch.arange(places)[None, None, None])
        if name == "sdpa":
            return seen
        return torch.zeros((), dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    masks[name] = mask
    try:
        yield
    finally:
        del masks[name]


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **how: Any
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: ``[B, A, S, D]`` and ``[B, K, S, D]`` to ``[B, S, A, D]``."""
    return _attending[-1](module, query, key, value, attention_mask, how), None
