"""The templates of one compile: traced once per graph structure, segment and bucket, and kept for a resumed compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ...elastic import Bucket, Submodel
from ...exporters.tracing.trace import Interface
from ...exporters.universal import UniversalModel
from ...profiles.device_profile import DeviceProfile
from ...profiles.encodings import Encoding
from ...profiles.precision import TRACED, Precision, precision_of
from ...runtime.bundle.manifest import RoutingEntry, TensorSpec
from ..graph.precision.derive import exit_heads, in_precision
from ..graph.template import Template, load_template, save_template, traced_template
from ..planning.variants import chosen_variants
from ..work.staging import Stage


@dataclass(frozen=True, order=True)
class TemplateKey:
    """What tells one template from another; a segment (by number) is the same graph in submodels of every depth."""

    bucket: Bucket
    structure: tuple[tuple[str, int], ...] = ()
    segment: int | None = None
    precision: Precision = "fp32"

    @property
    def traced(self) -> TemplateKey:
        """The template that this one is derived from."""
        return replace(self, precision=TRACED)

    @property
    def file(self) -> str:
        parts = [f"{name}{value}" for name, value in self.structure]
        if self.segment is not None:
            parts.append(f"segment{self.segment}")
        return "-".join(["template", *parts, f"{self.bucket.label}.onnx"])


@dataclass(frozen=True)
class _Interface:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Templates:
    """Every template of ``universal`` for ``profile``; one that is not ``known`` yet is traced, or derived from one.

    ``scales`` are those of the inputs of products, by weight, where calibration gave any.
    """

    universal: UniversalModel
    stage: Stage
    profile: DeviceProfile
    known: dict[TemplateKey, Template] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)

    def keys(self, submodels: Iterable[Submodel], buckets: Iterable[Bucket]) -> list[TemplateKey]:
        """The templates that the engines of ``submodels`` in the place of ``buckets`` need."""
        exits = self.universal.source.exits
        segments = range(len(exits.entry.segments)) if exits else range(0)
        points = sorted({(self._precision(s), s.structure): s for s in submodels}.items())
        return list(
            dict.fromkeys(
                key
                for bucket in buckets
                for key in (
                    *(TemplateKey(s.at(bucket), structure, None, precision) for (precision, structure), s in points),
                    *(TemplateKey(bucket, (), n, precision) for n in segments for precision in self.profile.precisions),
                )
            )
        )

    def get(self, key: TemplateKey) -> Template:
        """The template of ``key``. Raises ExportError if torch cannot trace it."""
        if key not in self.known:
            if key == key.traced:
                path = self.stage.once(self.stage.work / key.file, lambda path: self._trace(key, path))
                self.known[key] = load_template(path)
            else:
                self.known[key] = self.derived(self.get(key.traced), key.precision, key.segment)
        return self.known[key]

    def of(self, submodel: Submodel, bucket: Bucket, segment: int | None = None) -> Template:
        """The template from which the engine of ``submodel`` at ``bucket``, or of a segment of it, is emitted."""
        structure = submodel.structure if segment is None else ()
        return self.get(TemplateKey(bucket, structure, segment, self._precision(submodel)))

    def encodings(self, submodel: Submodel) -> dict[str, frozenset[Encoding]]:
        """The encodings in which the engines of ``submodel``, segments included, read each parameter."""
        exits = self.universal.source.exits
        ends = [segment.layer for segment in exits.entry.segments] if exits else []
        segments = [number for number, end in enumerate(ends) if end <= (submodel.depth or 0)]
        found: dict[str, frozenset[Encoding]] = {}
        for bucket in self.profile.buckets:
            for segment in (None, *segments):
                for name, encodings in self.of(submodel, submodel.at(bucket), segment).encodings.items():
                    found[name] = found.get(name, frozenset()) | encodings
        return found

    def weights(self) -> set[str]:
        """Names of every tensor that the engines read from the weight store."""
        return {name for template in self._of_engines() for name in template.weights}

    def tables(self) -> dict[str, np.ndarray]:
        """The large constants that the engines read from the weight store, by name."""
        return {name: table for template in self._of_engines() for name, table in template.tables.items()}

    def traced(self, submodel: Submodel, bucket: Bucket, segment: int | None) -> Template:
        """A template of this submodel alone, for models that cannot be sliced at graph level."""
        return self.derived(self._traced(submodel, bucket, segment), self._precision(submodel), segment)

    def derived(self, template: Template, precision: Precision, segment: int | None) -> Template:
        """``template``, which is in fp32, in ``precision``."""
        heads = exit_heads(self.universal.source, segment)
        return in_precision(template, precision, self.profile.backend, self.scales, heads)

    def part(self, module: torch.nn.Module, segment: int | None) -> tuple[torch.nn.Module, Interface]:
        """``module`` (the universal model's, or one narrowed from it) or a segment of it, and its interface."""
        source = self.universal.source
        if segment is None:
            return module, source.signature
        assert source.exits is not None
        return source.exits.segment(module, segment), source.exits.entry.segments[segment]

    def _trace(self, key: TemplateKey, path: Path) -> None:
        whole = self.universal.spec.submodel(dict(key.structure))
        save_template(self._traced(whole, key.bucket, key.segment), path)

    def _traced(self, submodel: Submodel, bucket: Bucket, segment: int | None) -> Template:
        module, interface = self.part(self.universal.narrow(submodel), segment)
        if segment is None:
            source = self.universal.source
            if source.architecture.lower is not None:
                chosen = chosen_variants(source, submodel, bucket, self.profile)
                module = source.architecture.lower(module, chosen)
            interface = _with_routes(interface, source.routes(submodel, bucket))
        return traced_template(self.universal, module, interface, bucket, self.profile.opset)

    def _precision(self, submodel: Submodel) -> Precision:
        return precision_of(submodel, self.profile.precisions)

    def _of_engines(self) -> Iterable[Template]:
        """Without templates that others are only derived from."""
        return [template for key, template in self.known.items() if key.precision in self.profile.precisions]


def _with_routes(interface: Interface, routes: Iterable[RoutingEntry]) -> Interface:
    """``interface`` with the model's ``routes`` after its outputs."""
    returned = (TensorSpec(entry.name, "int64", entry.shape) for entry in routes)
    return _Interface(interface.inputs, (*interface.outputs, *returned))
