"""What a model decides on the way by comparing scores, such as which expert computes a token (decision record 0011).

Where two scores nearly tie, an engine may choose otherwise than PyTorch and be right. Engines therefore return their
routes, and the PyTorch submodel is made to take them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bucket import Bucket
from ..bundle.entries.engine_entry import RoutingEntry
from ..elastic import Submodel

if TYPE_CHECKING:  # plans are made without torch
    import torch


@dataclass(frozen=True)
class JudgedRoutes:
    """The routes of one tensor that a pass was made to take, judged by the scores that the pass had where it took them.

    ``score_gap``: by how much the worst of its ``made`` single choices is worse than the pass's own, in units of the
    score; 0 where equal, infinite where no score explains it. ``where`` names that choice. ``differing`` of them are
    not the pass's own. ``shares`` are figures such as ``tokens_dropped``.
    """

    score_gap: float
    where: str
    made: int
    differing: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Replay:
    """One pass of a model that was made to take given routes, each tensor of them judged, by name."""

    outputs: tuple[torch.Tensor, ...]
    routes: Mapping[str, JudgedRoutes]


class Routing(ABC):
    """The routes of one model. Its traced module (``Architecture.lower``) returns them after its outputs, in order."""

    @abstractmethod
    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """Names and shapes of the routes (int64) that an engine returns."""

    @abstractmethod
    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        """Static numbers and rules of an engine that no shape of it shows, for the manifest."""

    @abstractmethod
    def orders(self, name: str) -> Mapping[int, str]:
        """The dimensions of the routes ``name`` that count steps which may be permuted, each with the name of its order
        (``ElasticSpec.orders``)."""

    @abstractmethod
    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        """A pass of ``module`` (what ``Architecture.load`` returned, perhaps narrowed) with the routes ``given``, by
        name, in place of its own.

        Raises ParityError naming routes that no model of these shapes can take, such as a token out of range.
        """
