"""The kind of a fault: by which cases it shows in, and by changing the model as known faults change it
until it computes the export's numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..exporters.sentence_transformers.head import DenseModule, LayerNormModule, NormalizeModule, PoolingModule
from ..runtime.inputs.arrays import Array, Arrays
from .cases import IDS, MASK, POSITIONS, TYPES, Trial
from .events import Event, Recorder
from .found import Found
from .model import Model
from .weights import Lost

# A change explains a fault where it leaves less than so much of the difference.
_EXPLAINED, _CERTAIN = 0.05, 1e-3
_EXPLAINED_ROUNDED, _CLEARLY = 0.4, 0.8
_MOST_PARTS = 12
_SKIPPED = "that is skipped"
_EPSILONS = (0.0, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12, 1e-1, 1e-2)
_BASES = (10_000.0, 1_000.0, 100_000.0, 500_000.0, 1_000_000.0, 20_000.0)
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the exact GELU (erf)": functional.gelu,
    "the tanh approximation of GELU": lambda x: functional.gelu(x, approximate="tanh"),
    "the sigmoid approximation of GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": functional.relu,
    "SiLU": functional.silu,
    "no activation": lambda x: x,
}
_SHORT = 8  # tokens: shorter texts may hide a fault by chance


def kind_of_cases(trials: Sequence[Trial], wrong: Collection[str]) -> str | None:
    """The trait that all wrong cases have and no right one has."""
    bad, good = ([t for t in trials if (t.name in wrong) == side] for side in (True, False))
    if not bad or not good:
        return None
    words = {
        "types": "types of tokens that are ignored",
        "padding": "a mask that is ignored",
        "padded left": "a mask that is read otherwise where padding is on the left",
        "padded right": "a mask that is read otherwise where padding is on the right",
        "several rows": "a batch size that is frozen",
        "steps": "a cache that is read or written at another place",
    }
    for trait, said in words.items():
        if all(trait in t.traits for t in bad) and not any(trait in t.traits for t in good):
            return said
    lengths = {_length(t) for t in good}
    if len(lengths) == 1 and not lengths & {_length(t) for t in bad}:
        return f"a length that is frozen: only {lengths.pop()} is right"
    if len(lengths) > 1 and max(lengths) > _SHORT and (most := max(lengths)) < min(_length(t) for t in bad):
        return f"a longest length that is frozen: up to {most} is right"
    return None


def _length(trial: Trial) -> int:
    arrays = list(trial.feeds.values())
    ids = next((array for name, array in trial.feeds.items() if name.endswith(IDS)), arrays[0])
    return int(ids.shape[1]) if ids.ndim > 1 else int(ids.size)


def explain(
    search: Found, recorder: Recorder, event: Event, expected: Array, claimed: Collection[str], lost: Lost | None
) -> tuple[str, str] | None:
    """The change of the model by which it computes what the export has, at ``event`` or in the end: the module that is
    changed, and in words how; None for none. Values that are ``claimed`` are right ones of other modules; the weight
    that is ``lost`` is tried as the export stores it."""
    wanted = search.counted(expected)
    _, answers = recorder.watch(search.trial.feeds)
    best: tuple[float, str, str] | None = None
    tried = [*changes(search.model, event, search.trial)]
    if lost is not None and lost.parameter is not None:
        apply = partial(_data, parameter=lost.parameter, value=torch.from_numpy(lost.stored))
        tried.append(Change(lost.module, lost.words, _bound(apply, search.trial.feeds)))
    for change in tried:
        with ExitStack() as undo:
            try:
                values, changed = recorder.watch(change.apply(undo))
            except Exception:  # noqa: BLE001, S112  (a change that this model does not take explains nothing)
                continue
        left = _left_of_answers(search, answers, changed)
        is_left_out = change.words.endswith(_SKIPPED)  # its input stands in the graph under other names too
        if left >= _CERTAIN and not is_left_out and event in values and values[event].shape == wanted.shape:
            left = min(left, _left_at(search, search.counted(values[event]), wanted, claimed))
        most = _EXPLAINED_ROUNDED if search.rule.simulates else _EXPLAINED
        if left < most and (best is None or left < _CLEARLY * best[0]):
            best = (left, change.module, change.words)
            if left < _CERTAIN:
                break
    return None if best is None else best[1:]


def _left_of_answers(search: Found, before: Arrays, changed: Arrays) -> float:
    """The share of the difference of all outputs that is left, by the size of each; 1 where nothing is explained."""
    left = was = 0.0
    for name, got in search.answers.items():
        if name in changed and got.ndim and changed[name].shape[:-1] == got.shape[:-1] and name in before:
            got = got[..., : changed[name].shape[-1]]  # of an embedding the model shows the first numbers alone
        if name not in before or name not in changed or changed[name].shape != got.shape:
            return 1.0
        size = max(_rms(got), 1e-12)
        left += (_rms(search.counted(changed[name]) - got) / size) ** 2
        was += (_rms(search.counted(before[name]) - got) / size) ** 2 if before[name].shape == got.shape else 1.0
    return float(np.sqrt(left / was)) if was > 0 else 1.0


def _left_at(search: Found, changed: Array, wanted: Array, claimed: Collection[str]) -> float:
    """The share that is left at one value: the export's one that is nearest to the ``changed``."""
    near, found = search.nearest(wanted, claimed), search.nearest(changed, claimed)
    moved = _rms(changed - wanted)
    if found is None or near is None or moved == 0.0:
        return 1.0
    return _rms(found[1] - changed) / min(_rms(near[1] - wanted), moved)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0


@dataclass(frozen=True)
class Change:
    """``module`` changed as ``words`` say; ``apply`` returns the inputs that the changed model is to be given."""

    module: str
    words: str
    apply: Callable[[ExitStack], Arrays]


def changes(model: Model, event: Event, trial: Trial) -> Iterator[Change]:
    """Known faults of inputs, of the module where the export goes wrong and of those around it."""
    feeds = trial.feeds
    name = event.module if event.side == "out" else event.parent
    for words, given in _of_inputs(model, feeds):
        yield Change(name, words, given)
    parts = dict.fromkeys([name, event.module])
    around = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
    for path in [*parts, *around]:
        part = model.part(path)
        if part is None:
            continue
        inside = [(f"{path}.{below}", each) for below, each in part.named_modules() if below]
        for where, each in [(path, part), *(inside if path in parts and len(inside) < _MOST_PARTS else ())]:
            for words, change in _of_part(each, path in parts):
                yield Change(where, words, _bound(change, feeds))


def _bound(change: Callable[[ExitStack], None], feeds: Arrays) -> Callable[[ExitStack], Arrays]:
    def apply(undo: ExitStack) -> Arrays:
        change(undo)
        return feeds

    return apply


def _of_inputs(model: Model, feeds: Arrays) -> Iterator[tuple[str, Callable[[ExitStack], Arrays]]]:
    ids = next((array for name, array in feeds.items() if name.endswith(IDS)), None)
    if ids is None:
        return
    rows, length = ids.shape
    mask = feeds.get(MASK)
    if mask is not None and not mask.all():
        yield "a mask that is ignored", lambda _: {**feeds, MASK: np.ones_like(mask)}
    if TYPES in feeds and feeds[TYPES].any():
        yield "types of tokens that are ignored", lambda _: {**feeds, TYPES: np.zeros_like(feeds[TYPES])}
    if MASK in model.inputs:
        yield (
            "a causal mask that is off",
            lambda _: {**feeds, MASK: np.zeros((rows, 1, length, length), np.float32)},
        )
    if POSITIONS in model.inputs:
        places = feeds.get(POSITIONS, np.arange(length)[None].repeat(rows, 0))
        for offset in (1, 2, -1):
            moved = np.maximum(places + offset, 0)
            yield f"positions that are off by {offset}", partial(_with, {**feeds, POSITIONS: moved})
        yield "positions that are all 0", lambda _: {**feeds, POSITIONS: np.zeros_like(places)}


def _with(feeds: Arrays, _: ExitStack) -> Arrays:
    return feeds


def _of_part(part: Any, closely: bool) -> Iterator[tuple[str, Callable[[ExitStack], None]]]:
    """Faults that a module can have; each is undone by the stack. Not ``closely``: that it is skipped."""
    named = {DenseModule: "Dense", NormalizeModule: "Normalize", LayerNormModule: "LayerNorm"}
    yield f"{named.get(type(part), 'a layer')} {_SKIPPED}", lambda undo: _skipped(undo, part)
    if not closely:
        return
    weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
    if isinstance(bias, torch.nn.Parameter):
        yield "a bias that is dropped", lambda undo: _data(undo, bias, torch.zeros_like(bias.data))
    if isinstance(weight, torch.nn.Parameter):
        yield from _of_weight(weight, weight.dim() == 1)
    for name in ("eps", "variance_epsilon", "layer_norm_eps"):
        if isinstance(getattr(part, name, None), float):
            for value in _EPSILONS:
                if value != getattr(part, name):
                    words = f"another epsilon: {value:g} in the place of {getattr(part, name):g}"
                    yield words, partial(_attribute, part=part, name=name, value=value)
    for name in ("scaling", "scale"):
        if isinstance(getattr(part, name, None), float):
            for value, words in ((1.0, "a scale that is missing"), (getattr(part, name) ** 2, "a scale applied twice")):
                yield words, partial(_attribute, part=part, name=name, value=value)
    if isinstance(getattr(part, "is_causal", None), bool):
        words = "a causal mask that is off" if part.is_causal else "a causal mask that is on"
        yield words, lambda undo: _attribute(undo, part, "is_causal", not part.is_causal)
    if isinstance(getattr(part, "inv_freq", None), torch.Tensor):
        size = 2 * part.inv_freq.numel()
        for base in _BASES:
            moved = base ** -(torch.arange(0, size, 2).float() / size)
            yield f"another rotary base: {base:g}", partial(_attribute, part=part, name="inv_freq", value=moved)
    if isinstance(part, PoolingModule):
        for mode in ("mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean"):
            if part.modes != (mode,):
                yield (
                    f"wrong pooling: {mode} in the place of {'+'.join(part.modes)}",
                    partial(_attribute, part=part, name="modes", value=(mode,)),
                )
        yield "pooling without the mask", lambda undo: _without_mask(undo, part)
    yield "a residual that is left out", lambda undo: _without_residual(undo, part)
    if type(part) not in named and not list(part.children()) and not list(part.parameters()):
        for said, function in _ACTIVATIONS.items():
            yield f"another activation: {said}", partial(_computed, part=part, function=function)
    yield "heads that are swapped", lambda undo: _swapped(undo, part)


def _of_weight(weight: torch.nn.Parameter, is_gain: bool) -> Iterator[tuple[str, Callable[[ExitStack], None]]]:
    if is_gain:
        yield "a gain that is dropped", lambda undo: _data(undo, weight, torch.ones_like(weight.data))
        yield "a gain that lacks its one", lambda undo: _data(undo, weight, weight.data - 1)
    if weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
        yield "a weight that is transposed", lambda undo: _data(undo, weight, weight.data.T.contiguous())
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        words = f"a weight that is narrowed to {kind}"
        yield words, partial(_data, parameter=weight, value=weight.data.to(dtype).float())
    if weight.dim() == 2:
        yield "rows of a table that are off by one", lambda undo: _data(undo, weight, weight.data.roll(-1, 0))
        for size in (2, 4, 8, 12, 16):
            if weight.shape[0] % size == 0:
                yield (
                    "heads that are swapped",
                    partial(_data, parameter=weight, value=_exchanged(weight.data, size)),
                )


def _exchanged(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """With the first two of so many blocks of rows exchanged."""
    blocks = weight.reshape(heads, -1, weight.shape[1]).clone()
    blocks[[0, 1]] = blocks[[1, 0]]
    return blocks.reshape(weight.shape)


def _data(undo: ExitStack, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    before = parameter.data
    parameter.data = value
    undo.callback(setattr, parameter, "data", before)


def _attribute(undo: ExitStack, part: Any, name: str, value: Any) -> None:
    undo.callback(setattr, part, name, getattr(part, name))
    setattr(part, name, value)


def _computed(undo: ExitStack, part: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    undo.enter_context(_hook(part.register_forward_hook(lambda _m, given, _o: function(given[0]))))


def _skipped(undo: ExitStack, part: torch.nn.Module) -> None:
    def own_input(_m: Any, args: Any, kwargs: Any, found: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        if isinstance(found, torch.Tensor):
            return first
        return type(found)([first, *found[1:]]) if isinstance(found, tuple) else found

    undo.enter_context(_hook(part.register_forward_hook(own_input, with_kwargs=True)))


def _without_residual(undo: ExitStack, part: torch.nn.Module) -> None:
    """For a module that takes its residual as the second input."""

    def emptied(_m: Any, args: Any) -> Any:
        if len(args) < 2 or not isinstance(args[1], torch.Tensor) or args[0].dim() != args[1].dim():
            raise ValueError("it takes no residual")
        return (args[0], torch.zeros_like(args[1]), *args[2:])

    undo.enter_context(_hook(part.register_forward_pre_hook(emptied)))


def _without_mask(undo: ExitStack, part: torch.nn.Module) -> None:
    hook = part.register_forward_pre_hook(lambda _m, args: (args[0], torch.ones_like(args[1]), None))
    undo.enter_context(_hook(hook))


def _swapped(undo: ExitStack, part: torch.nn.Module) -> None:
    """The first two heads exchanged in what comes out of an attention."""
    heads = next((getattr(part, n) for n in ("num_attention_heads", "num_heads", "n_heads") if hasattr(part, n)), 0)
    if not heads:
        raise ValueError("it has no heads")

    def exchanged(_m: Any, _i: Any, found: Any) -> Any:
        first = found[0] if isinstance(found, tuple) else found
        blocks = first.reshape(*first.shape[:-1], heads, -1).clone()
        blocks[..., [0, 1], :] = blocks[..., [1, 0], :]
        moved = blocks.reshape(first.shape)
        return (moved, *found[1:]) if isinstance(found, tuple) else moved

    undo.enter_context(_hook(part.register_forward_hook(exchanged)))


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
