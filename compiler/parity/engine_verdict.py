"""The verdict on one engine, asked alike when it is built and when a written bundle is verified; where a build's engine
breaks the rule, it stops, and the first module that leaves PyTorch is named, by the values inside of the model and of
the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from safetensors import safe_open

from ...bundle.entries.engine_entry import EngineEntry, ParityOutput, ParityReceipt, ParityRouting
from ...bundle.files import weights_in
from ...bundle.manifest import Manifest
from ...bundle.roles import has_decoder
from ...errors import ParityError
from ...exporters.torch_internals import tree_flatten, tree_unflatten
from ...exporters.universal import PREFIX, UniversalModel
from ...profiles.backends import BACKENDS
from ...runtime.inputs.arrays import Arrays
from .cases import Case
from .compare import Comparison, Tolerance, counted, rounding, tolerance_for, within
from .judge import BrokenRoute, JudgedOutputs, Replayed, Verdict, judge
from .reading import in_float64
from .reference import Reference

_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)")
Seen = Callable[[str, str, torch.Tensor], torch.Tensor | None]


@contextmanager
def watched(module: torch.nn.Module, seen: Seen) -> Iterator[None]:
    """Within it ``seen`` is given the first float tensor that goes ``in`` and that comes ``out`` of every submodule,
    by its path, and may return another in its place."""

    def shown(path: str, side: str, value: Any) -> Any:
        leaves, form = tree_flatten(value)
        floats = (n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        place = next(floats, None)
        if place is None or (other := seen(path, side, leaves[place])) is None:
            return None
        return tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], form)

    with ExitStack() as undo:
        for path, part in module.named_modules():
            if path:
                before = lambda _m, args, named, path=path: shown(path, "in", (args, named))  # noqa: E731
                undo.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                undo.callback(part.register_forward_hook(lambda _m, _i, out, path=path: shown(path, "out", out)).remove)
        yield


def open_graph(graph: onnx.ModelProto, folder: Path, library: Path | None = None) -> onnxruntime.InferenceSession:
    """ONNX Runtime on the processor, whose weights stay in the files of ``folder`` where they lie; ``library`` has
    operators of its own."""
    return _opened(graph, folder, library, onnxruntime.SessionOptions())


def open_values(
    graph: onnx.ModelProto, names: list[str], folder: Path, library: Path | None = None
) -> tuple[onnxruntime.InferenceSession, list[str]]:
    """The same computing ``graph`` as it is written, no value fused away, and those of its values ``names`` that are
    floats, which the session returns."""
    shown = onnx.ModelProto()
    shown.CopyFrom(graph)
    del shown.graph.output[:]
    for name in names:
        shown.graph.output.add(name=name)  # its type is inferred, behind any operator
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = _opened(shown, folder, library, options)
    return session, [value.name for value in session.get_outputs() if value.type in _FLOATS]


def _opened(graph: onnx.ModelProto, folder: Path, library: Path | None, options: Any) -> onnxruntime.InferenceSession:
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.add_session_config_entry("session.disable_prepacking", "1")  # which copies weights
    if library is not None:
        options.register_custom_ops_library(str(library))
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=providers, enable_fallback=0)


NOWHERE = "no module alone breaks the rule; rounding grows over the whole depth"


@dataclass(frozen=True)
class EngineVerdict:
    """Parity of one engine through the runtime; ``problem`` says which routes or output, and which case, broke the
    rule."""

    engine: str
    outputs: tuple[ParityOutput, ...]
    problem: str | None = None
    routing: tuple[ParityRouting, ...] | None = None

    @staticmethod
    def of(engine: EngineEntry, verdict: Verdict) -> EngineVerdict:
        problem = verdict.broken.describe() if verdict.broken is not None else None
        return EngineVerdict(engine.id, verdict.outputs, problem, verdict.routes)


def judge_engine(
    manifest: Manifest,
    universal: UniversalModel,
    engine: EngineEntry,
    cases: Sequence[Case],
    reference: Replayed,
    found: Sequence[Arrays],
) -> Verdict:
    """The outputs ``found`` on ``cases`` against PyTorch's, by the rule and the tolerance of the gate."""
    outputs = judged_outputs(manifest, universal, engine)
    return judge(reference, found, cases, outputs, tolerance_of(engine, universal))


def judged_outputs(manifest: Manifest, universal: UniversalModel, engine: EngineEntry) -> JudgedOutputs:
    """The outputs of ``engine``, and what is known of them."""
    computed = manifest.exits.computed_from if manifest.exits else ()
    mask = universal.source.signature.mask
    return JudgedOutputs(manifest.interface_of(engine)[1], computed, mask, has_decoder(manifest))


def receipt_of(
    verdict: Verdict,
    limit: Tolerance,
    cases: Sequence[Case],
    *,
    reference: str,
    rule: str,
    graph_sha256: str,
    weights_sha256: str,
) -> ParityReceipt:
    """The receipt of a ``verdict`` that nothing broke; ``reference`` says which PyTorch module."""
    if verdict.in_float32:
        rule = f"{rule}; {len(verdict.in_float32)} of {len(cases)} cases within half of it of PyTorch's own float32"
    return ParityReceipt(
        reference=f"PyTorch {torch.__version__} module {reference}",
        rule=rule,
        atol=limit.atol,
        rtol=limit.rtol,
        min_cosine=limit.min_cosine,
        cases=tuple(case.name for case in cases),
        outputs=verdict.outputs,
        graph_sha256=graph_sha256,
        weights_sha256=weights_sha256,
        routing=verdict.routes,
        rms=limit.rms,
    )


def tolerance_of(engine: EngineEntry, universal: UniversalModel) -> Tolerance:
    """The limits of the gate for ``engine``."""
    return tolerance_for(engine.precision, universal.spec.depth)


@dataclass(frozen=True)
class ProofRun:
    """A ``graph`` that runs in ONNX Runtime: its weight store lies in ``folder``, its value ``modules[name]`` is what
    PyTorch's module ``name`` returns (``Template.module_outputs``)."""

    graph: bytes
    modules: Mapping[str, str]
    folder: Path


def require(subject: str, verdict: Verdict, rule: str, diverges: Callable[[str], str]) -> None:
    """Raises ParityError where the ``verdict`` is broken, with the module that ``diverges`` first in the case so named,
    or why nothing can be proved. ``rule`` states the limits in words."""
    broken = verdict.broken
    if broken is None:
        return
    said = f"{subject}: {broken.describe()}"
    if not verdict.unprovable:
        said += f"; allowed {rule}; first to diverge: {diverges(broken.failed_case or '')}"
    raise ParityError(said)


def require_parity(
    subject: str,
    verdict: Verdict,
    run: ProofRun,
    reference: Reference,
    engine: EngineEntry,
    outputs: JudgedOutputs,
    cases: Sequence[Case],
    found: Sequence[Arrays],
    limit: Tolerance,
    rule: str,
) -> None:
    """``require``, of the ``verdict`` on what was ``found`` on ``cases``: ``outputs`` of ``engine`` and its routes."""

    def diverges(failed: str) -> str:
        case, arrays = next(pair for pair in zip(cases, found, strict=True) if pair[0].name == failed)
        mask = outputs.mask_of(case)
        if mask is None and case.in_text is not None:
            mask = case.in_text[: case.rows]
        bound = partial(reference.run, case.feeds, engine.routing, arrays)
        where = first_divergence(run, reference, case, limit, bound, mask)
        if where == NOWHERE and isinstance(verdict.broken, BrokenRoute):
            return "no module; the route alone is wrong"
        if where == NOWHERE and isinstance(verdict.broken, Comparison) and verdict.broken.incomparable is not None:
            return "no module; the output alone is"
        backend = BACKENDS[engine.backend]
        if where == NOWHERE and backend.judged_by_itself:
            return f"no module in ONNX Runtime; the difference is of {backend.title}"
        return where

    require(subject, verdict, rule, diverges)


def first_divergence(
    run: ProofRun,
    reference: Reference,
    case: Case,
    limit: Tolerance,
    passed: Callable[[], object],
    mask: np.ndarray | None = None,
) -> str:
    """``encoder.layer.3.output.dense (max abs 0.31)``: the first module, in graph order, whose output breaks the rule.

    ``passed`` makes a pass of ``reference`` on ``case`` (``Reference.run``). Values of positions ``[B, S, ...]`` are
    compared where ``mask`` ``[B, S]`` counts them. NOWHERE if none does.
    """
    batch = max(len(array) for array in case.feeds.values())
    with in_float64(reference.module):
        expected = _module_values(reference.module, passed)
    float32 = _module_values(reference.module, passed)
    for name, value in _graph_values(run, case.feeds).items():
        if name not in expected or expected[name].size != value.size:
            continue
        values = [expected[name], float32[name], value.reshape(expected[name].shape)]
        if case.rows is not None and len(values[0]) == batch:
            values = [array[: case.rows] for array in values]  # nobody reads what follows
        if mask is not None and values[0].shape[:2] == mask.shape:
            values = [counted(array, mask) for array in values]
        exact, own, found = values
        # One pass may be lucky at a place, and no other is made here: what float32 is off by anywhere counts.
        if not within(exact, found, limit, rounding(exact, own).of_all, least_scale=1.0):
            return f"{name} (max abs {float(np.abs(exact - found).max()):.3g})"
    return NOWHERE


def _module_values(module: torch.nn.Module, run: Callable[[], object]) -> dict[str, np.ndarray]:
    """The first float output of every submodule."""
    values: dict[str, np.ndarray] = {}

    def keep(path: str, side: str, tensor: torch.Tensor) -> None:
        if side == "out":
            values[path.removeprefix(PREFIX)] = tensor.detach().numpy().copy()

    with watched(module, keep):
        run()
    return values


def _of_base(inputs: Sequence[Any], folder: Path) -> dict[str, np.ndarray]:
    """Inputs that a task has its own of: the base's, from the weight store."""
    rows, found = {value.name: value.shape[0] for value in inputs}, dict[str, np.ndarray]()
    for path in weights_in(folder) if rows else ():
        with safe_open(path, framework="np") as file:
            found |= {name: file.get_tensor(name)[: rows[name]] for name in rows.keys() & file.keys()}
    return found


def _graph_values(run: ProofRun, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The value of every module that the graph still has, in the order in which the graph computes them."""
    named: dict[str, list[str]] = {}
    for module, value in run.modules.items():
        named.setdefault(value, []).append(module)
    model = onnx.ModelProto.FromString(run.graph)
    made = [name for node in model.graph.node for name in node.output if name in named]
    session, wanted = open_values(model, made, run.folder)
    own = [value for value in session.get_inputs() if value.name not in feeds]
    arrays = session.run(wanted, {**feeds, **_of_base(own, run.folder)})
    # Where several modules return the same value, the innermost (longest) name says most.
    return {max(named[name], key=len): array for name, array in zip(wanted, arrays, strict=True)}
