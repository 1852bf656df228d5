"""The engines of a bundle that generate: a decoder that keeps keys and values, perhaps behind an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from .engine_entry import Decode, Encoder, EngineEntry
from .tensor_spec import TensorSpec

# KV-cache engines: their ``segment``, and their dimensions that the caller chooses.
CACHED, CAPACITY, WINDOW, LOGIT_COUNT = Decode.part, "capacity", "window", "answers"
# The input with the places of new tokens in the text.
POSITIONS = "position_ids"
# Prefixes of the names of a cache, as an input and as the output that it becomes.
PAST, PRESENT = "past_", "present_"
# Engines that read a prompt for a decoder, and the dimension of its tokens, which the caller chooses too.
ENCODER, SOURCE = Encoder.part, "source"
# How many tokens of each row a decoder reads, an input on the host.
SOURCE_LENGTHS = "source_lengths"
# Prefixes of the names of tensors that stay on a device from one run to the next.
ON_DEVICE = (PAST, "source_key_", "source_value_")
# Why no tokens are drafted for rows with states.
NO_DRAFTS = "this model keeps recurrent states, from which a refused token could not be taken back"
_LEAST_ROOM = 512
# Length of the prompt for which the figures of engines that read one are stated.
PROMPT_TOKENS = 512


@dataclass(frozen=True)
class CachedLayer:
    """A layer's share of the cache for each token: keys and values of ``heads`` heads of ``size`` numbers. Its tokens
    see the last ``window`` ones, themselves included, or all before them. No heads are left in a
    submodel without the layer (``of``)."""

    heads: int = field(metadata={"min": 1})
    size: int = field(metadata={"min": 1})
    window: int | None = field(default=None, metadata={"min": 1})


def present(layers: Iterable[CachedLayer]) -> Iterator[tuple[int, CachedLayer]]:
    """The layers that a submodel has, with their numbers."""
    return ((number, layer) for number, layer in enumerate(layers) if layer.heads)


def window_of(layers: Iterable[CachedLayer]) -> int | None:
    """How many tokens the buffers of all layers with a window keep, which is the largest; None where no layer has
    one."""
    return max((layer.window for layer in layers if layer.window is not None), default=None)


def places_of(layers: Sequence[CachedLayer], capacity: int, longest_run: int | None) -> list[int]:
    """Places for tokens of a row in each layer, of texts up to ``capacity``: behind a window no more than it and a run
    of ``longest_run`` new tokens need, where that is known."""
    seen = window_of(layers)
    if seen is None or longest_run is None:
        return [capacity] * len(layers)
    behind_window = min(capacity, seen + longest_run)
    return [capacity if layer.window is None else behind_window for layer in layers]


def cache_bytes(
    layers: Sequence[CachedLayer], rows: int, capacity: int, longest_run: int, states: Iterable[Sequence[int]] = ()
) -> int:
    """Bytes of keys and values of ``rows`` rows that have room for ``capacity`` tokens each, in float32, and of
    ``states``, of which a run writes other ones than it reads."""
    places = places_of(layers, capacity, longest_run)
    cached = sum(own * layer.heads * layer.size for layer, own in zip(layers, places, strict=True))
    return 4 * 2 * rows * (cached + sum(map(prod, states)))


@dataclass(frozen=True)
class EncoderEntry:
    """The ``engines`` of an encoder-decoder that read a prompt, of up to ``positions`` tokens, once: one for each
    submodel. Its decoder begins with ``start_id``; what it writes first is ``first_id``, and ``last_id`` as the last
    token that a request allows, where these are stated.

    An engine takes ``input_ids`` ``[1, S]`` int64 and returns what each layer of the decoder reads of them:
    ``source_key_0`` ``[1, heads, size, S]`` and ``source_value_0`` ``[1, heads, S, size]`` float32, with the heads of
    ``layers``, or where that is None of the decoder's own cache. Figures of an engine are those of a prompt of 512
    tokens, or of the longest.

    Where ``input`` is stated, a prompt is one row of that array, of one shape, and an engine takes it in the place of
    tokens; what layers read of it has ``positions`` places. ``begin_ids`` are what the decoder begins with where that
    is more than ``start_id``; none where each request says it, since among them is what the prompt decides, such as a
    language.
    """

    start_id: int = field(metadata={"min": 0})
    positions: int = field(metadata={"min": 1})
    engines: tuple[EngineEntry, ...]
    layers: tuple[CachedLayer, ...] | None = None
    first_id: int | None = field(default=None, metadata={"min": 0})
    last_id: int | None = field(default=None, metadata={"min": 0})
    input: TensorSpec | None = None
    begin_ids: tuple[int, ...] | None = field(default=None, metadata={"min": 0})

    def tokens_of(self, prompt: Any) -> int:
        """Places of what layers read of a ``prompt``, tokens ``[N]`` or a row of ``input``."""
        return len(prompt) if self.input is None else self.positions


@dataclass(frozen=True)
class GenerationEntry:
    """The ``engines`` of a causal language model, or of a decoder behind an ``encoder``, that keep keys and values in a
    cache of the caller's, one for each submodel; of those for TensorRT, whose caches have one size, one for each
    capacity too. A submodel continues the cache of another that has as many heads in
    every layer, or more, of one size: it reads the first of them. There are none of a layer that it lacks, and its
    engine takes nothing.

    An engine takes ``input_ids`` and ``position_ids`` (``[B, S]`` int64), the new tokens and their places in the text,
    ``logits_at`` ``[answers]`` int64, the new tokens whose logits are wanted, and per layer ``past_key_0`` and
    ``past_value_0`` (``[B, heads, capacity, size]``, with the heads of ``of(engine)``). Where layers have a window, it
    also takes ``window_places`` ``[B]`` int64, the place of the first new token of each row in their buffers, whose
    ``window`` places may be fewer than the capacity. It returns ``logits`` ``[B,
    answers, vocabulary]`` and per layer ``present_key_0`` and ``present_value_0``: the cache, with the new tokens at
    their places. Callers bind both to one buffer, so that nothing is copied. Several rows take one new token each;
    several new tokens are of one row. Figures of an engine are those of one new token of one row, its activations those
    of the longest run. Behind an encoder an engine also takes, before the cache, ``source_lengths`` ``[B]`` int64 and
    per layer ``source_key_0`` and ``source_value_0``, which have that many tokens of each row, and room for the
    longest. Rows may have recurrent ``states``, each of that shape, which have all tokens in them that were read, so
    that none can be taken back: an engine takes ``past_state_0`` ``[B, ...]`` float32 after the cache, 0 before the
    first token, and returns ``present_state_0``, which is to lie elsewhere, and of every row it takes one new token.

    ``positions`` is the largest capacity. A text ends with a token of ``end_ids``, and begins with ``begin_id`` where
    the tokenizer adds one. ``sampling`` is how the model's folder picks tokens, by option, None for the likeliest.
    ``chat_template`` is the file with the Jinja template of chats, ``special_tokens`` the ones that it may name.
    ``suppressed_ids`` never come, ``suppressed_first_ids`` not as the first token that is picked. ``tokenizer`` is the
    file by which tokens are text, of a model that reads none.
    """

    vocabulary: int = field(metadata={"min": 2})
    layers: tuple[CachedLayer, ...]
    positions: int = field(metadata={"min": 2})
    end_ids: tuple[int, ...]
    engines: tuple[EngineEntry, ...]
    begin_id: int | None = field(default=None, metadata={"min": 0})
    sampling: Mapping[str, int | float] | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] | None = None
    encoder: EncoderEntry | None = None
    states: tuple[tuple[int, ...], ...] = ()
    suppressed_ids: tuple[int, ...] | None = None
    suppressed_first_ids: tuple[int, ...] | None = None
    tokenizer: str | None = None

    @property
    def longest_run(self) -> int:
        """The most new tokens of one row that a run of an engine takes."""
        return max(engine.bucket.sequence for engine in self.engines)

    @property
    def windowed_run(self) -> int:
        """New tokens for which layers with a window have room behind it: where every run has one, as many as others
        have, so that windows seldom move."""
        return max(self.longest_run, _LEAST_ROOM) if self.states else self.longest_run

    @property
    def most_tokens(self) -> int:
        """The most tokens that a text may have: the positions, or what the largest cache of one size holds."""
        sizes = self.capacities_for(self.positions)
        return min(self.positions, sizes[-1]) if sizes else self.positions

    @property
    def generators(self) -> tuple[EngineEntry, ...]:
        """The engine of each submodel, that of the largest capacity where there are several."""
        of_submodel: dict[str, EngineEntry] = {}
        for engine in sorted(self.engines, key=lambda engine: engine.capacity or 0):
            of_submodel[engine.submodel] = engine
        return tuple(engine for engine in self.engines if of_submodel[engine.submodel] is engine)

    def siblings(self, engine: EngineEntry) -> tuple[EngineEntry, ...]:
        """The engines of the submodel of ``engine``, it among them, which differ in capacity alone."""
        return tuple(other for other in self.engines if other.submodel == engine.submodel)

    def at_capacity(self, engine: EngineEntry, capacity: int) -> EngineEntry:
        """The sibling of ``engine`` whose cache has that ``capacity``; itself where caches are of any size."""
        return next((other for other in self.siblings(engine) if other.capacity == capacity), engine)

    def capacities_for(self, tokens: int) -> tuple[int, ...]:
        """The sizes that a cache goes through as a text grows up to ``tokens``, rising; none where caches are of any
        size."""
        sizes = sorted({engine.capacity for engine in self.engines if engine.capacity is not None})
        enough = next((number for number, size in enumerate(sizes) if size >= tokens), len(sizes) - 1)
        return tuple(sizes[: enough + 1])

    def cache_bytes(self, rows: int, capacity: int) -> int:
        """Bytes of keys and values of ``rows`` rows that have room for ``capacity`` tokens each; of caches that have
        one size those of the last one that a text needs, and of the one before, from which tokens move."""
        sizes = self.capacities_for(capacity)[-2:]
        if not sizes:
            return cache_bytes(self.layers, rows, capacity, self.windowed_run, self.states)
        return sum(cache_bytes(self.layers, rows, size, size) for size in sizes)

    def source_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of keys and values of the prompts of ``rows`` rows, of up to ``tokens`` each; where caches have one
        size those of one prompt more, which is read beside the rows."""
        beside = 1 if self.capacities_for(1) else 0
        return 4 * 2 * (rows + beside) * tokens * sum(layer.heads * layer.size for layer in self.source_layers)

    @property
    def source_layers(self) -> tuple[CachedLayer, ...]:
        """Each layer's share of a token of a prompt."""
        return self.layers if self.encoder is None or self.encoder.layers is None else self.encoder.layers

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of each layer's cache and, behind an encoder, of what it reads of a prompt."""
        return tuple(layer.heads for layer in self._cached_layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a head, as ``heads`` has them."""
        return tuple(layer.size for layer in self._cached_layers)

    @property
    def _cached_layers(self) -> tuple[CachedLayer, ...]:
        return self.layers if self.encoder is None else (*self.layers, *self.source_layers)

    @property
    def every_engine(self) -> tuple[EngineEntry, ...]:
        """``engines``, and those of the encoder."""
        return (*self.engines, *(self.encoder.engines if self.encoder else ()))

    def of(self, engine: EngineEntry) -> GenerationEntry:
        """This with the heads, and their sizes, that the cache of ``engine`` has, and what it reads of a prompt."""
        cache_heads, cache_sizes, source_heads, source_sizes = engine.cache_layout
        layers = _of_size(self.layers, cache_heads, cache_sizes)
        encoder = self.encoder
        if encoder is not None:
            source = _of_size(self.source_layers, source_heads, source_sizes)
            encoder = replace(encoder, layers=source)
        return replace(self, layers=layers, encoder=encoder)

    def encoder_of(self, engine: EngineEntry) -> EngineEntry | None:
        """The encoder that reads the prompts of ``engine``, if the model has an encoder."""
        others = self.encoder.engines if self.encoder else ()
        return next((other for other in others if other.submodel == engine.submodel), None)

    def with_engines(self, engines: Iterable[EngineEntry]) -> GenerationEntry:
        """This with ``engines`` of both kinds in the place of its own."""
        every, encoder = tuple(engines), self.encoder
        if encoder is not None:
            encoder = replace(encoder, engines=tuple(engine for engine in every if engine.segment == ENCODER))
        return replace(self, engines=tuple(engine for engine in every if engine.segment != ENCODER), encoder=encoder)

    @property
    def interface(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of engines whose caches are of any size, by position."""
        return self.interface_at(None)

    def interface_at(self, capacity: int | None) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of engines, by position; where they state a ``capacity``, every layer has so many
        places."""
        tokens = ("batch", "sequence")
        inputs = [
            TensorSpec("input_ids", "int64", tokens, high=self.vocabulary),
            TensorSpec(POSITIONS, "int64", tokens, high=self.positions),
            TensorSpec("logits_at", "int64", (LOGIT_COUNT,)),
        ]
        if window_of(self.layers) is not None:
            inputs.append(TensorSpec("window_places", "int64", ("batch",)))
        outputs = [TensorSpec("logits", "float32", ("batch", LOGIT_COUNT, self.vocabulary))]
        if self.encoder is not None:
            inputs += [TensorSpec(SOURCE_LENGTHS, "int64", ("batch",)), *self._source("batch", SOURCE)]
        for number, layer in present(self.layers):
            places = capacity or (CAPACITY if layer.window is None else WINDOW)
            dims = ("batch", layer.heads, places, layer.size)
            for kind in ("key", "value"):
                inputs.append(TensorSpec(f"{PAST}{kind}_{number}", "float32", dims))
                outputs.append(TensorSpec(f"{PRESENT}{kind}_{number}", "float32", dims))
        for number, shape in enumerate(self.states):
            inputs.append(TensorSpec(f"{PAST}state_{number}", "float32", ("batch", *shape)))
            outputs.append(TensorSpec(f"{PRESENT}state_{number}", "float32", ("batch", *shape)))
        return tuple(inputs), tuple(outputs)

    @property
    def prompt_array(self) -> TensorSpec | None:
        """The array that is a prompt in the place of a text, if one is."""
        return None if self.encoder is None else self.encoder.input

    @property
    def encoder_interface(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of the engines of the encoder, by position."""
        if self.encoder is not None and self.prompt_array is not None:
            return (self.prompt_array,), tuple(self._source("batch", self.encoder.positions))
        ids = TensorSpec("input_ids", "int64", ("batch", "sequence"), high=self.vocabulary)
        return (ids,), tuple(self._source("batch", "sequence"))

    def _source(self, rows: str, tokens: str | int) -> Iterator[TensorSpec]:
        for number, layer in enumerate(self.source_layers):
            yield TensorSpec(f"source_key_{number}", "float32", (rows, layer.heads, layer.size, tokens))
            yield TensorSpec(f"source_value_{number}", "float32", (rows, layer.heads, tokens, layer.size))


def _of_size(
    layers: Sequence[CachedLayer], heads: Sequence[int] | None, sizes: Sequence[int] | None
) -> tuple[CachedLayer, ...]:
    """``layers`` with so many ``heads`` each, of such ``sizes``, where these are stated."""
    heads = [layer.heads for layer in layers] if heads is None else heads
    sizes = [layer.size for layer in layers] if sizes is None else sizes
    every = zip(layers, heads, sizes, strict=True)
    return tuple(replace(layer, heads=count, size=size) for layer, count, size in every)
