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
from functools import partial
from math import prod
from string import ascii_lowercase
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from ...elastic import Axis, PrefixSlice, Submodel
from ...errors import ExportError
from ...outside import library_errors
from ..modules.layers import mend_sizes, on_same_weights, part_layers
from .followed_dims import WITHIN, Factor, Followed, Place, follow, leaves

FFN, HEADS = "ffn", "heads"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_SIDE = re.compile(r"(?:^|\.)(encoder|decoder)\.")
# Numbers that a part holds beside its weights and that count what an axis counts: heads, and what all heads have.
_COUNT, _WIDTH = re.compile(r"(?=.*head|.*group)(?!.*(?:dim|size))"), re.compile(r"(?=.*(?:dim|size|hidden|inner))")
# Rows and weights of the proof: float32 is off by less, and a wrong slice by about 1.
_SLICE_LIMIT = 1e-3
# Of a part, an attribute of it, and how many of that are to a step.
_Count = tuple[str, str, int]


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
class _Candidate:
    """A factor, of ``size`` steps, and the parameters that have it; ``path`` is the part of the module that holds them
    all."""

    kind: str
    size: int
    cuts: tuple[tuple[Place, int], ...]
    path: str
    problem: str | None
    fused: Mapping[str, int] = field(
        default_factory=dict
    )  # layers that hold it in so many parts, if only that is wrong

    @property
    def pattern(self) -> str:
        return _NUMBER.sub("*", self.path + ".").rstrip(".")


@dataclass(frozen=True)
class _Kept:
    """A candidate that stood the proof, and the numbers to be mended with it."""

    candidate: _Candidate
    counts: Sequence[_Count]


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
    kept, refused = list[_Kept](), list[_Candidate]()
    proven: dict[object, Sequence[_Count] | str] = {}
    candidates = _candidates(module, followed)
    numbered = any(each.problem is None for each in candidates)
    for candidate in candidates if numbered else _candidates(module, followed, numbered=False):
        problem = candidate.problem
        if problem is None:
            owner = _owner(module, candidate.path, followed)
            shapes = [(name, *parameter.shape) for name, parameter in module.get_submodule(owner).named_parameters()]
            key = (candidate.pattern, candidate.size, *shapes)  # one proof for layers that are alike
            if key not in proven:
                proven[key] = _prove(module, owner, candidate, followed)
            found = proven[key]
            if not isinstance(found, str):
                kept.append(_Kept(candidate, [(f"{owner}.{at}".strip("."), name, unit) for at, name, unit in found]))
                continue
            problem = found
        # The width of the model itself, which a residual has, and the size of a head are no news.
        if problem != WITHIN and (candidate.kind == HEADS or not numbered or _NUMBER.search(candidate.path + ".")):
            refused.append(replace(candidate, problem=problem))
    for kinds in ((FFN, HEADS), (FFN,), ()):
        axes = _described([each for each in kept if each.candidate.kind in kinds], refused)
        problem = _failure(module, axes, followed, args, kwargs)
        if problem is None:
            break
        kind = HEADS if HEADS in kinds else FFN
        refused += [replace(each.candidate, problem=problem) for each in kept if each.candidate.kind == kind]
    return axes, _in_parts(module, [candidate.fused for candidate in refused], followed)


def _in_parts(module: torch.nn.Module, fused: Iterable[Mapping[str, int]], followed: Followed) -> dict[str, int]:
    """The layers of ``fused`` with which in parts the module is the same; of those that are alike one is tried."""
    tried: dict[object, bool] = {}
    found = {}
    for path, count in ((path, count) for each in fused for path, count in each.items()):
        key = (_NUMBER.sub("*", path), count, *(tuple(each.shape) for each in module.get_submodule(path).parameters()))
        if key not in tried:
            tried[key] = _is_same_in_parts(module, path, count, followed)
        if tried[key]:
            found[path] = count
    return found


def _described(kept: Sequence[_Kept], refused: Iterable[_Candidate]) -> FoundAxes:
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


def _candidates(module: torch.nn.Module, followed: Followed, numbered: bool = True) -> list[_Candidate]:
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
    found: list[_Candidate] = []
    taken: dict[str, str] = {}
    for factor, own in cuts.items():
        places = {place for place, _ in own}
        if not (places & followed.made and places & followed.read):
            continue
        path = _common([parameter for parameter, _ in places])
        problem = next(iter(factor.reasons), None)
        if problem is None:
            beside = all(parameter[len(path) :].lstrip(".").count(".") <= 1 for parameter, _ in places)
            in_one = bool(_NUMBER.search(path + ".")) if numbered else beside
            problem = _misfit(own, in_one, taken, module)
        fused = dict[str, int]()
        if problem is None and behind[factor]:
            fused = _fused(behind[factor], module)
            problem = f"{next(iter(behind[factor]))[0]} holds its steps behind those of others, as a fused weight does"
        if problem is None:
            taken |= {parameter: path for parameter, _ in places}
        found.append(_Candidate(HEADS if factor in heads else FFN, factor.size, tuple(own), path, problem, fused))
    return found


def _fused(behind: Mapping[Place, int], module: torch.nn.Module) -> dict[str, int]:
    """The linear layers that hold these places in so many parts; none where one of the places is no row of such."""
    layers = {parameter.rpartition(".")[0]: count for (parameter, _), count in behind.items()}
    rows = all(count and not dim for (_, dim), count in behind.items())
    return layers if rows and all(_is_plain(module, path) for path in layers) else {}


def _is_plain(module: torch.nn.Module, path: str) -> bool:
    """Whether a linear layer computes what its class does, and it and its parameters have this one name."""
    layer = module.get_submodule(path)
    hooks = (*layer._forward_hooks, *layer._forward_pre_hooks)
    if type(layer) is not torch.nn.Linear or hooks or "forward" in vars(layer):
        return False
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    every = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    is_own = all(every.count(id(parameter)) == 1 for parameter in layer.parameters())
    return is_own and sum(part is layer for part in parts) == 1


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


def _names(candidates: Sequence[_Candidate]) -> list[str]:
    """``layers.3.ffn``, or ``encoder.layers.3.ffn`` of a model with two sides; further ones of a layer are of kinds of
    their own, ``ffn_b``."""
    varying: dict[tuple[str, int], set[str]] = defaultdict(set)
    for candidate in candidates:
        for at, number in enumerate(_NUMBER.findall(candidate.path + ".")):
            varying[candidate.pattern, at].add(number)
    layers: dict[str, None] = {}
    keys = []
    for candidate in candidates:
        numbers = list(_NUMBER.finditer(candidate.path + "."))
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


def _lines(refused: Iterable[_Candidate]) -> tuple[str, ...]:
    """One line for all layers."""
    lines: dict[tuple[str, str, str], int] = defaultdict(int)
    for candidate in refused:
        lines[candidate.kind, candidate.pattern, _NUMBER.sub("*", candidate.problem or "")] += 1
    return tuple(
        f"{kind} of {pattern or 'the model'}{f' ({count} layers)' if count > 1 else ''}: {problem}"
        for (kind, pattern, problem), count in lines.items()
    )


def _owner(module: torch.nn.Module, path: str, followed: Followed) -> str:
    """The innermost part at or around ``path`` that has parts and is called."""
    while path and (path not in followed.calls or not any(module.get_submodule(path).children())):
        path = path.rpartition(".")[0]
    return path


def _call(
    part: torch.nn.Module, owner: str, followed: Followed
) -> tuple[dict[int, torch.Tensor], Any, Any, list[torch.Tensor]]:
    """Numbers drawn for the tensors of ``part``, called ``owner``, and for the arguments that it had, and its answers.
    Raises ExportError where it does not run by itself."""
    generator = torch.Generator().manual_seed(0)
    drawn = {id(tensor): _drawn(tensor, generator) for tensor in (*part.parameters(), *part.buffers())}
    full = {name: drawn[id(parameter)] for name, parameter in part.named_parameters()}
    for value in (1, 0):  # a mask is 1 where a token counts, or where it is hidden
        drawing = partial(_drawn, generator=generator, value=value)
        args, kwargs = tree_map_only(torch.Tensor, drawing, followed.calls[owner])
        answers = _answers(_copied(part, drawn, full), args, kwargs)
        if all(bool(torch.isfinite(answer).all()) for answer in answers):
            break
    return drawn, args, kwargs, answers


def _is_same_in_parts(module: torch.nn.Module, path: str, count: int, followed: Followed) -> bool:
    """Whether what calls the layer ``path`` answers alike with it in so many parts: it may look at the layer itself."""
    owner = _owner(module, path.rpartition(".")[0], followed)
    part = module.get_submodule(owner)
    try:
        drawn, args, kwargs, whole = _call(part, owner, followed)
        parted = _copied(part, drawn, {name: drawn[id(parameter)] for name, parameter in part.named_parameters()})
        part_layers(parted, {path.removeprefix(f"{owner}."): count})
        return _difference(whole, _answers(parted, args, kwargs)) <= _SLICE_LIMIT
    except ExportError:
        return False


def _prove(module: torch.nn.Module, owner: str, candidate: _Candidate, followed: Followed) -> Sequence[_Count] | str:
    """The numbers of the part ``owner`` to be mended, each with how many of it are to a step, with which the part cut
    to half of the steps answers as the whole with the rest at zero; or why it does not, whatever is mended."""
    part, kept = module.get_submodule(owner), max(candidate.size // 2, 1)
    start = len(owner) + 1 if owner else 0
    cuts = {(parameter[start:], dim): unit for (parameter, dim), unit in candidate.cuts}
    try:
        drawn, args, kwargs, as_it_is = _call(part, owner, followed)
        full = {name: drawn[id(parameter)] for name, parameter in part.named_parameters()}
        own, turned = dict(full), dict(full)
        for (name, dim), unit in cuts.items():
            own[name] = full[name].clone()
            own[name].narrow(dim, kept * unit, (candidate.size - kept) * unit).zero_()
            steps = torch.arange(candidate.size * unit).reshape(candidate.size, unit).flip(0).flatten()
            turned[name] = full[name].index_select(dim, steps)
        whole, ranked = (_answers(_copied(part, drawn, each), args, kwargs) for each in (own, turned))
    except ExportError as failure:
        return f"{type(part).__name__} by itself {failure}"
    if (off := _difference(as_it_is, ranked)) > _SLICE_LIMIT:  # ranking puts them in another order
        return f"its steps differ by their place: turned around it is another function (off by {off:.2g})"
    views, problem = dict(own), ""
    for (name, dim), unit in cuts.items():
        views[name] = views[name].narrow(dim, 0, kept * unit)
    for mended in _countings(part, candidate):
        narrowed = _copied(part, drawn, views)
        mend_sizes(narrowed)
        for name, attribute, unit in mended:
            setattr(narrowed.get_submodule(name), attribute, kept * unit)
        try:
            answers = _answers(narrowed, args, kwargs)
        except ExportError as failure:
            problem = f"cut to {kept} of {candidate.size}, {type(part).__name__} {failure}"
            continue
        worst = _difference(whole, answers)
        if worst <= _SLICE_LIMIT:
            return mended
        problem = f"cut to {kept} of {candidate.size} it is another function (off by {worst:.2g})"
    return problem


def _countings(part: torch.nn.Module, candidate: _Candidate) -> Iterable[list[_Count]]:
    """What may have to be mended, the least first: nothing, numbers of heads, and widths of all heads too."""
    yield []
    if candidate.kind != HEADS:
        return
    units = {unit for _, unit in candidate.cuts}
    whole = [
        (name, attribute, value)
        for name, own in part.named_modules()
        for attribute, value in vars(own).items()
        if type(value) is int and value > 1 and value % candidate.size == 0
    ]
    counts = [(n, a, v // candidate.size) for n, a, v in whole if _COUNT.match(a) and v < candidate.size * max(units)]
    if counts:
        yield counts
    widths = [(n, a, v // candidate.size) for n, a, v in whole if _WIDTH.match(a) and v // candidate.size in units]
    if widths:
        yield counts + widths


def _copied(
    part: torch.nn.Module, drawn: Mapping[int, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """``part`` with numbers in the place of shapes."""
    memo: dict[int, object] = {id(buffer): drawn[id(buffer)] for buffer in part.buffers()}
    for name, parameter in part.named_parameters():
        memo[id(parameter)] = torch.nn.Parameter(own[name], requires_grad=False)
    return copy.deepcopy(part, memo).eval()


def _drawn(tensor: torch.Tensor, generator: torch.Generator, value: int = 1) -> torch.Tensor:
    """Numbers of the shape of ``tensor``: of a matrix such that sums over a row are about 1; masks and indices are
    ``value``, whatever their type."""
    if not tensor.is_floating_point():
        return torch.full(tensor.shape, value, dtype=tensor.dtype)
    numbers = torch.randn(tensor.shape, generator=generator)
    return numbers / tensor.shape[-1] ** 0.5 if tensor.ndim == 2 else numbers


def _answers(part: torch.nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    args, kwargs = copy.deepcopy((args, kwargs))
    with torch.no_grad(), library_errors(lambda said: ExportError(f"fails: {said}")):
        answers = [value for value in tree_iter(part(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    if any(isinstance(value, FakeTensor) for value in answers):
        raise ExportError("keeps tensors of another pass")
    return answers


def _difference(whole: Sequence[torch.Tensor], cut: Sequence[torch.Tensor]) -> float:
    """By how much any answer that has one shape in both differs, as a share of its size; infinite where none has."""
    pairs = [(a.double(), b.double()) for a, b in zip(whole, cut, strict=False) if a.shape == b.shape]
    shares = [float((a - b).abs().max() / a.square().mean().sqrt().clamp(min=1e-6)) for a, b in pairs]
    return max(shares, default=float("inf"), key=lambda share: float("inf") if share != share else share)
