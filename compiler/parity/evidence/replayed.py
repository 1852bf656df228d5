"""What engines are held against, however it was computed (no torch here: a plan is held against its graph)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ....bundle.entries.engine_entry import ParityRouting
from ....runtime.inputs.arrays import Arrays
from .rounding import Roundings


@dataclass(frozen=True)
class BrokenRoute:
    """A route that is further from PyTorch's own than the rule allows; ``where`` says which and by how much.

    ``unprovable`` where PyTorch's own float32 moves such score gaps by more than any allowance should be.
    """

    failed_case: str
    where: str
    unprovable: bool = False

    def describe(self) -> str:
        return self.where


@dataclass(frozen=True)
class Replayed:
    """The reference on every case with an engine's routes: its outputs by name (float64 of a PyTorch module), what
    PyTorch's own float32 is off by, and what it says of the routes. ``again`` is the same after one more pass of
    float32 on the cases of these names, None after the last. ``broken`` is the first of the routes that are, in
    ``broken_cases``."""

    outputs: Sequence[Arrays]
    roundings: Sequence[Roundings]
    routes: tuple[ParityRouting, ...] | None = None
    broken: BrokenRoute | None = None
    again: Callable[[Collection[str]], Replayed] | None = None
    broken_cases: frozenset[str] = frozenset()

    def after_passes(self, cases: Collection[str], most: int) -> Replayed:
        """With at most so many of the passes of float32 that ``again`` offers on ``cases``."""
        found = self
        for _ in range(most):
            if found.again is None:
                break
            found = found.again(cases)
        return found

    def at(self, cases: Sequence[int]) -> Replayed:
        """On the cases of these numbers alone, where engines take no routes."""
        more = self.again
        return replace(
            self,
            outputs=[self.outputs[number] for number in cases],
            roundings=[self.roundings[number] for number in cases],
            again=None if more is None else lambda only: more(only).at(cases),
        )

    def of(self, names: Mapping[str, str]) -> Replayed:
        """With the outputs ``names`` alone, each under the name that it is mapped to."""
        more = self.again
        return replace(
            self,
            outputs=[{new: arrays[name] for name, new in names.items()} for arrays in self.outputs],
            roundings=[{new: own[name] for name, new in names.items()} for own in self.roundings],
            again=None if more is None else lambda cases: more(cases).of(names),
        )
