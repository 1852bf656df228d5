"""Stops a build whose engine breaks the rule, and says where it leaves PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bundle.entries.engine_entry import RoutingEntry
from ...errors import ParityError
from ...runtime.inputs.arrays import Arrays
from .divergence import NOWHERE, first_divergence
from .evidence.cases import Case
from .evidence.compare import Tolerance
from .evidence.reference import Reference
from .evidence.replayed import BrokenRoute
from .judge import JudgedOutputs, Verdict


@dataclass(frozen=True)
class ProofRun:
    """What was run, and what it was compared with.

    ``graph`` ran in ONNX Runtime, its weight store lies in ``folder``, and its value ``modules[name]`` is what the
    module ``name`` of ``reference`` returns. ``routes`` are the ones that the engine returns, beside ``outputs``.
    """

    graph: bytes
    modules: Mapping[str, str]
    folder: Path
    reference: Reference
    routes: Sequence[RoutingEntry] | None
    outputs: JudgedOutputs


def require_parity(
    subject: str,
    verdict: Verdict,
    run: ProofRun,
    cases: Sequence[Case],
    found: Sequence[Arrays],
    limit: Tolerance,
    rule: str,
) -> None:
    """Raises ParityError where the ``verdict`` on the outputs ``found`` is broken, naming the first module that
    diverges, or why nothing can be proved. ``rule`` states ``limit`` in words."""
    broken = verdict.broken
    if broken is None:
        return
    if verdict.unprovable:
        raise ParityError(f"{subject}: {broken.describe()}")
    case, arrays = next(pair for pair in zip(cases, found, strict=True) if pair[0].name == broken.failed_case)
    bound = run.reference.bound(case.feeds, run.routes, arrays)
    mask = run.outputs.mask_of(case)
    where = first_divergence(run.graph, run.modules, run.reference, case, limit, run.folder, bound, mask)
    if where == NOWHERE and isinstance(broken, BrokenRoute):
        where = "no module; the route alone is wrong"
    raise ParityError(f"{subject}: {broken.describe()}; allowed {rule}; first to diverge: {where}")
