"""One engine: emitted from its template, run through the runtime, compared with the PyTorch submodel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from ..elastic import Bucket, Submodel
from ..errors import ParityError
from ..exporters.universal import UniversalModel
from ..profiles.device_profile import DeviceProfile
from ..runtime.bundle import Bundle
from ..runtime.manifest import EngineEntry, ParityReceipt
from ..runtime.runner import runner_for
from ..runtime.threads import threads_or_default
from ..strict import structure, unstructure
from .cases import Case
from .cost_model import predict
from .divergence import first_divergence
from .parity import Arrays, Tolerance, compare, max_difference, tolerance_for
from .staging import Stage, write_synced
from .store import Store
from .template import Template, emit, traced_template

_MAX_STEM = 120


@dataclass(frozen=True)
class EngineBuilder:
    """Builds verified engines of one universal model for one profile; ``draft`` is the bundle that they go into."""

    universal: UniversalModel
    profile: DeviceProfile
    templates: Mapping[Bucket, Template]
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
        name, stem = f"{submodel.id}@{bucket.label}", f"{_short(submodel.id)}.{bucket.label}"
        receipt = f"{stem}.json"
        if not (self.stage.folder / f"{stem}.onnx").exists():  # the manifest's stage removes engines that it leaves out
            (self.stage.work / receipt).unlink(missing_ok=True)
        data = self.stage.once_json(receipt, lambda: unstructure(self._build(name, f"{stem}.onnx", submodel, bucket)))
        return structure(EngineEntry, data, name, ParityError)

    @cached_property
    def tolerance(self) -> Tolerance:
        return tolerance_for(self.profile.precision, self.universal.spec.depth)

    def _build(self, name: str, file: str, submodel: Submodel, bucket: Bucket) -> EngineEntry:
        template = self.templates[bucket]
        emitted: Literal["sliced", "traced"] = "sliced"
        if template.slice_problem and not submodel.is_universal:
            narrowed = self.universal.narrow(submodel)
            template, emitted = traced_template(self.universal, narrowed, bucket, self.profile.opset), "traced"
        graph = emit(template, self.store, submodel)
        write_synced(self.stage.folder / file, graph)
        cost = predict(self.universal.source.workload(submodel, bucket), self.profile)
        engine = EngineEntry(
            id=name,
            submodel=submodel.id,
            bucket=bucket,
            backend=self.profile.backend,
            file=file,
            emitted=emitted,
            private_bytes=template.private_bytes,
            flops=cost.flops,
            moved_bytes=cost.moved_bytes,
            activation_bytes=cost.activation_bytes,
            slice_problem=self.templates[bucket].slice_problem if emitted == "traced" else None,
        )
        receipt = self._verify(engine, template, submodel, hashlib.sha256(graph).hexdigest())
        return replace(engine, parity=receipt)

    def _verify(self, engine: EngineEntry, template: Template, submodel: Submodel, graph_sha256: str) -> ParityReceipt:
        cases = self.cases[engine.bucket]
        module = self.universal.narrow(submodel)
        reference = reference_outputs(module, self._output_names, cases)
        found = self._run(engine, cases)
        comparisons = compare(reference, found, [case.name for case in cases], self.tolerance)
        broken = next((comparison for comparison in comparisons if not comparison), None)
        if broken is not None:
            feeds = next(case.feeds for case in cases if case.name == broken.failed_case)
            where = first_divergence(template, self.store, submodel, module, feeds, self.tolerance, self.stage.folder)
            raise ParityError(
                f"engine {engine.id}: {broken.describe()}; allowed {self.tolerance.rule}; first to diverge: {where}"
            )
        difference = None
        if not submodel.is_universal:
            whole = self.universal_outputs[engine.bucket]
            difference = max_difference(whole, found)
            if max_difference(whole, reference) == 0.0 and not self._cuts_only_zeros(submodel):
                raise ParityError(f"engine {engine.id}: returns the universal model's outputs; the slice has no effect")
        return ParityReceipt(
            reference=f"PyTorch {torch.__version__} module narrowed to {submodel.id}",
            rule=self.tolerance.rule,
            atol=self.tolerance.atol,
            rtol=self.tolerance.rtol,
            min_cosine=self.tolerance.min_cosine,
            cases=tuple(case.name for case in cases),
            outputs=tuple(comparison.output for comparison in comparisons),
            graph_sha256=graph_sha256,
            weights_sha256=self.weights_sha256,
            difference_to_universal=difference,
        )

    def _cuts_only_zeros(self, submodel: Submodel) -> bool:
        """Whether equal outputs are right: of a pruned model a slice may cut nothing but zeros."""
        parameters, kept = self.universal.parameters(), {a.name: n for a, n in submodel.values if n < a.size}
        cuts = [cut for cut in self.universal.spec.slices if cut.dim == 1 and cut.axis in kept]
        rest = (parameters[cut.parameter].movedim(1, 0)[kept[cut.axis] * cut.unit :] for cut in cuts)
        return bool(cuts) and not any(bool(weights.any()) for weights in rest)

    def _run(self, engine: EngineEntry, cases: Sequence[Case]) -> list[Arrays]:
        with runner_for(self.draft, engine, "shared", threads_or_default(None)) as runner:
            return [dict(zip(self._output_names, runner.run(case.feeds), strict=True)) for case in cases]

    @property
    def _output_names(self) -> list[str]:
        return [spec.name for spec in self.universal.source.signature.outputs]


def _short(submodel_id: str) -> str:
    """The id as part of a file name: ids with many different widths would not fit one."""
    if len(submodel_id) <= _MAX_STEM:
        return submodel_id
    return f"{submodel_id[:_MAX_STEM]}-{hashlib.sha256(submodel_id.encode()).hexdigest()[:8]}"


def reference_outputs(module: torch.nn.Module, names: Sequence[str], cases: Sequence[Case]) -> list[Arrays]:
    """Outputs of a PyTorch module, one mapping per case."""
    with torch.no_grad():
        results = [module(*(torch.from_numpy(np.asarray(array)) for array in case.feeds.values())) for case in cases]
    return [{name: tensor.numpy() for name, tensor in zip(names, result, strict=True)} for result in results]
