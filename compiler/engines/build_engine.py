"""One engine: emitted from its template, run through the runtime, compared with the PyTorch submodel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from typing import Literal

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import Decode, Encoder, EngineEntry, EngineKind, Segment, Whole
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import BuildError, ParityError
from ...exporters.source import ModelSource
from ...exporters.universal import UniversalModel
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import FOUR_BITS, PRECISIONS, TRACED, Precision
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.residency import Residency
from ...runtime.engines.runner import Runner, runner_for
from ...runtime.inputs.arrays import Arrays
from ...workload import Op
from ..graph.precision.derive import products_in_8_bits, wide_products
from ..graph.precision.proof_graphs import in_onnx_runtime, link_shared_files, proof_graph, with_proof_graphs
from ..graph.store import Store
from ..graph.stored_numbers import StoredNumbers
from ..graph.template import Emitted, Template, emit, engine_names, private_bytes, weight_bytes, without_pairs
from ..parity.cases import Case, unjudged
from ..parity.compare import max_difference
from ..parity.engine_verdict import ProofRun, judge_engine, judged_outputs, receipt_of, require_parity, tolerance_of
from ..parity.judge import Replayed, Verdict, distance
from ..parity.reference import Reference, replayed, rule_of
from ..parity.references import References
from ..planning.candidate import chosen_variants
from ..planning.cost_model import predict
from ..work.release_memory import release_arena
from ..work.staging import Stage, link, write_synced
from ..work.tensor_file import release_pages
from .engine_references import EngineReferences, ExactProof
from .templates import Templates

_PROOF_FOLDER = "proof"
# Weights that the metadata of an engine names.
_MAX_NAMED_WEIGHTS = 8


@dataclass(frozen=True)
class EngineBuilder:
    """Builds verified engines of the model of ``references`` for one profile, into the bundle ``bundle``."""

    references: References
    profile: DeviceProfile
    templates: Templates
    store: Store
    stage: Stage
    bundle: Bundle

    @property
    def source(self) -> ModelSource:
        """Facts of the model, with the cost of a pass of these engines."""
        return self.universal.source

    def named(self, submodel: Submodel, part: str | None, bucket: Bucket) -> tuple[str, str]:
        """Id and files' stem of the engine of ``submodel`` at ``bucket``, or of a ``part`` of it; see engine_names."""
        return engine_names(submodel, () if part is None else (part,), bucket)

    def emitted_of(self, template: Template) -> Template:
        """The template that is emitted in the place of ``template``."""
        return template

    def build(self, submodel: Submodel, bucket: Bucket) -> EngineEntry:
        """The engine of ``submodel`` at ``bucket``, with its parity receipt; done work of an earlier run is kept.

        Raises ParityError naming the first module that diverges.
        """
        name, stem = self.named(submodel, None, bucket)
        file = f"{stem}.onnx"
        return self.stage.memo(stem, EngineEntry, lambda: self._build(name, file, submodel, bucket), [file])

    @property
    def universal(self) -> UniversalModel:
        return self.references.universal

    @property
    def cases(self) -> Mapping[Bucket, Sequence[Case]]:
        """Cases of each bucket on which engines are proven."""
        return self.references.cases

    @cached_property
    def prove_exact(self) -> ExactProof:
        """The tight half of the gate of integer engines."""
        return ExactProof(self.engine_references, self.proofs, self.run)

    @cached_property
    def engine_references(self) -> EngineReferences:
        """References that engines are held against, by the numbers that they read."""
        folder, chosen = self.proofs.path, self.templates.rounded
        return EngineReferences(self.references, StoredNumbers(self.universal, self.proofs.weights, folder, chosen))

    @cached_property
    def proofs(self) -> Bundle:
        """``bundle`` with the proof graphs, in a folder of their own beside its weights."""
        folder = self.stage.work / _PROOF_FOLDER
        link_shared_files(self.bundle, folder)
        return with_proof_graphs(self.bundle, folder)

    def emit(
        self,
        name: str,
        file: str,
        submodel: Submodel,
        bucket: Bucket,
        part: str | None = None,
        capacity: int | None = None,
    ) -> Emitted:
        """Writes the engine of ``submodel``, or of one part of it, and what proves it: sliced from its template, or
        traced. ``capacity`` is that of a cache of one size."""
        source = self.source
        at = bucket if part is None else source.parts[part].at(bucket)
        template = self.templates.of(submodel, at, part)
        problem, emitted = template.slice_problem, "sliced"
        if problem and any(value < axis.size for axis, value in submodel.values if axis.choices is None):
            if PRECISIONS[template.precision].has_exact_form:
                floats = ", ".join(one for one, spec in PRECISIONS.items() if not spec.has_exact_form)
                raise BuildError(
                    f"engine {name}: {template.precision} is for models that are sliced as graphs, and this one is not "
                    f"({problem}); choose one of {floats}"
                )
            template, emitted = self.templates.traced(submodel, at, part), "traced"
        tasks = self.bundle.manifest.tasks
        template = self.emitted_of(template)
        graph = emit(template, self.store, submodel, {one.name for one in tasks.tensors} if tasks else ())
        graph = finished(self.profile.backend, f"engine {name}", graph, capacity)
        proof = self._write(file, graph, template.precision)
        if part is None:
            variants = chosen_variants(source, submodel, bucket, self.profile)
            ops: Sequence[Op] = source.workload(submodel, bucket, variants)
        else:
            variants, ops = {}, source.parts[part].workload(submodel, bucket)
        is_counted = part is not None or bool(template.tables) or template.precision != TRACED
        cost = predict(ops, self.profile, template.precision)
        kind: Literal["sliced", "traced"] = "traced" if emitted == "traced" else "sliced"
        entry = EngineEntry(
            id=name,
            submodel=submodel.id,
            bucket=bucket,
            backend=self.profile.backend,
            file=file,
            emitted=kind,
            private_bytes=private_bytes(template, self.store),
            flops=cost.flops,
            moved_bytes=cost.moved_bytes,
            activation_bytes=cost.activation_bytes,
            slice_problem=problem if emitted == "traced" else None,
            kind=self._kind(submodel, bucket, part, template, variants, capacity),
            weight_bytes=weight_bytes(template, self.store, submodel) if is_counted else None,
            precision=template.precision,
        )
        return Emitted(entry, template, graph, proof)

    def _kind(
        self,
        submodel: Submodel,
        bucket: Bucket,
        part: str | None,
        template: Template,
        variants: dict[str, str],
        capacity: int | None,
    ) -> EngineKind:
        source = self.source
        if part is None:
            return Whole(
                routing=source.routes(submodel, bucket) or None,
                metadata={**source.metadata(submodel, bucket), **_wide(template)} or None,
                variants=variants or None,
            )
        if part == Encoder.part:
            return Encoder(routing=source.parts[part].routes(submodel) or None)
        return Decode(capacity=capacity) if part == Decode.part else Segment(part=part)

    @contextmanager
    def runner(self, engine: EngineEntry, residency: Residency | None = None) -> Iterator[Runner]:
        """A runner for the proof graph of ``engine``; shared where that is the same computation, as the gate wants it
        (see verify.py). Memory of PyTorch's passes is released before it opens, and its own once it is closed, so that
        never both are held."""
        release_pages()
        residency = residency or ("packed" if PRECISIONS[engine.precision].is_always_packed else "shared")
        with runner_for(self.proofs, in_onnx_runtime(engine), residency, threads_or_default(None)) as runner:
            yield runner
        release_arena()

    def proven(
        self,
        engine: Emitted,
        module: Reference,
        cases: Sequence[Case],
        reference: Replayed,
        found: Sequence[Arrays],
        submodel: Submodel,
    ) -> EngineEntry:
        """The engine with its receipt. ``module`` is that of the PyTorch module which takes the ``cases``; one of
        integers is held against that with their numbers, and its figures are those of its distance from ``reference``.

        Raises ParityError if ``found`` breaks the rule, naming the first module that diverges, or if PyTorch's own
        float32 is too far from its float64 to prove anything by.
        """
        entry, limit = engine.entry, tolerance_of(engine.entry, self.universal)
        rule = stated = rule_of(limit, entry.routing)
        outputs, judged = judged_outputs(self.bundle.manifest, self.universal, entry), reference
        if PRECISIONS[entry.precision].has_exact_form:
            exact, expected = self.prove_exact(engine, submodel, cases, outputs, reference)
            stated = self.prove_exact.stated(entry, rule)
            if PRECISIONS[entry.precision].is_integer:
                module, judged = exact, expected
                if entry.routing:
                    judged = replayed(exact, cases, entry.routing, found, limit.atol)
        if (note := unjudged(cases, outputs.specs)) is not None:
            stated = f"{stated}; {note}"
        verdict = judge_engine(self.bundle.manifest, self.universal, entry, cases, judged, found)
        run = ProofRun(engine.proof_graph, engine.template.module_outputs, self.proofs.path)
        require_parity(f"engine {entry.id}", verdict, run, module, entry, outputs, cases, found, limit, rule)
        if judged is not reference:
            verdict = distance(reference, found, cases, outputs)
        return self.with_receipt(engine, f"narrowed to {submodel.id}, in float64", stated, cases, verdict)

    def with_receipt(
        self, engine: Emitted, reference: str, rule: str, cases: Sequence[Case], verdict: Verdict
    ) -> EngineEntry:
        """The engine with the receipt of a ``verdict`` that nothing broke; ``reference`` says which PyTorch module."""
        receipt = receipt_of(
            verdict,
            tolerance_of(engine.entry, self.universal),
            cases,
            reference=reference,
            rule=rule,
            graph_sha256=engine.graph_sha256,
            weights_sha256=self.bundle.manifest.weights_sha256 or "",
        )
        return replace(engine.entry, parity=receipt)

    def run(self, engine: EngineEntry, feeds: Sequence[Arrays]) -> list[Arrays]:
        """Outputs and routes of an engine by name, one mapping per set of inputs."""
        return list(self._runs(engine, feeds))

    def _runs(self, engine: EngineEntry, feeds: Sequence[Arrays]) -> Iterator[Arrays]:
        names = [spec.name for spec in self.bundle.manifest.interface_of(engine)[1]]
        names += [entry.name for entry in engine.routing or ()]
        with self.runner(engine) as runner:
            for arrays in feeds:
                yield dict(zip(names, runner.run(arrays, routing=True), strict=True))

    def answers(self, engine: EngineEntry, cases: Sequence[Case]) -> list[Arrays]:
        """As ``run``, of the positions that are compared."""
        specs, found = self.bundle.manifest.outputs, self._runs(engine, [case.feeds for case in cases])
        return [case.judged(arrays, specs) for case, arrays in zip(cases, found, strict=True)]

    def _write(self, file: str, graph: bytes, precision: Precision) -> bytes:
        """Writes an engine and its proof graph, which it returns."""
        engine, proof = self.stage.folder / file, proof_graph(graph, precision)
        write_synced(engine, graph)
        if proof == graph or BACKENDS[self.profile.backend].runs_graphs:  # which answers for itself
            link(engine, self.proofs.path / file)
        else:
            (self.proofs.path / file).write_bytes(proof)
        return proof

    def _build(self, name: str, file: str, submodel: Submodel, bucket: Bucket) -> EngineEntry:
        engine = self.emit(name, file, submodel, bucket)
        cases, is_compared = self.references.asked(submodel, bucket), self._is_compared(submodel, bucket)
        found = self.answers(engine.entry, cases)
        reference = self._replayed(engine.entry, submodel, found)
        entry = self.proven(engine, self.references.of(submodel), cases, reference, found, submodel)
        if not is_compared or entry.parity is None:
            return entry
        every = [case.name for case in self.cases[bucket]]
        answers = self.references.universal_outputs(bucket)
        whole = [answers[every.index(case.name)] for case in cases]
        equal = _are_equal(whole, reference.outputs)
        if equal and self._must_differ(submodel) and not self._cuts_only_zeros(submodel):
            raise ParityError(f"engine {name}: returns the universal model's outputs; the slice has no effect")
        outputs = [case.read(arrays, self.bundle.manifest.outputs) for case, arrays in zip(cases, found, strict=True)]
        return replace(entry, parity=replace(entry.parity, difference_to_universal=max_difference(whole, outputs)))

    def _is_compared(self, submodel: Submodel, bucket: Bucket) -> bool:
        """Whether ``submodel`` must differ from the universal model, which has to take its sequence for that."""
        universal = self.universal.spec.universal()
        return not submodel.is_universal and bucket in map(universal.at, self.profile.buckets)

    def _replayed(self, engine: EngineEntry, submodel: Submodel, found: Sequence[Arrays]) -> Replayed:
        atol = tolerance_of(engine, self.universal).atol
        try:
            return self.references.replayed(submodel, engine.bucket, engine.routing, found, atol)
        except ParityError as failure:
            raise ParityError(f"engine {engine.id}: {failure}") from failure

    def _must_differ(self, submodel: Submodel) -> bool:
        """Whether ``submodel`` leaves parameters out; a smaller token group may still hold every token of a bucket."""
        source = self.universal.source
        prefix = any(value < axis.size for axis, value in submodel.values if axis.choices is None)
        return prefix or source.parameters(submodel) < source.parameters(source.spec.universal())

    def _cuts_only_zeros(self, submodel: Submodel) -> bool:
        """Whether equal outputs are right: of a pruned model a slice may cut nothing but zeros."""
        parameters, kept = self.universal.parameters(), {a.name: n for a, n in submodel.values if n < a.size}
        orders = [order for order in self.universal.spec.orders if order.axis.name in kept]
        # The readers of the steps say what is left of them; stacked steps are read by none but themselves.
        cuts = [c for order in orders for c in ([c for c in order.slices if c.dim == 1] or order.slices)]
        rest = (parameters[c.parameter].movedim(c.dim, 0)[kept[c.axis] * c.unit :] for c in cuts)
        return bool(cuts) and not any(bool(weights.any()) for weights in rest)


def finished(backend: str, where: str, graph: bytes, capacity: int | None) -> bytes:
    """``graph`` in operators that ``backend`` takes; ``capacity`` is that of a cache of one size. Raises BuildError."""
    finisher = BACKENDS[backend].finisher
    if finisher is None:
        return graph
    package = __name__.rpartition(".compiler.")[0]
    return import_module(f"{package}.{finisher}").accepted(where, graph, capacity)


def _are_equal(whole: Sequence[Arrays], exact: Sequence[Arrays]) -> bool:
    """Whether ``exact`` rounds to ``whole``, one case at a time: logits of a vocabulary take gigabytes."""
    return all(
        np.array_equal(arrays[name], own[name].astype(np.float32))
        for arrays, own in zip(whole, exact, strict=True)
        for name in arrays
    )


def _wide(template: Template) -> dict[str, str]:
    """Which products of a template in another precision stay in float32, and of 4 bits which have 8, as metadata of its
    engines."""
    if template.precision == TRACED:
        return {}
    found = {"products in fp32": wide_products(template)}
    if PRECISIONS[template.precision].encoding in FOUR_BITS:
        found["products in 8 bits"] = products_in_8_bits(template)
    return {what: _named(names) for what, names in found.items() if names}


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED_WEIGHTS} more" if len(names) > _MAX_NAMED_WEIGHTS else ""
    return f"{', '.join(names[:_MAX_NAMED_WEIGHTS])}{more}"


_MERGED = "merged"


@dataclass(frozen=True)
class MergingBuilder(EngineBuilder):
    """Builds them from the templates and references of the other builder, into the same stage."""

    @classmethod
    def beside(cls, builder: EngineBuilder) -> MergingBuilder:
        """The one whose engines stand beside those of ``builder``."""
        own = {field.name: getattr(builder, field.name) for field in fields(builder)}
        bundle = replace(builder.bundle, manifest=replace(builder.bundle.manifest, tasks=None))
        return cls(**{**own, "bundle": bundle})

    @cached_property
    def source(self) -> ModelSource:
        source = self.universal.source
        workload = source.tasks.merged_workload if source.tasks is not None else None
        if workload is None:
            return source
        return replace(source, architecture=replace(source.architecture, workload=workload))

    def named(self, submodel: Submodel, part: str | None, bucket: Bucket) -> tuple[str, str]:
        return engine_names(submodel, (_MERGED,) if part is None else (_MERGED, part), bucket)

    def emitted_of(self, template: Template) -> Template:
        return without_pairs(template)
