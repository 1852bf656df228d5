"""The optimisation profile of an engine: between which shapes TensorRT builds it, and for which it picks kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...elastic import Bucket
from ...errors import BundleFormatError
from .entries.tensor_spec import TensorSpec
from .manifest import MANIFEST_NAME, Manifest

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeProfile:
    """``bucket``, and within it the shape ``tuned``, which kernels must be fastest at; they take all others too. Of a
    static bucket both are its one shape."""

    bucket: Bucket
    tuned: Bucket

    def shapes(self, spec: TensorSpec) -> tuple[Shape, Shape, Shape]:
        """The smallest, the tuned and the largest shape of an input."""
        return spec.shape(self.bucket.smallest), spec.shape(self.tuned), spec.shape(self.bucket.largest)

    def written(self, inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
        """``ids:1x1,mask:1x1``, as TensorRT's tools read it: the smallest, the tuned and the largest shapes of the
        inputs with a dimension that the bucket leaves free; nothing where there are none."""
        free = set(self.bucket.free)
        named = [(spec.name, self.shapes(spec)) for spec in inputs if free.intersection(spec.dims)]
        return tuple(
            ",".join(f"{name}:{'x'.join(map(str, shapes[number]))}" for name, shapes in named)
            for number in range(3)
            if named
        )


def shape_profile(manifest: Manifest, bucket: Bucket) -> ShapeProfile:
    """The profile of engines at ``bucket``: tuned for what is nearest in it to the shape at which the device profile
    judges budgets (``budget_at``), else for the fewest rows and the longest sequence.

    Raises BundleFormatError for a ``budget_at`` in the manifest that is no shape.
    """
    asked = manifest.provenance.profile.get("budget_at")
    if bucket.is_static or asked is None:
        return ShapeProfile(bucket, Bucket(bucket.smallest.batch, bucket.sequence))
    try:
        return ShapeProfile(bucket, bucket.nearest(Bucket.parse(str(asked))))
    except ValueError as failure:
        raise BundleFormatError(f"{MANIFEST_NAME}: provenance: profile: budget_at: {failure}") from None
