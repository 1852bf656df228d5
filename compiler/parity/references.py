"""PyTorch's answers of a universal model's submodels, passed once for all their engines and all stages.

A pass in float64 is the dearest part of the gate, and nothing in it is an engine's own, except where one routes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ...bucket import Bucket
from ...bundle.entries.engine_entry import RoutingEntry, SegmentEntry
from ...elastic import Submodel
from ...exporters.parts import Exits
from ...exporters.universal import UniversalModel
from ...runtime.inputs.arrays import Arrays
from .cases import Case, can_look, parity_cases
from .judge import Replayed
from .reference import Reference, replayed

# Bytes of outputs that are cached between stages; what is more, such as logits of every token of a vocabulary, is
# passed again.
_MOST_BYTES_CACHED = 2**30


# For a large model the most tokens of a case for its narrower widths, and the least, where there are so many, of the
# one that PyTorch always passes in float64: with a single key no head has a part in what attention returns.
_SHORT, _SEVERAL = 8, 4

# The name and the inputs of a case.
_Inputs = tuple[str | tuple[int, ...] | bytes, ...]


class _Passed(NamedTuple):
    """Which pass it was, on which cases, and what it answered."""

    key: Hashable
    cases: Sequence[_Inputs]
    answers: Replayed


class Passes:
    """The latest passes of a model, its numbers rounded or not, as far as their outputs have room."""

    def __init__(self) -> None:
        self._kept: list[_Passed] = []

    def once(self, key: Hashable, cases: Sequence[Case], make: Callable[[], Replayed]) -> Replayed:
        """The pass ``key`` on ``cases``: what ``make`` returns, or part of what it did on these and perhaps more."""
        wanted = [_inputs(case) for case in cases]
        for number, kept in enumerate(self._kept):
            if kept.key == key and all(case in kept.cases for case in wanted):
                self._kept.append(self._kept.pop(number))
                return kept.answers.at([kept.cases.index(case) for case in wanted])
        answers = make()
        self._kept.append(_Passed(key, wanted, answers))
        while sum(_bytes(kept.answers) for kept in self._kept) > _MOST_BYTES_CACHED:
            self._kept.pop(0)
        return answers


class _Pass(NamedTuple):
    """Which pass: with the answer of the last exit, or of ``every_exit`` with the states between them."""

    submodel: Submodel
    bucket: Bucket
    every_exit: bool = False


class References:
    """The references of ``universal``'s submodels on the ``cases`` of each bucket, or where they are not ``of_all`` on
    some of them.

    With ``looks``, as of a large model, PyTorch answers in float64 on a small case, and on others where its float32
    leaves a doubt; engines of narrower widths, whose graph is the universal one's, are asked the short ones.

    Their modules, which have their weights in common, are made one at a time, by ``narrow`` where it is not the model's
    own; what they answered is among ``passes``.
    """

    def __init__(
        self,
        universal: UniversalModel,
        cases: Mapping[Bucket, Sequence[Case]],
        narrow: Callable[[Submodel], torch.nn.Module] | None = None,
        passes: Passes | None = None,
        looks: bool = False,
    ) -> None:
        self.universal, self.cases, self.looks = universal, cases, looks
        self._narrow = narrow
        self._last: tuple[Submodel, Reference] | None = None
        self.of_all = True
        self._passes = passes or Passes()
        self._universal: dict[Bucket, list[Arrays]] = {}

    def of(self, submodel: Submodel) -> Reference:
        """The module of ``submodel``, which is the same in every precision."""
        key = self._in_torch(submodel)
        if self._last is None or self._last[0] != key:
            source, module = self.universal.source, (self._narrow or self.universal.narrow)(submodel)
            if source.tasks is not None and source.tasks.reference is not None:
                module = source.tasks.reference(module)
            self._last = key, Reference(source.architecture.routing, module, source.signature.outputs)
        return self._last[1]

    def asked(self, submodel: Submodel, bucket: Bucket) -> Sequence[Case]:
        """The cases on which an engine of ``submodel`` is proven at ``bucket``."""
        cases = self.cases[bucket]
        if not self.looks or self._in_torch(submodel).has_all_widths:
            return cases
        (exact,) = smallest(cases)
        return [case for number, case in enumerate(cases) if case.tokens <= _SHORT or number == exact]

    def replayed(
        self,
        submodel: Submodel,
        bucket: Bucket,
        routes: Sequence[RoutingEntry] | None = None,
        found: Sequence[Arrays] = (),
        atol: float = 0.0,
    ) -> Replayed:
        """``submodel`` on the cases of ``bucket``, with the ``routes`` that an engine took; see ``reference.replayed``.

        Without routes no engine plays a part, and later calls get what the first one found.
        """
        if routes:
            return replayed(self.of(submodel), self.asked(submodel, bucket), routes, found, atol)
        return self._once(_Pass(self._in_torch(submodel), bucket))

    def universal_outputs(self, bucket: Bucket) -> list[Arrays]:
        """The universal model's answers on the cases of ``bucket``, rounded to float32: every submodel's outputs are
        compared with it, so that it is always cached."""
        if bucket not in self._universal:
            exact = self.replayed(self.universal.spec.universal(), bucket).outputs
            self._universal[bucket] = [_float32(arrays) for arrays in exact]
        return self._universal[bucket]

    def by_segment(self, submodel: Submodel, bucket: Bucket) -> list[Replayed]:
        """Per segment of ``submodel`` what an uncut pass has there on the cases of ``bucket``; the pass is that of its
        widths with every layer, whose first segments are those of shorter ones."""
        exits = self.universal.source.exits
        assert exits is not None
        assert submodel.depth is not None
        whole = self._once(_Pass(self._in_torch(submodel.deepest), bucket, every_exit=True))
        return split(exits, whole, submodel.depth)

    def of_texts(self, submodel: Submodel, texts: Sequence[Case], view: Callable[[Reference], Reference]) -> Replayed:
        """``submodel`` on whole ``texts``, by the ``view`` of its reference that returns what its layers keep too."""
        key = self._in_torch(submodel)
        return self._made((self._narrow, key), texts, lambda: view(self.of(key)))

    def narrowed_by(self, universal: UniversalModel, narrow: Callable[[Submodel], torch.nn.Module]) -> References:
        """Those of the same model with other numbers, on the same cases."""
        return References(universal, self.cases, narrow, self._passes, self.looks)

    def on(self, some: Callable[[Sequence[Case]], Sequence[int]]) -> References:
        """The same on ``some`` of the cases of each bucket, by number; what was passed is not passed again."""
        cases = {bucket: [cases[number] for number in some(cases)] for bucket, cases in self.cases.items()}
        fewer = References(self.universal, cases, self._narrow, self._passes, self.looks)
        fewer.of_all = False
        fewer._last, self._last = self._last, None
        return fewer

    def _once(self, key: _Pass) -> Replayed:
        return self._made((self._narrow, key), self.asked(key.submodel, key.bucket), partial(self._reference, key))

    def _made(self, key: Hashable, cases: Sequence[Case], made: Callable[[], Reference]) -> Replayed:
        in_float32 = set[str]()
        if self.looks:
            (exact,) = smallest(cases)
            in_float32 = {case.name for number, case in enumerate(cases) if number != exact}
        return self._passes.once(key, cases, lambda: replayed(made(), cases, remade=made, in_float32=in_float32))

    def _reference(self, key: _Pass) -> Reference:
        whole, exits = self.of(key.submodel), self.universal.source.exits
        if not key.every_exit or exits is None:
            return whole
        return every_exit(exits, whole, exits.entry.segments[-1].layer)

    def _in_torch(self, submodel: Submodel) -> Submodel:
        return replace(submodel, precision=None)


def references_at(universal: UniversalModel, buckets: Iterable[Bucket], runs_graphs: bool = True) -> References:
    """The references of ``universal`` at ``buckets``, on the cases by which its engines are proven; those of a large
    model look where the back end of the engines ``runs_graphs``."""
    source = universal.source
    signature, encoder, is_large = source.signature, source.encoder, source.is_large
    cases = {bucket: parity_cases(signature, bucket, encoder, is_large) for bucket in sorted(buckets)}
    return References(universal, cases, looks=runs_graphs and can_look(source))


def _inputs(case: Case) -> _Inputs:
    return (case.name, *(part for array in case.feeds.values() for part in (array.shape, array.tobytes())))


def smallest(cases: Sequence[Case]) -> list[int]:
    """The number of the smallest case of several tokens, or of the largest one."""
    sizes = [case.tokens for case in cases]
    several = [size for size in sizes if size >= _SEVERAL]
    return [sizes.index(min(several) if several else max(sizes))]


def _float32(arrays: Arrays) -> Arrays:
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _bytes(passed: Replayed) -> int:
    return sum(array.nbytes for arrays in passed.outputs for array in arrays.values())


def every_exit(exits: Exits, reference: Reference, depth: int) -> Reference:
    """One pass of ``reference``, of a submodel of ``depth`` layers, with the outputs of all its segments."""
    specs = [
        replace(spec, name=_name(segment, spec.name)) for segment in _segments(exits, depth) for spec in segment.outputs
    ]
    return reference.viewed(exits.every_exit, specs)


def split(exits: Exits, whole: Replayed, depth: int) -> list[Replayed]:
    """Per segment of a submodel of ``depth`` layers, its part of a pass that has these segments and perhaps more."""
    return [
        whole.of({_name(segment, spec.name): spec.name for spec in segment.outputs})
        for segment in _segments(exits, depth)
    ]


def _segments(exits: Exits, depth: int) -> list[SegmentEntry]:
    return [segment for segment in exits.entry.segments if segment.layer <= depth]


def _name(segment: SegmentEntry, output: str) -> str:
    return f"{segment.name} {output}"
