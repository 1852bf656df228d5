"""One engine: emitted from its template, run through the runtime, compared with the PyTorch submodel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from ...elastic import Bucket, Submodel
from ...errors import BuildError, ParityError
from ...exporters.universal import UniversalModel
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import INTEGERS
from ...runtime.bundle.manifest import EngineEntry, ParityReceipt
from ...runtime.bundle.open_bundle import Bundle
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.engines.runner import Residency, runner_for
from ...runtime.inputs.arrays import Arrays
from ...strict import structure, unstructure
from ..graph.precision.derive import wide_products
from ..graph.precision.emulation import emulated
from ..graph.precision.proof_graphs import proof_file
from ..graph.store import Store
from ..graph.template import Template, emit, private_bytes, weight_bytes
from ..parity.cases import Case
from ..parity.compare import Comparison, Tolerance, max_difference, tolerance_for
from ..parity.divergence import NOWHERE, first_divergence
from ..parity.judge import Interface, judge
from ..parity.reference import BrokenDecision, Reference, References, Replayed, replayed, rule_of
from ..planning.cost_model import predict
from ..planning.variants import chosen_variants, variant_workload
from ..tensorrt.graphs import accepted
from ..work.staging import Stage, write_synced
from .emitted import Emitted
from .prove_exact import ExactProof
from .templates import Templates

_MAX_STEM_LENGTH = 120
# Weights that a fact names.
_MAX_NAMED_WEIGHTS = 4


@dataclass(frozen=True)
class EngineBuilder:
    """Builds verified engines of one universal model for one profile; ``draft`` is the bundle that they go into."""

    universal: UniversalModel
    profile: DeviceProfile
    templates: Templates
    store: Store
    weights_sha256: str
    cases: Mapping[Bucket, Sequence[Case]]
    universal_outputs: Mapping[Bucket, Sequence[Arrays]]
    stage: Stage
    draft: Bundle

    def build(self, submodel: Submodel, bucket: Bucket) -> EngineEntry:
        """The engine of ``submodel`` at ``bucket``, with its parity receipt; done work of an earlier run is kept.

        Raises ParityError naming the first module that diverges.
        """
        name, stem = f"{submodel.id}@{bucket.label}", f"{short(submodel.id)}.{bucket.label}"
        receipt = f"{stem}.json"
        self.forget_unless(receipt, [f"{stem}.onnx"])
        data = self.stage.once_json(receipt, lambda: unstructure(self._build(name, f"{stem}.onnx", submodel, bucket)))
        return structure(EngineEntry, data, name, ParityError)

    def forget_unless(self, receipt: str, files: Sequence[str]) -> None:
        """Forgets a receipt whose engines are gone: the manifest's stage removes those that it leaves out."""
        if not all((self.stage.folder / file).exists() for file in files):
            (self.stage.work / receipt).unlink(missing_ok=True)

    def tolerance(self, engine: EngineEntry) -> Tolerance:
        """The limits of the gate for ``engine``."""
        return tolerance_for(engine.precision, self.universal.spec.depth)

    @cached_property
    def references(self) -> References:
        """What engines must equal, one submodel at a time."""
        return References(self.universal)

    @cached_property
    def prove_exact(self) -> ExactProof:
        """The tight half of the gate of integer engines."""
        return ExactProof(self.universal, self.stage.folder, self.run)

    def interface(self, segment: str | None) -> Interface:
        """What the gate knows of the outputs of engines of ``segment``, or of whole engines for None."""
        exits, specs = self.universal.source.exits, self.draft.manifest.interface(segment)[1]
        return Interface(specs, exits.entry.computed_from if exits else (), self.universal.source.signature.mask)

    def emit(self, name: str, file: str, submodel: Submodel, bucket: Bucket, segment: int | None = None) -> Emitted:
        """Writes the engine of ``submodel``, or of one segment of it: sliced from its template, or traced."""
        template = self.templates.of(submodel, bucket, segment)
        problem, emitted = template.slice_problem, "sliced"
        if problem and any(value < axis.size for axis, value in submodel.values if axis.choices is None):
            if template.precision in INTEGERS:
                raise BuildError(
                    f"engine {name}: {template.precision} is for models that are sliced as graphs, and this one is not "
                    f"({problem}); choose fp32, fp16 or bf16"
                )
            template, emitted = self.templates.traced(submodel, bucket, segment), "traced"
        graph = emit(template, self.store, submodel)
        if self.profile.backend == "tensorrt":
            graph = accepted(f"engine {name}", graph)
        write_synced(self.stage.folder / file, graph)
        source, exits = self.universal.source, self.universal.source.exits
        if segment is None or exits is None:
            ops, part = variant_workload(source, submodel, bucket, self.profile), None
        else:
            ops, part = exits.workload(submodel, bucket, segment), exits.entry.segments[segment].name
        is_counted = part is not None or bool(template.tables) or template.precision != "fp32"
        cost = predict(ops, self.profile, template.precision)
        family, checkpoint, whole = source.family, source.checkpoint, segment is None
        kind: Literal["sliced", "traced"] = "traced" if emitted == "traced" else "sliced"
        entry = EngineEntry(
            id=name,
            submodel=submodel.id,
            bucket=bucket,
            backend="onnxruntime",  # whatever the profile's is: what is proven here is the graph
            file=file,
            emitted=kind,
            private_bytes=private_bytes(template, self.store),
            flops=cost.flops,
            moved_bytes=cost.moved_bytes,
            activation_bytes=cost.activation_bytes,
            slice_problem=problem if emitted == "traced" else None,
            segment=part,
            weight_bytes=weight_bytes(template, self.store, submodel) if is_counted else None,
            decisions=(family.decisions(checkpoint, submodel, bucket) or None) if whole else None,
            facts=({**family.facts(checkpoint, submodel, bucket), **_wide(template)} or None) if whole else None,
            forms=(chosen_variants(source, submodel, bucket, self.profile) or None) if whole else None,
            precision=template.precision,
        )
        return Emitted(entry, template, hashlib.sha256(graph).hexdigest())

    def proof_engine(self, engine: EngineEntry) -> EngineEntry:
        """``engine`` as this host runs it while it is proven; an emulation is made where it is missing."""
        here = replace(engine, file=proof_file(engine))
        path = self.stage.folder / here.file
        self.stage.once(path, lambda path: write_synced(path, emulated((self.stage.folder / engine.file).read_bytes())))
        return here

    def proven(
        self,
        engine: Emitted,
        module: Reference,
        cases: Sequence[Case],
        reference: Replayed,
        found: Sequence[Arrays],
        submodel: Submodel,
    ) -> EngineEntry:
        """The engine with its receipt. ``module`` is that of the PyTorch module which takes the ``cases``.

        Raises ParityError if ``found`` breaks the rule, naming the first module that diverges, or if PyTorch's own
        float32 is too far from its float64 to prove anything by.
        """
        names, limit = [case.name for case in cases], self.tolerance(engine.entry)
        rule = rule_of(limit, engine.entry.decisions)
        if engine.entry.precision in INTEGERS:
            exact = self.prove_exact(engine, submodel, cases, self.interface(engine.entry.segment))
            rule = f"{rule}; without the rounding of activations, {exact}"
        precision, interface = engine.entry.precision, self.interface(engine.entry.segment)
        judgement = judge(reference, found, cases, interface, precision, limit)
        broken = judgement.broken
        if broken is not None and judgement.unprovable:
            raise ParityError(f"engine {engine.entry.id}: {broken.describe()}")
        if broken is not None:
            case, arrays = next(pair for pair in zip(cases, found, strict=True) if pair[0].name == broken.failed_case)
            raise self._diverged(engine, broken, module, case, arrays)
        receipt = ParityReceipt(
            reference=f"PyTorch {torch.__version__} module narrowed to {submodel.id}, in float64",
            rule=rule,
            atol=limit.atol,
            rtol=limit.rtol,
            min_cosine=limit.min_cosine,
            cases=tuple(names),
            outputs=judgement.outputs,
            graph_sha256=engine.graph_sha256,
            weights_sha256=self.weights_sha256,
            decisions=judgement.decisions,
            rms=limit.rms,
        )
        return replace(engine.entry, parity=receipt)

    def run(self, engine: EngineEntry, feeds: Sequence[Arrays]) -> list[Arrays]:
        """Outputs and decisions of an engine by name, one mapping per set of inputs; shared, as the gate wants it (see
        verify.py), where that is the same computation."""
        names = [spec.name for spec in self.draft.manifest.interface(engine.segment)[1]]
        names += [entry.name for entry in engine.decisions or ()]
        residency: Residency = "packed" if engine.precision == "int4" else "shared"
        with runner_for(self.draft, self.proof_engine(engine), residency, threads_or_default(None)) as runner:
            return [dict(zip(names, runner.run(arrays, decisions=True), strict=True)) for arrays in feeds]

    def _build(self, name: str, file: str, submodel: Submodel, bucket: Bucket) -> EngineEntry:
        engine = self.emit(name, file, submodel, bucket)
        module, cases = self.references.of(submodel), self.cases[bucket]
        found = self.run(engine.entry, [case.feeds for case in cases])
        reference = self._replayed(engine.entry, module, cases, found)
        entry = self.proven(engine, module, cases, reference, found, submodel)
        if submodel.is_universal or entry.parity is None:
            return entry
        whole = self.universal_outputs.get(bucket)
        if whole is None:  # another sequence: the universal model has no outputs there
            return entry
        equal = max_difference(whole, [_float32(arrays) for arrays in reference.outputs]) == 0.0
        if equal and self._must_differ(submodel) and not self._cuts_only_zeros(submodel):
            raise ParityError(f"engine {name}: returns the universal model's outputs; the slice has no effect")
        outputs = [case.read(arrays, module.specs) for case, arrays in zip(cases, found, strict=True)]
        return replace(entry, parity=replace(entry.parity, difference_to_universal=max_difference(whole, outputs)))

    def _replayed(
        self, engine: EngineEntry, module: Reference, cases: Sequence[Case], found: Sequence[Arrays]
    ) -> Replayed:
        try:
            return replayed(module, cases, engine.decisions, found, self.tolerance(engine).atol)
        except ParityError as failure:
            raise ParityError(f"engine {engine.id}: {failure}") from failure

    def _diverged(
        self,
        engine: Emitted,
        broken: Comparison | BrokenDecision,
        module: Reference,
        case: Case,
        found: Arrays,
    ) -> ParityError:
        limit = self.tolerance(engine.entry)
        rule = rule_of(limit, engine.entry.decisions)
        run = module.bound(case.feeds, engine.entry.decisions, found)
        modules = engine.template.module_outputs
        graph = (self.stage.folder / self.proof_engine(engine.entry).file).read_bytes()
        where = first_divergence(graph, modules, module, case, limit, self.stage.folder, run)
        if where == NOWHERE and isinstance(broken, BrokenDecision):
            where = "no module; the decision alone is wrong"
        return ParityError(f"engine {engine.entry.id}: {broken.describe()}; allowed {rule}; first to diverge: {where}")

    def _must_differ(self, submodel: Submodel) -> bool:
        """Whether ``submodel`` leaves parameters out; a smaller token group may still hold every token of a bucket."""
        source = self.universal.source
        prefix = any(value < axis.size for axis, value in submodel.values if axis.choices is None)
        return prefix or source.parameters(submodel) < source.parameters(source.spec.universal())

    def _cuts_only_zeros(self, submodel: Submodel) -> bool:
        """Whether equal outputs are right: of a pruned model a slice may cut nothing but zeros."""
        parameters, kept = self.universal.parameters(), {a.name: n for a, n in submodel.values if n < a.size}
        orders = [order for order in self.universal.spec.orders if order.axis.name in kept]
        # What reads the steps says what is left of them; stacked steps are read by none but themselves.
        cuts = [c for order in orders for c in ([c for c in order.slices if c.dim == 1] or order.slices)]
        rest = (parameters[c.parameter].movedim(c.dim, 0)[kept[c.axis] * c.unit :] for c in cuts)
        return bool(cuts) and not any(bool(weights.any()) for weights in rest)


def _float32(arrays: Arrays) -> Arrays:
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _wide(template: Template) -> dict[str, str]:
    """Which products of a template in another precision stay in float32, as a fact about its engines."""
    names = wide_products(template) if template.precision != "fp32" else ()
    if not names:
        return {}
    more = f" and {len(names) - _MAX_NAMED_WEIGHTS} more" if len(names) > _MAX_NAMED_WEIGHTS else ""
    return {"products in fp32": f"{', '.join(names[:_MAX_NAMED_WEIGHTS])}{more}"}


def short(submodel_id: str) -> str:
    """The id as part of a file name: ids with many different widths would not fit one."""
    if len(submodel_id) <= _MAX_STEM_LENGTH:
        return submodel_id
    return f"{submodel_id[:_MAX_STEM_LENGTH]}-{hashlib.sha256(submodel_id.encode()).hexdigest()[:8]}"
