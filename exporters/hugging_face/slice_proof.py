"""The slice proof of a candidate for an axis: the part of the model that holds it, by itself and with numbers drawn for
weights and arguments, answers alike with its steps in another order, and cut to half of them as the whole with the
weights of the rest set to zero."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...errors import ExportError
from ...outside import library_errors
from ..modules.layers import mend_sizes
from ..torch_internals import FakeTensor, tree_iter, tree_map_only
from .dims_rules import Followed, Place

FFN, HEADS = "ffn", "heads"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
# Numbers that a part holds beside its weights and that count what an axis counts: heads, and what all heads have.
_COUNT, _WIDTH = re.compile(r"(?=.*head|.*group)(?!.*(?:dim|size))"), re.compile(r"(?=.*(?:dim|size|hidden|inner))")
# Rows and weights of the proof: float32 is off by less, and a wrong slice by about 1.
SLICE_LIMIT = 1e-3
# Of a part, an attribute of it, and how many of that are to a step.
Count = tuple[str, str, int]


@dataclass(frozen=True)
class Candidate:
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
        return NUMBER.sub("*", self.path + ".").rstrip(".")


def prove(module: torch.nn.Module, owner: str, candidate: Candidate, followed: Followed) -> Sequence[Count] | str:
    """The numbers of the part ``owner`` to be mended, each with how many of it are to a step, with which the part cut
    to half of the steps answers as the whole with the rest at zero; or why it does not, whatever is mended."""
    part, kept = module.get_submodule(owner), max(candidate.size // 2, 1)
    start = len(owner) + 1 if owner else 0
    cuts = {(parameter[start:], dim): unit for (parameter, dim), unit in candidate.cuts}
    try:
        drawn, args, kwargs, as_it_is = call(part, owner, followed)
        full = {name: drawn[id(parameter)] for name, parameter in part.named_parameters()}
        own, turned = dict(full), dict(full)
        for (name, dim), unit in cuts.items():
            own[name] = full[name].clone()
            own[name].narrow(dim, kept * unit, (candidate.size - kept) * unit).zero_()
            steps = torch.arange(candidate.size * unit).reshape(candidate.size, unit).flip(0).flatten()
            turned[name] = full[name].index_select(dim, steps)
        whole, ranked = (answers_of(copied(part, drawn, each), args, kwargs) for each in (own, turned))
    except ExportError as failure:
        return f"{type(part).__name__} by itself {failure}"
    if (off := difference(as_it_is, ranked)) > SLICE_LIMIT:  # ranking puts them in another order
        return f"its steps differ by their place: turned around it is another function (off by {off:.2g})"
    views, problem = dict(own), ""
    for (name, dim), unit in cuts.items():
        views[name] = views[name].narrow(dim, 0, kept * unit)
    for mended in _countings(part, candidate):
        narrowed = copied(part, drawn, views)
        mend_sizes(narrowed)
        for name, attribute, unit in mended:
            setattr(narrowed.get_submodule(name), attribute, kept * unit)
        try:
            answers = answers_of(narrowed, args, kwargs)
        except ExportError as failure:
            problem = f"cut to {kept} of {candidate.size}, {type(part).__name__} {failure}"
            continue
        worst = difference(whole, answers)
        if worst <= SLICE_LIMIT:
            return mended
        problem = f"cut to {kept} of {candidate.size} it is another function (off by {worst:.2g})"
    return problem


def _countings(part: torch.nn.Module, candidate: Candidate) -> Iterable[list[Count]]:
    """Numbers that may have to be mended, the least first: nothing, numbers of heads, and widths of all heads too."""
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


def owner_of(module: torch.nn.Module, path: str, followed: Followed) -> str:
    """The innermost part at or around ``path`` that has parts and is called."""
    while path and (path not in followed.calls or not any(module.get_submodule(path).children())):
        path = path.rpartition(".")[0]
    return path


def call(
    part: torch.nn.Module, owner: str, followed: Followed
) -> tuple[dict[int, torch.Tensor], Any, Any, list[torch.Tensor]]:
    """Numbers drawn for the tensors of ``part``, called ``owner``, and for the arguments that it had, and its answers.
    Raises ExportError where it does not run by itself."""
    generator = torch.Generator().manual_seed(0)
    drawn = {id(tensor): _drawn(tensor, generator) for tensor in (*part.parameters(), *part.buffers())}
    for name, buffer in part.named_buffers():
        if name.endswith("running_var"):  # of a norm over the batch, which takes its root
            drawn[id(buffer)] = drawn[id(buffer)].abs()
    full = {name: drawn[id(parameter)] for name, parameter in part.named_parameters()}
    for value in (1, 0):  # a mask is 1 where a token counts, or where it is hidden
        drawing = partial(_drawn, generator=generator, value=value)
        args, kwargs = tree_map_only(torch.Tensor, drawing, followed.calls[owner])
        answers = answers_of(copied(part, drawn, full), args, kwargs)
        if all(bool(torch.isfinite(answer).all()) for answer in answers):
            break
    return drawn, args, kwargs, answers


def copied(
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


def answers_of(part: torch.nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    args, kwargs = copy.deepcopy((args, kwargs))
    with torch.no_grad(), library_errors(lambda said: ExportError(f"fails: {said}")):
        answers = [value for value in tree_iter(part(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    if any(isinstance(value, FakeTensor) for value in answers):
        raise ExportError("keeps tensors of another pass")
    return answers


def difference(whole: Sequence[torch.Tensor], cut: Sequence[torch.Tensor]) -> float:
    """By how much any answer that has one shape in both differs, as a share of its size; infinite where none has."""
    pairs = [(a.double(), b.double()) for a, b in zip(whole, cut, strict=False) if a.shape == b.shape]
    shares = [float((a - b).abs().max() / a.square().mean().sqrt().clamp(min=1e-6)) for a, b in pairs]
    return max(shares, default=float("inf"), key=lambda share: float("inf") if share != share else share)
