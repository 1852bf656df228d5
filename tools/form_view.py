"""In which forms engines for a device would compute what has several, as ``inspect MODEL`` and ``plan`` show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ..elastic import Submodel
from ..profiles.device_profile import DeviceProfile
from .console import print_table

if TYPE_CHECKING:
    from ..compiler.planning.variants import Formed


@dataclass(frozen=True)
class FormView:
    """``forms``: what engines of ``submodel`` (its id) at ``bucket`` (its label) compute, to the form that it gets."""

    submodel: str
    bucket: str
    forms: dict[str, str]


def form_views(source: Formed, submodels: Iterable[Submodel], device: DeviceProfile) -> tuple[FormView, ...]:
    """One view for every submodel and bucket of ``device``; none of a model that has one form of everything.

    Raises PlanError for a form that the profile asks for and that does not exist.
    """
    from ..compiler.planning.variants import chosen_forms

    return tuple(
        FormView(submodel.id, bucket.label, forms)
        for submodel in submodels
        for bucket in dict.fromkeys(submodel.at(bucket) for bucket in device.buckets)
        if (forms := chosen_forms(source, submodel, bucket, device))
    )


def form_facts(views: Sequence[FormView]) -> list[tuple[str, str]]:
    """What has the same form everywhere, and that form."""
    first = views[0].forms if views else {}
    return [(f"form of {computed}", form) for computed, form in first.items() if _common(views, computed)]


def print_forms(views: Sequence[FormView]) -> None:
    """A table of what has not the same form everywhere, if there is any."""
    computed = [name for name in views[0].forms if not _common(views, name)] if views else []
    if computed:
        click.echo()
        rows = [[view.submodel, view.bucket, *(view.forms[name] for name in computed)] for view in views]
        print_table(["submodel", "bucket", *(f"form of {name}" for name in computed)], rows)


def _common(views: Sequence[FormView], computed: str) -> bool:
    return len({view.forms[computed] for view in views}) == 1
