"""The kind of a fault: by which cases it shows in, and by changing the model as known faults change it until it
computes the export's numbers. The changes are listed by what they are of: inputs, attributes, weights, what modules
are given and return."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..exporters.sentence_transformers.head import DenseModule, LayerNormModule, NormalizeModule, PoolingModule
from ..runtime.inputs.arrays import Array, Arrays
from .cases import IDS, MASK, POSITIONS, TYPES, Trial
from .model import Model
from .values import Event, Search, rms, values_of
from .weights import Lost

# A change explains a fault where it leaves less than so much of the difference.
_EXPLAINED, _CERTAIN = 0.05, 1e-3
_EXPLAINED_ROUNDED, _CLEARLY = 0.4, 0.8
_MOST_PARTS = 12
_SHORT = 8  # tokens: shorter texts may hide a fault by chance
_SKIPPED = "that is skipped"
_MASK_IGNORED, _TYPES_IGNORED = "a mask that is ignored", "types of tokens that are ignored"
_TRAITS = {
    "types": _TYPES_IGNORED,
    "padding": _MASK_IGNORED,
    "padded left": "a mask that is read otherwise where padding is on the left",
    "padded right": "a mask that is read otherwise where padding is on the right",
    "several rows": "a batch size that is frozen",
    "steps": "a cache that is read or written at another place",
}
_EPSILONS = (0.0, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12, 1e-1, 1e-2)
_BASES = (10_000.0, 1_000.0, 100_000.0, 500_000.0, 1_000_000.0, 20_000.0)
_POOLINGS = ("mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
_HEADS = (2, 4, 8, 12, 16)
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the exact GELU (erf)": functional.gelu,
    "the tanh approximation of GELU": lambda x: functional.gelu(x, approximate="tanh"),
    "the sigmoid approximation of GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": functional.relu,
    "SiLU": functional.silu,
    "no activation": lambda x: x,
}
_NAMES = {DenseModule: "Dense", NormalizeModule: "Normalize", LayerNormModule: "LayerNorm"}


def kind_of_cases(trials: Sequence[Trial], wrong: Collection[str]) -> str | None:
    """The trait that all wrong cases have and no right one has."""
    bad, good = ([t for t in trials if (t.name in wrong) == side] for side in (True, False))
    if not bad or not good:
        return None
    for trait, said in _TRAITS.items():
        if all(trait in t.traits for t in bad) and not any(trait in t.traits for t in good):
            return said
    lengths = {t.length for t in good}
    if len(lengths) == 1 and not lengths & {t.length for t in bad}:
        return f"a length that is frozen: only {lengths.pop()} is right"
    if len(lengths) > 1 and max(lengths) > _SHORT and (most := max(lengths)) < min(t.length for t in bad):
        return f"a longest length that is frozen: up to {most} is right"
    return None


def explain(search: Search, event: Event, wanted: Array, lost: Lost | None) -> tuple[str, str] | None:
    """The change of the model by which it computes what the export has, at ``event``, where ``wanted`` is right, or in
    the end: the module that is changed, and in words how; None for none. The weight that is ``lost`` is tried as the
    export stores it."""
    model, feeds = search.model, search.trial.feeds
    answers = model.answer(feeds)
    near = search.nearest(wanted, event.module)
    best: tuple[float, str, str] | None = None
    for change in chain(_changes(model, event, feeds), _of_lost(lost)):  # each holds weights of its own
        with ExitStack() as undo:
            try:
                change.apply(undo)
                values, changed = values_of(model, partial(model.answer, change.feeds or feeds), {event})
            except Exception:  # noqa: BLE001, S112  (a change that this model does not take explains nothing)
                continue
        left = _left_of_answers(search, answers, changed)
        is_left_out = change.words.endswith(_SKIPPED)  # its input stands in the graph under other names too
        if left >= _CERTAIN and not is_left_out and near is not None and event in values:
            left = min(left, _left_at(search, event, values[event], wanted, near))
        most = _EXPLAINED_ROUNDED if search.rule.simulates else _EXPLAINED
        if left < most and (best is None or left < _CLEARLY * best[0]):
            best = (left, change.module, change.words)
            if left < _CERTAIN:
                break
    return None if best is None else best[1:]


def skipped(model: Model, feeds: Arrays, output: str, got: Array) -> tuple[str, str] | None:
    """The module behind a sentence-transformers model without which its ``output`` is what was ``got``, of which the
    model may show the first numbers alone, and in words that it is skipped."""
    for path, part in model.module.named_modules():
        if type(part) in _NAMES:
            with ExitStack() as undo:
                _after(part, _first_given, undo)
                found = model.answer(feeds)[output]
            first = got[..., : found.shape[-1]]
            if first.shape == found.shape and rms(found - first) < _EXPLAINED * rms(first):
                return path, f"{_NAMES[type(part)]} {_SKIPPED}"
    return None


def _left_of_answers(search: Search, before: Arrays, changed: Arrays) -> float:
    """The share of the difference of all outputs that is left, by the size of each; 1 where nothing is explained."""
    left = was = 0.0
    for name, got in search.answers.items():
        if name not in before or name not in changed or changed[name].shape != got.shape:
            return 1.0
        size, counted = max(rms(got), 1e-12), search.trial.counted
        left += (rms(counted(changed[name], name) - got) / size) ** 2
        was += (rms(counted(before[name], name) - got) / size) ** 2
    return float(np.sqrt(left / was)) if was > 0 else 1.0


def _left_at(search: Search, event: Event, changed: Array, wanted: Array, near: Array) -> float:
    """The share that is left at one value: the export's one that is nearest to the ``changed``, where ``near`` is the
    one nearest to what is ``wanted``."""
    if changed.shape != wanted.shape:
        return 1.0
    changed = search.trial.counted(changed, event.module)
    found, moved = search.nearest(changed, event.module), rms(changed - wanted)
    return rms(found - changed) / min(rms(near - wanted), moved) if found is not None and moved else 1.0


Apply = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Change:
    """``module`` changed as ``words`` say by ``apply``, which the stack undoes, or given other ``feeds``."""

    module: str
    words: str
    apply: Apply
    feeds: Arrays | None = None


def _changes(model: Model, event: Event, feeds: Arrays) -> Iterator[Change]:
    """Known faults of inputs, of the module where the export goes wrong and of those around it."""
    name = event.owner
    for words, given in _of_inputs(model, feeds):
        yield Change(name, words, lambda _: None, given)
    parts = dict.fromkeys([name, event.module])
    around = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
    for path in [*parts, *around]:
        part = model.part(path)
        if part is None:
            continue
        inside = [(f"{path}.{below}", each) for below, each in part.named_modules() if below]
        for where, each in [(path, part), *(inside if path in parts and len(inside) < _MOST_PARTS else ())]:
            yield Change(where, f"{_NAMES.get(type(each), 'a layer')} {_SKIPPED}", partial(_after, each, _first_given))
            for words, change in _of_part(each) if path in parts else ():
                yield Change(where, words, change)


def _of_lost(lost: Lost | None) -> Iterator[Change]:
    if lost is not None and lost.parameter is not None:
        yield Change(lost.module, lost.words, partial(_set, lost.parameter, "data", torch.tensor(lost.stored)))


def _of_inputs(model: Model, feeds: Arrays) -> Iterator[tuple[str, Arrays]]:
    name, ids = next(((name, array) for name, array in feeds.items() if name.endswith(IDS)), ("", None))
    if ids is None:
        return
    rows, length = ids.shape
    for other, array in feeds.items():
        if other != name and array.shape == ids.shape and array.dtype.kind == "i":
            yield f"tokens that are read from {other}", {**feeds, name: array}
            yield f"{other} that is read from {name}", {**feeds, other: ids}
    if MASK in feeds and not feeds[MASK].all():
        yield _MASK_IGNORED, {**feeds, MASK: np.ones_like(feeds[MASK])}
    if TYPES in feeds and feeds[TYPES].any():
        yield _TYPES_IGNORED, {**feeds, TYPES: np.zeros_like(feeds[TYPES])}
    if MASK in model.inputs:
        yield "a causal mask that is off", {**feeds, MASK: np.zeros((rows, 1, length, length), np.float32)}
    if POSITIONS in model.inputs:
        places = feeds.get(POSITIONS, np.arange(length)[None].repeat(rows, 0))
        for offset in (1, 2, -1):
            yield f"positions that are off by {offset}", {**feeds, POSITIONS: np.maximum(places + offset, 0)}
        yield "positions that are all 0", {**feeds, POSITIONS: np.zeros_like(places)}


def _of_part(part: Any) -> Iterator[tuple[str, Apply]]:
    """Faults that a module can have."""
    weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
    if isinstance(bias, torch.nn.Parameter):
        yield "a bias that is dropped", partial(_set, bias, "data", torch.zeros_like(bias.data))
    if isinstance(weight, torch.nn.Parameter):
        for words, value in _of_weight(weight.data):
            yield words, partial(_set, weight, "data", value)
    for name, words, value in _of_attributes(part):
        yield words, partial(_set, part, name, value)
    if isinstance(part, PoolingModule):
        yield "pooling without the mask", partial(_before, part, lambda args: (args[0], torch.ones_like(args[1]), None))
    yield "a residual that is left out", partial(_before, part, _no_residual)
    if type(part) not in _NAMES and not list(part.children()) and not list(part.parameters()):
        for said, function in _ACTIVATIONS.items():
            yield f"another activation: {said}", partial(_after, part, partial(_activated, function))
    heads = next((getattr(part, n) for n in ("num_attention_heads", "num_heads", "n_heads") if hasattr(part, n)), 0)
    if heads:
        yield (
            "heads that are swapped",
            partial(_after, part, lambda _, found: _with_first(found, _swapped(found, heads))),
        )


def _of_attributes(part: Any) -> Iterator[tuple[str, str, Any]]:
    """Name, words and value."""
    for name in ("eps", "variance_epsilon", "layer_norm_eps"):
        own = getattr(part, name, None)
        for value in _EPSILONS if isinstance(own, float) else ():
            if value != own:
                yield name, f"another epsilon: {value:g} in the place of {own:g}", value
    for name in ("scaling", "scale"):
        if isinstance(own := getattr(part, name, None), float):
            yield name, "a scale that is missing", 1.0
            yield name, "a scale applied twice", own**2
    if isinstance(own := getattr(part, "is_causal", None), bool):
        yield "is_causal", f"a causal mask that is {'off' if own else 'on'}", not own
    if isinstance(own := getattr(part, "inv_freq", None), torch.Tensor):
        steps = torch.arange(0, 2 * own.numel(), 2).float() / (2 * own.numel())
        for base in _BASES:
            yield "inv_freq", f"another rotary base: {base:g}", base**-steps
    for mode in _POOLINGS if isinstance(part, PoolingModule) else ():
        if part.modes != (mode,):
            yield "modes", f"wrong pooling: {mode} in the place of {'+'.join(part.modes)}", (mode,)


def _of_weight(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if weight.dim() == 1:
        yield "a gain that is dropped", torch.ones_like(weight)
        yield "a gain that lacks its one", weight - 1
    if weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
        yield "a weight that is transposed", weight.T.contiguous()
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        yield f"a weight that is narrowed to {kind}", weight.to(dtype).float()
    if weight.dim() == 2:
        yield "rows of a table that are off by one", weight.roll(-1, 0)
        for heads in (heads for heads in _HEADS if weight.shape[0] % heads == 0):
            yield "heads that are swapped", _swapped(weight.T, heads).T.contiguous()


def _swapped(value: Any, heads: int) -> torch.Tensor:
    """The first two of so many blocks of the last dimension exchanged; of a tuple's first."""
    first = value[0] if isinstance(value, tuple) else value
    blocks = first.reshape(*first.shape[:-1], heads, -1)
    return blocks[..., [1, 0, *range(2, heads)], :].reshape(first.shape)


def _activated(function: Callable[[torch.Tensor], torch.Tensor], args: Any, _: Any) -> torch.Tensor:
    return function(args[0])


def _no_residual(args: Any) -> Any:
    """For a module that takes its residual as the second input."""
    if len(args) < 2 or not isinstance(args[1], torch.Tensor) or args[0].dim() != args[1].dim():
        raise ValueError("it takes no residual")
    return (args[0], torch.zeros_like(args[1]), *args[2:])


def _first_given(args: Any, found: Any) -> Any:
    return _with_first(found, args[0])


def _with_first(found: Any, first: torch.Tensor) -> Any:
    if isinstance(found, torch.Tensor):
        return first
    return type(found)([first, *found[1:]]) if isinstance(found, tuple) else found


def _set(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _before(part: torch.nn.Module, change: Callable[[Any], Any], undo: ExitStack) -> None:
    undo.callback(part.register_forward_pre_hook(lambda _m, args: change(args)).remove)


def _after(part: torch.nn.Module, change: Callable[[Any, Any], Any], undo: ExitStack) -> None:
    """``change`` makes of what the module is given, by place and by name, and of what it returns something else."""

    def hook(_m: Any, args: Any, kwargs: Any, found: Any) -> Any:
        return change((*args, *kwargs.values()), found)

    undo.callback(part.register_forward_hook(hook, with_kwargs=True).remove)
