"""The optimisation profiles of a plan: between which shapes TensorRT builds it, and for which it picks kernels.

A plan of a bucket has one, and so has one that reads prompts for a decoder. A plan whose engine keeps a cache has two:
for steps, which are a few new tokens of some rows, and for chunks of a prompt, which are many of one row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..bucket import Bucket
from ..errors import BuildError, BundleFormatError
from .entries.engine_entry import EngineEntry
from .entries.generation_entry import CACHED, ENCODER, LOGIT_COUNT, PROMPT_TOKENS, SOURCE
from .entries.tensor_spec import TensorSpec
from .manifest import MANIFEST_NAME, Manifest

Shape = tuple[int, ...]
# How TensorRT writes a dimension that is not known.
UNKNOWN_EXTENT = -1
# New tokens of a row that a step takes: the last one of the text, and eight that were drafted.
STEP_TOKENS = 9


@dataclass(frozen=True)
class ShapeProfile:
    """``bucket``, and within it the shape ``tuned``, which kernels must be fastest at; they take all others too. Both
    are the one shape of a static bucket. A dimension that the caller chooses is ``most[name]`` at most, and
    ``usual[name]``, or 1, where kernels must be fastest."""

    bucket: Bucket
    tuned: Bucket
    most: Mapping[str, int] = field(default_factory=dict)
    usual: Mapping[str, int] = field(default_factory=dict)

    def shapes(self, spec: TensorSpec) -> tuple[Shape, Shape, Shape]:
        """The smallest, the tuned and the largest shape of an input."""
        least = dict.fromkeys(self.most, 1)
        return (
            spec.shape(self.bucket.smallest, least),
            spec.shape(self.tuned, {**least, **self.usual}),
            spec.shape(self.bucket.largest, self.most),
        )

    def takes(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes of named dimensions lie within it."""
        low, high = self.bucket.smallest, self.bucket.largest
        limits = {"batch": (low.batch, high.batch), "sequence": (low.sequence, high.sequence)}
        limits |= {name: (1, most) for name, most in self.most.items()}
        return all(least <= sizes.get(name, least) <= most for name, (least, most) in limits.items())

    def written(self, inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
        """``ids:1x1,mask:1x1``, as TensorRT's tools read it: the smallest, the tuned and the largest shapes of the
        inputs with a free dimension; nothing where there are none."""
        free = {*self.bucket.free, *self.most}
        named = [(spec.name, self.shapes(spec)) for spec in inputs if free.intersection(spec.dims)]
        return tuple(
            ",".join(f"{name}:{'x'.join(map(str, shapes[number]))}" for name, shapes in named)
            for number in range(3)
            if named
        )

    def parsed_shapes(
        self, where: str, parsed: Mapping[str, Shape], inputs: Sequence[TensorSpec]
    ) -> dict[str, tuple[Shape, Shape, Shape]]:
        """``shapes`` by name of the inputs that need a profile, which ``parsed``, the graph as TensorRT read it, leaves
        open by a -1. Raises BuildError if these are not the manifest's inputs at the bucket."""
        declared = {spec.name: spec.declared(self.bucket) for spec in inputs}
        if parsed.keys() != declared.keys() or not all(_fits(parsed[name], declared[name]) for name in declared):
            listed = ", ".join(f"{name} {list(shape)}" for name, shape in parsed.items())
            raise BuildError(f"{where}: its graph takes {listed}; the manifest says {declared}")
        return {spec.name: self.shapes(spec) for spec in inputs if UNKNOWN_EXTENT in parsed[spec.name]}

    @property
    def key(self) -> list[str | int]:
        """The part that a plan follows from."""
        chosen = (part for name, most in sorted(self.most.items()) for part in (name, most))
        usual = (part for name, size in sorted(self.usual.items()) for part in (name, size))
        return [str(self.bucket), str(self.tuned), *chosen, *usual]


def shape_profiles(manifest: Manifest, engine: EngineEntry) -> tuple[ShapeProfile, ...]:
    """The profiles of a plan of ``engine``: of one that keeps a cache that of steps, tuned for one new token of one
    row, and that of chunks, tuned for the longest, both behind a prompt of usual length; of one that reads prompts that
    of a usual one; of any other the one of its bucket. Raises as ``shape_profile``."""
    generation = manifest.generation
    if engine.segment == ENCODER:
        return (ShapeProfile(engine.bucket, Bucket(1, min(PROMPT_TOKENS, engine.bucket.sequence))),)
    if engine.segment == CACHED:
        encoder = None if generation is None else generation.encoder
        return _of_caches(engine.bucket, {} if encoder is None else {SOURCE: encoder.positions})
    return (shape_profile(manifest, engine.bucket),)


def shape_profile(manifest: Manifest, bucket: Bucket) -> ShapeProfile:
    """The profile of engines at ``bucket``: tuned for what is nearest in it to the shape at which the device profile
    judges budgets (``budget_at``), else for the fewest rows and the longest sequence.

    Raises BundleFormatError for a ``budget_at`` in the manifest that is no shape.
    """
    requested = manifest.provenance.profile.get("budget_at")
    if bucket.is_static or requested is None:
        return ShapeProfile(bucket, Bucket(bucket.smallest.batch, bucket.sequence))
    try:
        return ShapeProfile(bucket, bucket.nearest(Bucket.parse(str(requested))))
    except ValueError as failure:
        raise BundleFormatError(f"{MANIFEST_NAME}: provenance: profile: budget_at: {failure}") from None


def _fits(parsed: Shape, declared: tuple[str | int, ...]) -> bool:
    """Whether every dimension that the manifest leaves free is open, and any other one is open or has its size."""
    return len(parsed) == len(declared) and all(
        have in (UNKNOWN_EXTENT, want) for have, want in zip(parsed, declared, strict=True)
    )


def _of_caches(bucket: Bucket, prompts: Mapping[str, int]) -> tuple[ShapeProfile, ...]:
    """Several rows take one new token each, several new tokens are of one row; ``prompts`` are the most tokens that an
    encoder reads of one, where there is one."""
    several, longest = min(STEP_TOKENS, bucket.sequence), bucket.sequence
    usual = {name: min(PROMPT_TOKENS, most) for name, most in prompts.items()}
    steps = ShapeProfile(Bucket(bucket.batch, several, 1, 1), Bucket(1, 1), {LOGIT_COUNT: several, **prompts}, usual)
    if longest == several:
        return (steps,)
    chunks = {LOGIT_COUNT: longest, **prompts}
    return steps, ShapeProfile(Bucket(1, longest, 1, 1), Bucket(1, longest), chunks, usual)
