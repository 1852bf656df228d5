"""The templates of one compile: traced once per graph structure, segment and bucket, and kept for a resumed compile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..elastic import Bucket, Submodel
from ..exporters.trace import Interface
from ..exporters.universal import UniversalModel
from ..profiles.device_profile import DeviceProfile
from ..runtime.manifest import DecisionEntry, TensorSpec
from .forms import chosen_forms
from .staging import Stage
from .template import Template, load_template, save_template, traced_template


@dataclass(frozen=True, order=True)
class TemplateKey:
    """What tells one template from another; a segment (by number) is the same graph in submodels of every depth."""

    bucket: Bucket
    structure: tuple[tuple[str, int], ...] = ()
    segment: int | None = None

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
    """Every template of ``universal`` for ``profile``; one that is not ``known`` yet is traced."""

    universal: UniversalModel
    stage: Stage
    profile: DeviceProfile
    known: dict[TemplateKey, Template] = field(default_factory=dict)

    def keys(self, submodels: Iterable[Submodel], buckets: Iterable[Bucket]) -> list[TemplateKey]:
        """The templates that the engines of ``submodels`` in the place of ``buckets`` need."""
        exits = self.universal.source.exits
        segments = range(len(exits.entry.segments)) if exits else range(0)
        structures = sorted({submodel.structure: submodel for submodel in submodels}.items())
        return list(
            dict.fromkeys(
                key
                for bucket in buckets
                for key in (
                    *(TemplateKey(point.at(bucket), structure) for structure, point in structures),
                    *(TemplateKey(bucket, (), segment) for segment in segments),
                )
            )
        )

    def get(self, key: TemplateKey) -> Template:
        """The template of ``key``. Raises ExportError if torch cannot trace it."""
        if key not in self.known:
            path = self.stage.once(self.stage.work / key.file, lambda path: self._trace(key, path))
            self.known[key] = load_template(path)
        return self.known[key]

    def of(self, submodel: Submodel, bucket: Bucket, segment: int | None = None) -> Template:
        """The template from which the engine of ``submodel`` at ``bucket``, or of a segment of it, is emitted."""
        return self.get(TemplateKey(bucket, submodel.structure if segment is None else (), segment))

    def weights(self) -> set[str]:
        """Names of every tensor that the engines read from the weight store."""
        return {name for template in self.known.values() for name in template.weights}

    def tables(self) -> dict[str, np.ndarray]:
        """The large constants that the engines read from the weight store, by name."""
        return {name: table for template in self.known.values() for name, table in template.tables.items()}

    def traced(self, submodel: Submodel, bucket: Bucket, segment: int | None) -> Template:
        """A template of this submodel alone, for models that cannot be sliced at graph level."""
        module, interface = self.part(self.universal.narrow(submodel), segment)
        if segment is None:
            source = self.universal.source
            module = source.family.lowered(module, chosen_forms(source, submodel, bucket, self.profile))
            interface = _deciding(interface, source.family.decisions(source.checkpoint, submodel, bucket))
        return traced_template(self.universal, module, interface, bucket, self.profile.opset)

    def part(self, module: torch.nn.Module, segment: int | None) -> tuple[torch.nn.Module, Interface]:
        """``module`` (the universal model's, or one narrowed from it) or a segment of it, and its interface."""
        source = self.universal.source
        if segment is None:
            return module, source.signature
        assert source.exits is not None
        return source.exits.segment(module, segment), source.exits.entry.segments[segment]

    def _trace(self, key: TemplateKey, path: Path) -> None:
        whole = self.universal.spec.submodel(dict(key.structure))
        save_template(self.traced(whole, key.bucket, key.segment), path)


def _deciding(interface: Interface, decisions: Iterable[DecisionEntry]) -> Interface:
    """``interface`` with the model's decisions after its outputs."""
    decided = (TensorSpec(entry.name, "int64", entry.shape) for entry in decisions)
    return _Interface(interface.inputs, (*interface.outputs, *decided))
