"""An export beside the model, or the part of it, that it is to be, and how it is asked: at once, or as decoders that
keep a cache are used, a prompt and then steps, each behind what the ones before returned."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..runtime.inputs.arrays import Array, Arrays
from .cases import IDS, MASK, POSITIONS, Trial
from .export import Export, Match, Port
from .model import Model, Named, Wrapped, named

_CACHE = re.compile(r"past|present|cache")
_BRANCH = "use_cache_branch"  # of merged decoders: whether there is a past
_STEPS = 3


def past_of(export: Export) -> list[Port]:
    """Inputs that hold a cache."""
    return [port for port in export.inputs if _CACHE.search(port.name) and port.name != _BRANCH]


def is_cache(name: str) -> bool:
    return _CACHE.search(name) is not None


def part_of(model: Model, export: Export) -> Model:
    """The part of ``model`` that the export's inputs and outputs show it to be."""
    config: Any = getattr(getattr(model.module, "model", None), "config", None)
    taken, given = {port.name for port in export.inputs}, {port.name for port in export.outputs}
    keeps = any(map(is_cache, taken | given))
    if not isinstance(model.module, Wrapped) or config is None:
        return model
    if not getattr(config, "is_encoder_decoder", False):
        return replace(model, call=_caching) if keeps else model
    if "decoder_input_ids" in taken:
        return model
    if "encoder_hidden_states" in taken or past_of(export):
        states = Port("encoder_hidden_states", "float32", ("batch", "encoder_sequence", config.hidden_size))
        inputs = (IDS, "encoder_hidden_states", "encoder_attention_mask")
        return replace(model, inputs=inputs, call=_decoder, needs=(states,))
    return model if "logits" in given else replace(model, call=_encoder)


def _caching(wrapped: Wrapped, given: Named) -> Named:
    return wrapped.call({**given, "use_cache": True})  # type: ignore[dict-item]  # a switch among tensors


def _encoder(wrapped: Any, given: Named) -> Named:
    return named(dict(wrapped.model.get_encoder()(**given, return_dict=True)))


def _decoder(wrapped: Any, given: Named) -> Named:
    states = (given["encoder_hidden_states"],)
    mask = given.get("encoder_attention_mask")
    inputs = {"decoder_input_ids": given[IDS], "encoder_outputs": states, "attention_mask": mask, "use_cache": True}
    return wrapped.call(inputs)


def in_pieces(export: Export, trials: Sequence[Trial]) -> list[Trial]:
    """The cases with a prompt and steps of one token; not those without a step, of an export that continues alone."""
    found = []
    for trial in trials:
        steps = min(_STEPS, trial.length - 1)
        traits = trial.traits | ({"steps"} if steps else set())
        if steps or not continues_alone(export):
            found.append(replace(trial, pieces=(trial.length - steps, *[1] * steps), traits=frozenset(traits)))
    return found


def continues_alone(export: Export) -> bool:
    """Whether it takes what an encoder made of a prompt from another graph's cache."""
    return export.port(_BRANCH) is None and any("encoder" in port.name for port in past_of(export))


def with_no_past(export: Export, feeds: Arrays) -> dict[str, Array]:
    """``feeds`` with an empty cache, where the export takes one."""
    rows = len(next(iter(feeds.values())))
    found = dict(feeds)
    for port in past_of(export):
        free = iter([rows, *[0] * 8])
        sizes = [dim if isinstance(dim, int) else next(free) for dim in port.dims or ()]
        found[port.name] = np.zeros(sizes, port.dtype)
    if export.port(_BRANCH) is not None:
        found[_BRANCH] = np.array([False])
    return found


@dataclass(frozen=True)
class Pair:
    """``inputs`` are those of ``export`` that are matched with the ``model``'s, ``outputs`` its names by
    the model's."""

    export: Export
    model: Model
    inputs: Sequence[Match]
    outputs: Mapping[str, str] = field(default_factory=dict)

    def feeds(self, trial: Trial) -> dict[str, Array]:
        """The inputs of ``trial`` by the export's names and in its types, with an empty cache where it takes one."""
        found = {}
        for match in self.inputs:
            port = self.export.port(match.name)
            assert port is not None
            array = trial.feeds[match.model]
            found[match.name] = array if port.dtype == "str" else np.ascontiguousarray(array.astype(port.dtype))
        return with_no_past(self.export, found)

    def answer(self, trial: Trial) -> dict[str, Array]:
        """Outputs behind every token, and the cache in the end. Where the export takes no empty cache, the prompt is
        the model's. Raises InputError."""
        export, feeds = self.export, self.feeds(trial)
        if not trial.pieces or not past_of(export):
            return export.run(feeds)
        matched = {match.name for match in self.inputs}
        past = {name: array for name, array in feeds.items() if name not in matched}
        collected: dict[str, list[Array]] = {}
        at, caches = 0, dict[str, Array]()
        for number, size in enumerate(trial.pieces):
            part = {name: _slice(name, feeds[name], at, size) for name in matched}
            if _BRANCH in past:
                past[_BRANCH] = np.array([number > 0])
            try:
                is_models = number == 0 and continues_alone(export)
                answered = self._prompt(trial, size) if is_models else export.run({**part, **past})
            except InputError:
                if number or len(trial.pieces) == 1:
                    raise
                answered = self._prompt(trial, size)
            for name, array in answered.items():
                if is_cache(name):
                    caches[name] = array if array.size or name not in caches else caches[name]
                else:
                    collected.setdefault(name, []).append(array)
            past |= _handed_on(export, caches)
            at += size
        joined = {name: np.concatenate(each, 1) if each[0].ndim > 1 else each[-1] for name, each in collected.items()}
        return {**joined, **caches}

    def _prompt(self, trial: Trial, size: int) -> dict[str, Array]:
        """The model's own answer to the prompt."""
        found = self.model.answer({name: _slice(name, array, 0, size) for name, array in trial.feeds.items()})
        returned = {port.name for port in self.export.outputs}
        return {name: array for name, array in found.items() if name in returned or is_cache(name)}


def _slice(name: str, array: Array, at: int, size: int) -> Array:
    if name.endswith(IDS) or name in (POSITIONS, "cache_position"):
        return np.ascontiguousarray(array[..., at : at + size])
    return np.ascontiguousarray(array[:, : at + size]) if name == MASK else array


def _handed_on(export: Export, caches: Arrays) -> dict[str, Array]:
    """The cache that was returned, by the names of inputs: by name, else by place."""
    ports = past_of(export)
    names = {re.sub(r"present(_key_values)?|past_key_values|out", "", name).strip("._"): name for name in caches}
    own = [re.sub(r"past_key_values|past|in$", "", port.name).strip("._") for port in ports]
    if all(name in names for name in own):
        return {port.name: caches[names[name]] for port, name in zip(ports, own, strict=True)}
    return {port.name: array for port, array in zip(ports, caches.values(), strict=False)}
