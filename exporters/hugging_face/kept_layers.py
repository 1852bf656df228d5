"""Cache of a causal class, or of a decoder behind an encoder, for each token, found by passes without numbers, and in
which of two forms it generates.

*Fused*: attention goes by transformers' interface, and every token sees those before it, or the last of a window. Then
it is the operator that reads a cache, as for named families. Else *buffered*: the class's own attention, over whole
buffers as transformers' static cache has them, masked by places; it takes time by their capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...bundle.entries.generation_entry import CachedLayer, window_of
from ...elastic import Submodel
from ...errors import ExportError
from ...outside import library_errors
from ..checkpoints.config import offline_transformers
from ..modules.attention import Cache
from ..parts import SIZE_MULTIPLE, CacheAxes
from ..torch_internals import unset_fake_temporarily
from .distances import BIAS, biased_parts
from .found_axes import FoundAxes
from .generating import (
    BufferedDecoder,
    CachedDecoder,
    RecordedDecoder,
    SourceKeys,
    State,
    asked,
    attention_by,
    behind,
    cache_argument,
    encoded,
    is_encoder_decoder,
)
from .slice_proof import HEADS
from .transformers_model import caches_unused, one_sequence_a_row

# Rows and tokens of the passes, and places of a buffer, which no size of a model is likely to have.
_ROWS, _TOKENS, _PLACES = 2, 12, 29
# Classes of transformers' cache layers that hold keys and values of tokens, recurrent states, both or nothing.
_PLAIN = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_STATES = tuple(f"LinearAttention{and_}Layer" for and_ in ("", "AndFullAttention", "AndSlidingWindowAttention"))
# Keywords of attention that change no score, or that the operator has.
_HARMLESS = frozenset(
    ["dropout", "is_causal", "position_ids", "scaling", "sliding_window", "softcap", "use_cache", "past_key_values"]
)


class Kept(NamedTuple):
    """Keys and values of one layer of transformers' cache: its number there, heads, and numbers of a key and of a
    value."""

    number: int
    heads: int
    key: int
    value: int


@dataclass(frozen=True)
class KeptLayers:
    """``layers`` of a cache, padded to the operator's sizes; ``numbers`` are theirs in transformers' cache, of
    so ``many``. ``cache_axes`` as of ``CachedSpec``, ``states`` beside keys and values. Behind an encoder each layer
    ``reads`` keys and values of a prompt, which shrink by ``read_axes``, at so many ``places`` of the passes'."""

    layers: tuple[CachedLayer, ...]
    numbers: tuple[int, ...]
    many: int
    is_fused: bool
    cache_axes: tuple[CacheAxes, ...] = ()
    states: tuple[State, ...] = ()
    reads: tuple[CachedLayer, ...] = ()
    read_axes: tuple[CacheAxes, ...] = ()
    places: int = 0

    def decoder(self, model: Any) -> torch.nn.Module:
        """``model`` with the interface of ``GenerationEntry``, to be traced."""
        form = CachedDecoder if self.is_fused else BufferedDecoder
        return form(model, self.layers, self.numbers, self.many, self.states, self.reads)

    def encoder(self, model: Any) -> SourceKeys:
        """``model`` with the interface of ``EncoderEntry``."""
        return SourceKeys(model)

    def recorded(self, model: Any) -> torch.nn.Module:
        """The pass of ``model`` over whole texts, with what it keeps."""
        return RecordedDecoder(model, self.layers, self.states)


def find_kept(model: Any, ids: torch.Tensor, source: torch.Tensor, axes: FoundAxes, positions: int) -> KeptLayers | str:
    """The cache that ``model``, whose parameters are fake tensors, keeps of each token of up to so many ``positions``;
    or why it cannot generate. ``ids`` ``[2, S]`` are fake too, and so is the ``source`` ``[2, ...]`` that an encoder
    reads."""
    if (argument := cache_argument(model)) is None:
        return f"{type(model).__name__} takes no cache of transformers' (past_key_values)"
    if model.config.model_type == "gpt_neo":  # over buffers it runs, and masks the wrong places
        return f"{type(model).__name__} takes new tokens for the last of its keys, and in a buffer they are not"
    try:
        kept, states, many, sources = _kept(model, ids, source, argument)
        windows, read = _windows(model, ids, kept, sources, positions), _read(model, kept, sources)
        found = KeptLayers(
            tuple(_layer(each, window) for each, window in zip(kept, windows or [None] * len(kept), strict=True)),
            tuple(each.number for each in kept),
            many,
            windows is not None,
            states=tuple(states),
            reads=read,
            places=int(sources[0].keys.shape[2]) if sources else 0,
        )
        if read and windows is None:
            raise ExportError(f"attention of the decoder of {type(model).__name__} is its own")
        if windows is None or states:
            _try_buffers(model, ids, found)
        by = _cache_axes(model, ids, source, axes, kept, states, sources, argument)
        return replace(found, cache_axes=by[: len(kept)], read_axes=by[len(kept) :])
    except ExportError as failure:
        return str(failure)


def _layer(kept: Kept, window: int | None) -> CachedLayer:
    size = -(-max(kept.key, kept.value) // SIZE_MULTIPLE) * SIZE_MULTIPLE
    return CachedLayer(kept.heads, size, window)


def _read(model: Any, kept: Sequence[Kept], sources: Sequence[Cache]) -> tuple[CachedLayer, ...]:
    """Sizes of what layers read of a prompt. Raises ExportError for another number of layers than are kept, or other
    values than keys."""
    read = _crossed(sources)
    if read and ([k.number for k in kept] != [r.number for r in read] or any(r.key != r.value for r in read)):
        raise ExportError(f"layers of {type(model).__name__} do not each keep and read keys and values of one size")
    return tuple(CachedLayer(each.heads, each.key) for each in read)


def _crossed(sources: Sequence[Cache]) -> list[Kept]:
    return [Kept(n, *map(int, (s.keys.shape[1], s.keys.shape[3], s.values.shape[3]))) for n, s in enumerate(sources)]


def _kept(
    model: Any, ids: torch.Tensor, source: torch.Tensor, argument: str
) -> tuple[list[Kept], list[State], int, list[Cache]]:
    """The layers that the class's own cache has after a pass, which ``model`` returns by the name of its ``argument``,
    the states, how many layers it has with those that have no keys of their own, and what those read of an encoder."""
    name = type(model).__name__
    with _fails_with(f"{name} fails with a cache"):
        planned = offline_transformers().DynamicCache(config=model.config.get_text_config())
    _require_plain(name, planned)  # before a pass, which may fail for it
    with _fails_with(f"{name} fails with a cache"):
        given = encoded(model, source) if is_encoder_decoder(model) else {"use_cache": True}
        cache = getattr(asked(model, ids, None, None, **given), argument)
    crossed = getattr(cache, "cross_attention_cache", None) if "encoder_outputs" in given else None
    sources = [Cache(layer.keys, layer.values) for layer in getattr(crossed, "layers", ())]
    cache = getattr(cache, "self_attention_cache", cache)
    _require_plain(name, cache)
    found, states = [], []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if getattr(layer, "keys", None) is not None:
            (_, heads, _, key), value = layer.keys.shape, layer.values.shape[-1]
            found.append(Kept(number, int(heads), int(key), int(value)))
        for kind in ("conv_states", "recurrent_states"):
            own = getattr(layer, kind, {}).items()
            states += [State(number, kind, at, tuple(each.shape[1:])) for at, each in own if each is not None]
    if not found and not states:
        raise ExportError(f"{name} returns no cache of keys and values")
    return found, states, len(cache.layers), sources


@contextmanager
def _fails_with(said: str) -> Iterator[None]:
    """For passes without numbers: whatever transformers raises is an ExportError that says so."""
    with library_errors(lambda why: ExportError(f"{said}: {why}")), torch.no_grad(), caches_unused():
        yield


def _require_plain(name: str, cache: Any) -> None:
    """Raises ExportError for a layer of ``cache`` that holds something else than keys and values, or states, and for a
    cache of the model's own."""
    if hasattr(cache, "layers") and not type(cache).__module__.endswith("cache_utils"):
        raise ExportError(f"{name} keeps a {type(cache).__name__} of its own")
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if (kind := type(layer).__name__) not in (*_PLAIN, *_STATES):
            raise ExportError(f"layer {number} of {name} keeps a {kind}, which is no keys and values, nor states")


def _windows(
    model: Any, ids: torch.Tensor, kept: Sequence[Kept], sources: Sequence[Cache], positions: int
) -> list[int | None] | None:
    """How many tokens each of the ``kept`` layers sees, None where it sees all before; None altogether where attention
    is not the operator's, or that to ``sources`` another."""
    masks: list[tuple[Any, Callable[..., Any]]] = []
    calls: list[tuple[Any, torch.Tensor, int | None]] = []
    fits, biased = True, bool(biased_parts(model))

    def mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> torch.Tensor:
        made = ids.new_ones((ids.shape[0], 1, ids.shape[1], ids.shape[1]), dtype=torch.bool)
        masks.append((made, mask_function))
        return made

    def attend(module: Any, query: Any, key: Any, value: Any, given: Any, how: Mapping[str, Any]) -> torch.Tensor:
        nonlocal fits
        answer: torch.Tensor = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
        if any(key is source.keys for source in sources):
            of_rows = given is None or any(made is given for made, _ in masks)
            harmless = _HARMLESS if getattr(module, "has_relative_attention_bias", True) else {*_HARMLESS, BIAS}
            others = [name for name, each in how.items() if name not in harmless and isinstance(each, torch.Tensor)]
            fits &= of_rows and not others and query.shape[1] % key.shape[1] == 0
            return answer
        seen = _window(next((rule for made, rule in masks if made is given), None), given, module, positions)
        harmless = {*_HARMLESS, BIAS} if biased and not seen else _HARMLESS  # of a window the operator takes none
        known = all(name in harmless or not isinstance(each, torch.Tensor) for name, each in how.items())
        masked = given is not None or how.get("is_causal") is not False  # else without a mask it sees all
        fits &= known and masked and seen is not False and query.shape[1] % key.shape[1] == 0
        earlier = [call for call in calls if call[0] is key]
        fits &= all(own is value and window == (seen or None) for _, own, window in earlier)
        if not earlier:
            calls.append((key, value, seen or None))
        return answer

    try:
        with torch.no_grad(), caches_unused(), one_sequence_a_row(), attention_by(model, attend, mask):
            asked(model, ids, None, None, **(behind(model, sources) if sources else {}))
    except Exception:  # noqa: BLE001  (of any kind: this class is not called by the interface)
        return None
    shapes = [(key.shape[1], key.shape[-1], value.shape[-1]) for key, value, _ in calls]
    if not fits or shapes != [each[1:] for each in kept]:
        return None
    return [seen for *_, seen in calls]


def _window(rule: Callable[..., Any] | None, given: Any, module: Any, positions: int) -> int | bool:
    """How many tokens attention by ``rule`` sees up to its own; 0 where it sees all, False where it is another."""
    if rule is None:
        return 0 if given is None and getattr(module, "is_causal", True) else False
    zero, widths = torch.zeros((), dtype=torch.int64), []
    with unset_fake_temporarily():
        places = torch.arange(positions)
        asked_at = sorted({0, 1, positions // 3, positions // 2, positions - 2, positions - 1} & set(range(positions)))
        try:
            for place in asked_at:
                seen = torch.as_tensor(rule(zero, zero, torch.tensor(place), places)).expand(positions)
                width = int(seen.sum())
                if not bool(seen[place + 1 - width : place + 1].all()) or width == 0:
                    return False
                widths.append((place, width))
        except Exception:  # noqa: BLE001  (it reads tensors of the pass)
            return False
    window = widths[-1][1]
    if any(width != min(place + 1, window) for place, width in widths):
        return False
    return 0 if window == positions else window


def _try_buffers(model: Any, ids: torch.Tensor, found: KeptLayers) -> None:
    """Raises ExportError where the class does not run over buffers: one new token of some rows, and several of one,
    which none has that keeps states."""
    decoder = found.decoder(model)
    for rows, tokens in ((_ROWS, 1), (1, _TOKENS // 2))[: 1 if found.states else 2]:
        new = ids[:rows, :tokens]
        places = torch.cumsum(torch.ones_like(new), 1)
        caches = [
            torch.zeros((rows, layer.heads, _PLACES, layer.size), device=ids.device)
            for layer in found.layers
            for _ in range(2)
        ]
        if found.is_fused and window_of(found.layers) is not None:
            caches.insert(0, new[:, 0] * 0)
        caches += [torch.zeros((rows, *state.shape), device=ids.device) for state in found.states]
        with _fails_with(f"{type(model).__name__} takes no static cache"):
            decoder(new, places, new[0] * 0, *caches)


def _cache_axes(
    model: Any,
    ids: torch.Tensor,
    source: torch.Tensor,
    axes: FoundAxes,
    kept: Sequence[Kept],
    states: Sequence[State],
    sources: Sequence[Cache],
    argument: str,
) -> tuple[CacheAxes, ...]:
    """By which axis the heads of each kept layer shrink, and then those that it reads of an encoder: passes of which
    each cuts the axes whose number has one bit set, so that the layers that shrank in it are known by their bits.
    Raises ExportError where ``states`` do."""
    if states and _kept(axes.cut(model, axes.half), ids, source, argument)[1] != states:
        raise ExportError("cut to half it keeps states of another shape")
    heads = [axis for axis in axes.axes if axis.kind.startswith(HEADS)]
    kept = [*kept, *_crossed(sources)]
    numbers, bits = [0] * len(kept), len(heads).bit_length()
    for bit in range(bits):
        cut = {axis.name for number, axis in enumerate(heads, start=1) if number >> bit & 1}
        some = Submodel(tuple((axis, axis.size // 2 if axis.name in cut else axis.size) for axis in axes.axes))
        own, _, _, read = _kept(axes.cut(model, some), ids, source, argument)
        found = [*own, *_crossed(read)]
        if [each[2:] for each in found] != [each[2:] for each in kept]:
            raise ExportError("cut to fewer heads it keeps other numbers of each")
        numbers = [own | (now.heads < all_.heads) << bit for own, now, all_ in zip(numbers, found, kept, strict=True)]
    for number, each in zip(numbers, kept, strict=True):
        if number and (number > len(heads) or heads[number - 1].size != each.heads):
            raise ExportError(f"layer {each.number} keeps {each.heads} heads, which are not the steps of one axis")
    if not any(numbers):
        return ()
    return tuple(CacheAxes(heads=heads[number - 1].name if number else None) for number in numbers)
