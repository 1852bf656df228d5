"""The templates of one compile: traced once per graph structure, segment and bucket, and kept for a resumed compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import RoutingEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...elastic import Submodel
from ...exporters.signature import Interface
from ...exporters.universal import UniversalModel
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import TRACED, Encoding, Precision, precision_of
from ..graph.make_template import traced_template
from ..graph.precision.derive import as_run, exit_heads, in_precision
from ..graph.template import Template, load_template, save_template
from ..planning.candidate import chosen_variants
from ..work.staging import Stage


@dataclass(frozen=True, order=True)
class TemplateKey:
    """Key of a template; the graph of a ``part`` of the model has a structure of its own."""

    bucket: Bucket
    structure: tuple[tuple[str, int], ...] = ()
    part: str | None = None
    precision: Precision = "fp32"

    @property
    def traced(self) -> TemplateKey:
        """The template that this one is derived from."""
        return replace(self, precision=TRACED)

    @property
    def file(self) -> str:
        parts = [f"{name}{value}" for name, value in self.structure]
        if self.part:
            parts.append(self.part)
        return "-".join(["template", *parts, f"{self.bucket.label}.onnx"])


@dataclass(frozen=True)
class _Interface:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Templates:
    """Every template of ``universal`` for ``profile``; one that is not ``known`` yet is traced, or derived from one.

    ``scales`` are those of the inputs of products, by weight, where calibration gave any, and ``rounded`` the tensors
    of 4 bits that it chose, by name.
    """

    universal: UniversalModel
    stage: Stage
    profile: DeviceProfile
    known: dict[TemplateKey, Template] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    rounded: Mapping[str, np.ndarray] = field(default_factory=dict)

    def keys(self, submodels: Iterable[Submodel], buckets: Iterable[Bucket]) -> list[TemplateKey]:
        """The templates that the engines of ``submodels`` in the place of ``buckets`` need."""
        parts, precisions = self.universal.source.parts.values(), self.profile.precisions
        points = sorted({(self._precision(s), s.structure): s for s in submodels}.items())
        return list(
            dict.fromkeys(
                key
                for bucket in buckets
                for key in (
                    *(TemplateKey(s.at(bucket), structure, None, precision) for (precision, structure), s in points),
                    *(
                        TemplateKey(part.at(bucket), structure, part.name, one)
                        for part in parts
                        for structure in dict.fromkeys(part.structure(s) for _, s in points)
                        for one in precisions
                    ),
                )
            )
        )

    def get(self, key: TemplateKey) -> Template:
        """The template of ``key``. Raises ExportError if torch cannot trace it."""
        if key not in self.known:
            if key == key.traced:
                path = self.stage.work / key.file
                path = self.stage.once(path, lambda path: self._trace(key, path), self.traced_for(key))
                self.known[key] = load_template(path)
            else:
                self.known[key] = self.derived(self.get(key.traced), key.precision, key.part)
        return self.known[key]

    def traced_for(self, key: TemplateKey) -> list[object]:
        """Settings of the profile that the trace of ``key`` takes."""
        whole = self.universal.spec.submodel(dict(key.structure))
        variants = None if key.part else chosen_variants(self.universal.source, whole, key.bucket, self.profile)
        return [BACKENDS[self.profile.backend].own_operators, self.profile.opset, variants]

    def of(self, submodel: Submodel, bucket: Bucket, part: str | None = None) -> Template:
        """The template from which the engine of ``submodel`` at ``bucket``, or of a part of it, is emitted."""
        structure = submodel.structure if part is None else self.universal.source.parts[part].structure(submodel)
        return as_run(self.get(TemplateKey(bucket, structure, part, self._precision(submodel))), self.profile.backend)

    def encodings(self, submodel: Submodel) -> dict[str, frozenset[Encoding]]:
        """The encodings in which the engines of ``submodel`` and its parts read each parameter."""
        parts = [part for part in self.universal.source.parts.values() if part.min_depth <= (submodel.depth or 0)]
        found: dict[str, frozenset[Encoding]] = {}
        for bucket in self.profile.buckets:
            of_parts = (self.of(submodel, part.at(submodel.at(bucket)), part.name) for part in parts)
            for template in (self.of(submodel, submodel.at(bucket)), *of_parts):
                for name, encodings in template.encodings.items():
                    found[name] = found.get(name, frozenset()) | encodings
        return found

    def weights(self) -> set[str]:
        """Names of every tensor that the engines read from the weight store."""
        return {name for template in self._of_engines() for name in template.weights}

    def tables(self) -> dict[str, np.ndarray]:
        """The large constants that the engines read from the weight store, by name."""
        return {name: table for template in self._of_engines() for name, table in template.tables.items()}

    def stored_for(self) -> list[object]:
        """Settings of the profile that the weight store of these templates takes."""
        rounded = {name: sha256(array.tobytes()).hexdigest() for name, array in self.rounded.items()}
        return [sorted(self.weights()), sorted(self.tables()), rounded]

    def traced(self, submodel: Submodel, bucket: Bucket, part: str | None) -> Template:
        """A template of this submodel alone, for models that cannot be sliced at graph level."""
        return self.derived(self._traced(submodel, bucket, part), self._precision(submodel), part)

    def derived(self, template: Template, precision: Precision, part: str | None) -> Template:
        """``template``, which is in fp32, in ``precision``."""
        source = self.universal.source
        heads = exit_heads(source, part)
        return in_precision(template, precision, self.profile.backend, self.scales, heads, source.outermost)

    def _trace(self, key: TemplateKey, path: Path) -> None:
        whole = self.universal.spec.submodel(dict(key.structure))
        save_template(self._traced(whole, key.bucket, key.part), path)

    def _traced(self, submodel: Submodel, bucket: Bucket, part: str | None) -> Template:
        source, module = self.universal.source, self.universal.narrow(submodel)
        interface: Interface = source.signature
        elastic: Mapping[str, Mapping[int, str]] = {}
        lower = source.architecture.lower
        if part is not None:
            interface = source.parts[part].of(submodel)
            whole = self.universal.source.whole_along
            elastic = {
                name: {dim: axis for dim, axis in dims.items() if axis not in whole}
                for name, dims in interface.elastic.items()
            }
            if lower is not None and interface.variants:
                module = lower(module, interface.variants)
            module = interface.module(module)
            interface = _with_routes(interface, interface.routes(submodel))
        else:
            if lower is not None:
                module = lower(module, chosen_variants(source, submodel, bucket, self.profile))
            interface = _with_routes(interface, source.routes(submodel, bucket))
        fuses = BACKENDS[self.profile.backend].own_operators
        return traced_template(self.universal, module, interface, bucket, self.profile.opset, fuses, elastic)

    def _precision(self, submodel: Submodel) -> Precision:
        return precision_of(submodel, self.profile.precisions)

    def _of_engines(self) -> Iterable[Template]:
        """Without templates that others are only derived from."""
        return [template for key, template in self.known.items() if key.precision in self.profile.precisions]


def _with_routes(interface: Interface, routes: Iterable[RoutingEntry]) -> Interface:
    """``interface`` with the model's ``routes`` after its outputs."""
    returned = (TensorSpec(entry.name, "int64", entry.shape) for entry in routes)
    return _Interface(interface.inputs, (*interface.outputs, *returned))
