"""Which variants engines for a device would get, as ``inspect MODEL`` and ``plan`` show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ..elastic import Submodel
from ..profiles.device_profile import DeviceProfile
from .console import print_table

if TYPE_CHECKING:
    from ..compiler.planning.variants import HasVariants


@dataclass(frozen=True)
class VariantView:
    """``forms``: what engines of ``submodel`` (its id) at ``bucket`` (its label) compute, to the variant that it gets.

    A field's name is its key in the JSON that commands print.
    """

    submodel: str
    bucket: str
    forms: dict[str, str]


def variant_views(source: HasVariants, submodels: Iterable[Submodel], device: DeviceProfile) -> tuple[VariantView, ...]:
    """One view for every submodel and bucket of ``device``; none of a model that has one variant of everything.

    Raises PlanError for a variant that the profile asks for and that does not exist.
    """
    from ..compiler.planning.variants import chosen_variants

    return tuple(
        VariantView(submodel.id, bucket.label, variants)
        for submodel in submodels
        for bucket in dict.fromkeys(submodel.at(bucket) for bucket in device.buckets)
        if (variants := chosen_variants(source, submodel, bucket, device))
    )


def shared_variants(views: Sequence[VariantView]) -> list[tuple[str, str]]:
    """What has the same variant everywhere, and that variant."""
    first = views[0].forms if views else {}
    return [(f"variant of {computed}", variant) for computed, variant in first.items() if _common(views, computed)]


def print_variants(views: Sequence[VariantView]) -> None:
    """A table of what has not the same variant everywhere, if there is any."""
    computed = [name for name in views[0].forms if not _common(views, name)] if views else []
    if computed:
        click.echo()
        rows = [[view.submodel, view.bucket, *(view.forms[name] for name in computed)] for view in views]
        print_table(["submodel", "bucket", *(f"variant of {name}" for name in computed)], rows)


def _common(views: Sequence[VariantView], computed: str) -> bool:
    return len({view.forms[computed] for view in views}) == 1
