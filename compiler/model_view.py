"""A model's levels and axes, as ``inspect MODEL`` shows it: the sizes and work of its levels on one device."""

from dataclasses import dataclass

from ..elastic import Axis
from ..exporters.source import ModelSource
from ..profiles.compile_request import CompileRequest
from ..profiles.device_profile import DeviceProfile
from ..profiles.precision import Precision
from ..runtime.summary import CacheSize, cache_sizes, sizes_at
from ..workload import macs
from .job import resolve
from .planning.candidate import VariantView, variant_views, variant_workload


@dataclass(frozen=True)
class LevelView:
    """One level of a model; per bucket, of a range at the shape of budgets, ``flops`` in the variants that engines get,
    as ``plan`` counts them, and ``macs`` as papers do: multiply-adds of the matrix products alone, in the first variant
    of each on any device.

    ``non_embedding`` are the parameters outside the tables of tokens and positions, ``ffn`` the ones that FFN axes
    slice; ``groups`` others that the family counts, by name.
    """

    label: str
    submodel: str
    parameters: int
    non_embedding: int
    ffn: int
    groups: dict[str, int]
    weight_bytes: int
    flops: dict[str, int]
    macs: dict[str, int]
    rounding: tuple[str, ...]


@dataclass(frozen=True)
class ModelView:
    """A model as ``--json`` prints it; the levels' widths are multiples of ``width_multiple``, as the profile asks, and
    ``variants`` are the variants that a compile for it takes. The levels are in the highest of
    ``precisions``. ``cache`` is stated of a model that can generate, ``kept_whole`` of one whose axes were found: what
    else was, and why it cannot shrink; ``left_out`` says which inputs and outputs of its class engines do not have."""

    kind: str
    name: str
    folder: str
    family: str
    trained_nested: bool
    profile: str
    width_multiple: int
    precisions: tuple[Precision, ...]
    axes: tuple[Axis, ...]
    levels: tuple[LevelView, ...]
    variants: tuple[VariantView, ...]
    cache: tuple[CacheSize, ...] = ()
    kept_whole: tuple[str, ...] = ()
    left_out: str | None = None


def cache_of(source: ModelSource, device: DeviceProfile) -> tuple[CacheSize, ...]:
    """Bytes of keys and values of a row of ``source``, compiled for ``device`` to generate; nothing where it cannot
    be."""
    form = source.architecture.cached
    if form is None or form.problem is not None:
        return ()
    if static := [tokens for tokens in device.capacities_for(form.positions) if tokens is not None]:
        return sizes_at(form.layers, static)
    return cache_sizes(form.layers, form.positions, form.bucket.sequence, form.states)


def view_model(request: CompileRequest) -> ModelView:
    """The view of ``request``'s model on its profile; reads headers alone. Raises as ``resolve``."""
    resolved = resolve(request)
    source, device, steps = resolved.source, resolved.profile, resolved.levels
    shapes = list(dict.fromkeys(bucket.nearest(device.budget_shape) for bucket in device.buckets))
    views = [
        LevelView(
            label=level.label,
            submodel=level.submodel.id,
            parameters=groups.total,
            non_embedding=groups.non_embedding,
            ffn=groups.ffn,
            groups=source.named_groups(level.submodel),
            weight_bytes=source.weight_bytes(level.submodel, device.backend).stored,
            flops={
                b.label: sum(op.flops for op in variant_workload(source, level.submodel, level.submodel.at(b), device))
                for b in shapes
            },
            macs={b.label: macs(source.workload(level.submodel, b)) for b in shapes},
            rounding=level.rounding,
        )
        for level in steps
        for groups in [source.parameter_groups(level.submodel)]
    ]
    spec = source.spec
    return ModelView(
        kind="model",
        name=source.name,
        folder=str(request.model),
        family=source.family.name,
        trained_nested=spec.trained_nested,
        profile=device.name,
        width_multiple=device.width_multiple,
        precisions=device.precisions,
        axes=spec.axes,
        levels=tuple(views),
        variants=variant_views(source, [level.submodel for level in steps], device),
        cache=cache_of(source, device),
        kept_whole=source.architecture.kept_whole,
        left_out=source.signature.left_out,
    )
