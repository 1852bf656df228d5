"""Elastic axes found in a module that no family names: its FFN neurons and its attention heads.

Dimensions that are one factor (followed_dims.py) are an axis where weights of one layer make it and others sum over it,
nothing between is measured along it, and it is the slowest factor wherever it stands: then a prefix of its steps is a
prefix of every parameter. It is one of ``heads`` where attention multiplies along it, else of an ``ffn``. Groups of
queries that share keys and values are one step. A linear layer that has equal parts one behind the other, such as gate
and up, is taken apart into layers of their own.

Each axis must stand the slice proof before it is offered: the part of the model that holds it must answer alike with
its steps in another order, and cut to half of them as the whole with the weights of the rest set to zero.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from string import ascii_lowercase
from typing import Any

import torch

from ...elastic import Axis, PrefixSlice, Submodel
from ...errors import ExportError
from ..modules.layers import mend_sizes, on_same_weights, part_layers
from ..torch_internals import is_hooked
from .dims_rules import Followed, Place
from .factors import WITHIN, Factor, leaves
from .followed_dims import follow
from .slice_proof import (
    FFN,
    HEADS,
    NUMBER,
    SLICE_LIMIT,
    Candidate,
    Count,
    answers_of,
    call,
    copied,
    difference,
    owner_of,
    prove,
)

_SIDE = re.compile(r"(?:^|\.)(encoder|decoder)\.")


@dataclass(frozen=True)
class FoundAxes:
    """``refused`` are lines that say which other factors were found and why they cannot shrink. ``counts`` are numbers
    that parts of the module hold beside their weights, by part and attribute: the axis, and how many to a step.
    ``parted`` are the layers that must be taken apart (modules/layers.py) for the axes to be there, and into how many;
    ``stacked`` their parameters, to those of their parts."""

    axes: tuple[Axis, ...] = ()
    slices: tuple[PrefixSlice, ...] = ()
    refused: tuple[str, ...] = ()
    counts: Mapping[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    parted: Mapping[str, int] = field(default_factory=dict)

    @property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        cut = {part.parameter for part in self.slices}
        names = [(path, kind, count) for path, count in self.parted.items() for kind in ("weight", "bias")]
        every = {f"{p}.{kind}": tuple(f"{p}.parts.{n}.{kind}" for n in range(count)) for p, kind, count in names}
        return {name: parts for name, parts in every.items() if parts[0] in cut}

    @property
    def widths(self) -> frozenset[str]:
        """The kinds of axes that are counted in neurons."""
        return frozenset(axis.kind for axis in self.axes if axis.kind.startswith(FFN))

    @property
    def half(self) -> Submodel:
        """Half of every axis."""
        return Submodel(tuple((axis, max(axis.size // 2, 1)) for axis in self.axes))

    def cut(self, module: torch.nn.Module, submodel: Submodel) -> torch.nn.Module:
        """A copy of ``module`` cut to ``submodel``, whose parameters are views."""
        memo: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
        views = {name: parameter.data for name, parameter in module.named_parameters()}
        for cut in self.slices:
            views[cut.parameter] = views[cut.parameter].narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
        for name, parameter in module.named_parameters():
            memo[id(parameter)] = torch.nn.Parameter(views[name], requires_grad=False)
        narrowed = copy.deepcopy(module, memo)
        mend_sizes(narrowed)
        self.narrow(narrowed, submodel)
        return narrowed

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
        """Mends the numbers that parts of ``module``, whose parameters were cut to ``submodel``, hold beside them."""
        for (part, attribute), (axis, unit) in self.counts.items():
            setattr(module.get_submodule(part), attribute, submodel[axis] * unit)


@dataclass(frozen=True)
class _Kept:
    """A candidate that stood the proof, and the numbers to be mended with it."""

    candidate: Candidate
    counts: Sequence[Count]


def find_axes(module: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> FoundAxes:
    """The axes of ``module``, which may be on the meta device and answers ``args`` and ``kwargs``, by the names of its
    own parameters. Where it cannot be followed there are none, and it is said why."""
    found, fused = _find(module, args, kwargs or {})
    while fused:
        parted = on_same_weights(module)
        part_layers(parted, fused)
        again, _ = _find(parted, args, kwargs or {})
        cut = {each.parameter.partition(".parts.")[0] for each in again.slices}
        if cut >= fused.keys():
            return replace(again, parted=fused)
        fused = {path: count for path, count in fused.items() if path in cut}
    return found


def _find(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[FoundAxes, dict[str, int]]:
    """The axes of ``module`` as it is, and the layers that hold others in equal parts."""
    try:
        followed = follow(module, args, kwargs)
    except ExportError as failure:
        return FoundAxes(refused=(str(failure),)), {}
    kept, refused = list[_Kept](), list[Candidate]()
    proven: dict[object, Sequence[Count] | str] = {}
    candidates = _candidates(module, followed)
    numbered = any(each.problem is None for each in candidates)
    for candidate in candidates if numbered else _candidates(module, followed, numbered=False):
        problem = candidate.problem
        if problem is None:
            owner = owner_of(module, candidate.path, followed)
            shapes = [(name, *parameter.shape) for name, parameter in module.get_submodule(owner).named_parameters()]
            key = (candidate.pattern, candidate.size, *shapes)  # one proof for layers that are alike
            if key not in proven:
                proven[key] = prove(module, owner, candidate, followed)
            found = proven[key]
            if not isinstance(found, str):
                kept.append(_Kept(candidate, [(f"{owner}.{at}".strip("."), name, unit) for at, name, unit in found]))
                continue
            problem = found
        # The width of the model itself, which a residual has, and the size of a head are no news.
        if problem != WITHIN and (candidate.kind == HEADS or not numbered or NUMBER.search(candidate.path + ".")):
            refused.append(replace(candidate, problem=problem))
    for kinds in ((FFN, HEADS), (FFN,), ()):
        axes = _described([each for each in kept if each.candidate.kind in kinds], refused)
        problem = _failure(module, axes, followed, args, kwargs)
        if problem is None:
            break
        kind = HEADS if HEADS in kinds else FFN
        refused += [replace(each.candidate, problem=problem) for each in kept if each.candidate.kind == kind]
    return axes, in_parts(module, [candidate.fused for candidate in refused], followed)


def _described(kept: Sequence[_Kept], refused: Iterable[Candidate]) -> FoundAxes:
    axes, slices, counts = [], [], dict[tuple[str, str], tuple[str, int]]()
    named = list(zip(kept, _names([each.candidate for each in kept]), strict=True))
    layers = list(dict.fromkeys(name.rpartition(".")[0] for _, name in named))
    # Layer by layer, neurons first, as named families have them.
    for each, name in sorted(named, key=lambda pair: (layers.index(pair[1].rpartition(".")[0]), pair[1])):
        axes.append(Axis(name, each.candidate.size))
        slices += [PrefixSlice(parameter, dim, name, unit) for (parameter, dim), unit in each.candidate.cuts]
        counts |= {(part, attribute): (name, unit) for part, attribute, unit in each.counts}
    # Heads within a group, and numbers within a head, are cut with it.
    whole = {each.candidate.pattern for each in kept if each.candidate.kind == HEADS}
    lines = _lines(each for each in refused if each.pattern not in whole)
    return FoundAxes(tuple(axes), tuple(slices), lines, counts)


def _failure(
    module: torch.nn.Module, found: FoundAxes, followed: Followed, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why the whole ``module`` does not answer with half of every axis, if it does not."""
    if not found.axes:
        return None
    try:
        answers = follow(found.cut(module, found.half), args, kwargs).answers
    except ExportError as failure:
        return f"cut along all axes, the model {failure}"
    return None if answers == followed.answers else "cut along all axes, the model returns other shapes"


def _candidates(module: torch.nn.Module, followed: Followed, numbered: bool = True) -> list[Candidate]:
    """Every factor that weights make and other weights sum over, in the order of the parameters. Those that may shrink
    lie in ``numbered`` layers, or in one part of the module whatever its name."""
    cuts: dict[Factor, list[tuple[Place, int]]] = defaultdict(list)
    behind: dict[Factor, dict[Place, int]] = defaultdict(dict)
    for place, dim in followed.places.items():
        parts = leaves(dim)
        for at, factor in enumerate(parts):
            cuts[factor].append((place, prod(part.size for part in parts[at + 1 :])))
            if at:
                behind[factor][place] = parts[0].size if at == 1 else 0
    heads = {factor for dim in followed.batched for factor in leaves(dim)}
    found: list[Candidate] = []
    taken: dict[str, str] = {}
    for factor, own in cuts.items():
        places = {place for place, _ in own}
        if not (places & followed.made and places & followed.read):
            continue
        path = _common([parameter for parameter, _ in places])
        problem = next(iter(factor.reasons), None)
        if problem is None:
            beside = all(parameter[len(path) :].lstrip(".").count(".") <= 1 for parameter, _ in places)
            in_one = bool(NUMBER.search(path + ".")) if numbered else beside
            problem = _misfit(own, in_one, taken, module)
        fused = dict[str, int]()
        if problem is None and behind[factor]:
            fused = fused_in(behind[factor], module)
            problem = f"{next(iter(behind[factor]))[0]} holds its steps behind those of others, as a fused weight does"
        if problem is None:
            taken |= {parameter: path for parameter, _ in places}
        found.append(Candidate(HEADS if factor in heads else FFN, factor.size, tuple(own), path, problem, fused))
    return found


def _misfit(
    cuts: Sequence[tuple[Place, int]],
    in_one: bool,
    taken: Mapping[str, str],
    module: torch.nn.Module,
) -> str | None:
    """Why the parameters of a factor that may shrink are not cut to prefixes, if they are not."""
    names = [parameter for (parameter, _), _ in cuts]
    if not in_one:
        return "its parameters lie in no layer, or in several"
    if twice := next((name for name in names if names.count(name) > 1 or name in taken), None):
        return f"{twice} would be cut in two dimensions"
    if deep := next((name for (name, dim), _ in cuts if dim and module.get_parameter(name).ndim > 2), None):
        return f"{deep} has three dimensions or more"
    return None


def _common(names: Sequence[str]) -> str:
    """The innermost part of the module that holds all these parameters."""
    first, *others = [name.split(".")[:-1] for name in names]
    same = 0
    while same < len(first) and all(other[: same + 1] == first[: same + 1] for other in others):
        same += 1
    return ".".join(first[:same])


def _names(candidates: Sequence[Candidate]) -> list[str]:
    """``layers.3.ffn``, or ``encoder.layers.3.ffn`` of a model with two sides; further ones of a layer are of kinds of
    their own, ``ffn_b``."""
    varying: dict[tuple[str, int], set[str]] = defaultdict(set)
    for candidate in candidates:
        for at, number in enumerate(NUMBER.findall(candidate.path + ".")):
            varying[candidate.pattern, at].add(number)
    layers: dict[str, None] = {}
    keys = []
    for candidate in candidates:
        numbers = list(NUMBER.finditer(candidate.path + "."))
        last = max((at for at in range(len(numbers)) if len(varying[candidate.pattern, at]) > 1), default=0)
        keys.append(candidate.path[: numbers[last].end()] if numbers else candidate.path)
        layers[keys[-1]] = None
    sides = {key: match[1] for key in layers if (match := _SIDE.search(key))}
    two_sided = len(set(sides.values())) == 2 and len(sides) == len(layers)
    places: dict[str, str] = {}
    counts: dict[str, int] = defaultdict(int)
    for key in layers:
        side = f"{sides[key]}." if two_sided else ""
        places[key] = f"{side}layers.{counts[side]}"
        counts[side] += 1
    seen: dict[str, int] = defaultdict(int)
    names = []
    for candidate, key in zip(candidates, keys, strict=True):
        name = f"{places[key]}.{candidate.kind}"
        names.append(name if not seen[name] else f"{name}_{ascii_lowercase[min(seen[name], 25)]}")
        seen[name] += 1
    return names


def _lines(refused: Iterable[Candidate]) -> tuple[str, ...]:
    """One line for all layers."""
    lines: dict[tuple[str, str, str], int] = defaultdict(int)
    for candidate in refused:
        lines[candidate.kind, candidate.pattern, NUMBER.sub("*", candidate.problem or "")] += 1
    return tuple(
        f"{kind} of {pattern or 'the model'}{f' ({count} layers)' if count > 1 else ''}: {problem}"
        for (kind, pattern, problem), count in lines.items()
    )


def in_parts(module: torch.nn.Module, fused: Iterable[Mapping[str, int]], followed: Followed) -> dict[str, int]:
    """The layers of ``fused`` with which in parts the module is the same; of those that are alike one is tried."""
    tried: dict[object, bool] = {}
    found = {}
    for path, count in ((path, count) for each in fused for path, count in each.items()):
        key = (NUMBER.sub("*", path), count, *(tuple(each.shape) for each in module.get_submodule(path).parameters()))
        if key not in tried:
            tried[key] = _is_same_in_parts(module, path, count, followed)
        if tried[key]:
            found[path] = count
    return found


def _is_same_in_parts(module: torch.nn.Module, path: str, count: int, followed: Followed) -> bool:
    """Whether what calls the layer ``path`` answers alike with it in so many parts: it may look at the layer itself."""
    owner = owner_of(module, path.rpartition(".")[0], followed)
    part = module.get_submodule(owner)
    try:
        drawn, args, kwargs, whole = call(part, owner, followed)
        parted = copied(part, drawn, {name: drawn[id(parameter)] for name, parameter in part.named_parameters()})
        part_layers(parted, {path.removeprefix(f"{owner}."): count})
        return difference(whole, answers_of(parted, args, kwargs)) <= SLICE_LIMIT
    except ExportError:
        return False


def fused_in(behind: Mapping[Place, int], module: torch.nn.Module) -> dict[str, int]:
    """The linear layers that hold these places in so many parts; none where one of the places is no row of such."""
    layers = {parameter.rpartition(".")[0]: count for (parameter, _), count in behind.items()}
    rows = all(count and not dim for (_, dim), count in behind.items())
    return layers if rows and all(_is_plain(module, path) for path in layers) else {}


def _is_plain(module: torch.nn.Module, path: str) -> bool:
    """Whether a linear layer computes what its class does, and it and its parameters have this one name."""
    layer = module.get_submodule(path)
    if type(layer) is not torch.nn.Linear or is_hooked(layer) or "forward" in vars(layer):
        return False
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    every = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    is_own = all(every.count(id(parameter)) == 1 for parameter in layer.parameters())
    return is_own and sum(part is layer for part in parts) == 1
