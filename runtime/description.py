"""Submodels of an open model, and their tables in a notebook."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.figures import cell, heading, present
from ..bundle.manifest import Manifest
from ..profiles.precision import Precision
from ..tables import as_html


@dataclass(frozen=True)
class SubmodelInfo:
    """One submodel that may answer: its ``id`` and the ``labels`` that name it too, the ``precision`` of its engines,
    its ``parameters``, what its weights take (10^6 bytes), and its ``figures`` against the universal model, by name, of
    the texts that the bundle was compiled with; empty where it was compared on none."""

    id: str
    labels: tuple[str, ...]
    precision: Precision
    parameters: int
    weight_mb: float
    figures: Mapping[str, float]


def described(manifest: Manifest, engines: Collection[str]) -> tuple[SubmodelInfo, ...]:
    """The submodels of a model that may run those of ``engines``, by id, the largest first."""
    precision = {one.submodel: one.precision for one in manifest.engines if one.segment is None and one.id in engines}
    return tuple(
        SubmodelInfo(
            entry.id,
            entry.labels,
            precision[entry.id],
            entry.parameters,
            entry.weight_bytes / 1e6,
            MappingProxyType(dict(entry.quality.figures) if entry.quality is not None else {}),
        )
        for entry in manifest.largest_first
        if entry.id in precision
    )


def described_as_html(title: str, manifest: Manifest, submodels: Sequence[SubmodelInfo]) -> str:
    """A model with these of its submodels, as a notebook shows it."""

    def named(specs: tuple[TensorSpec, ...]) -> str:
        return "; ".join(f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.dims))}]" for spec in specs)

    figures = present(one.figures for one in submodels)
    return as_html(
        title,
        [
            ("inputs", named(manifest.inputs)),
            ("outputs", named(manifest.outputs)),
            *((f"budget {one.name}", f"{one.submodel}: {one.reason}") for one in manifest.budgets),
        ],
        ["labels", "submodel", "precision", "M params", "MB of weights", *map(heading, figures)],
        [
            [
                "/".join(one.labels) or "-",
                one.id,
                one.precision,
                f"{one.parameters / 1e6:.2f}",
                f"{one.weight_mb:.1f}",
                *(cell(one.figures, name, {}) for name in figures),
            ]
            for one in submodels
        ],
    )
