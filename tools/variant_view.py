"""Which variants engines for a device would get, as ``inspect MODEL`` and ``plan`` show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..runtime.summary.short_names import ShortNames
from .console import print_table

if TYPE_CHECKING:
    from ..compiler.planning.variants import VariantView


def shared_variants(views: Sequence[VariantView]) -> list[tuple[str, str]]:
    """What has the same variant everywhere, and that variant."""
    first = views[0].variants if views else {}
    return [(f"variant of {computed}", variant) for computed, variant in first.items() if _common(views, computed)]


def print_variants(views: Sequence[VariantView], names: ShortNames) -> None:
    """A table of what has not the same variant everywhere, if there is any."""
    computed = [name for name in views[0].variants if not _common(views, name)] if views else []
    if computed:
        click.echo()
        rows = [[names(view.submodel), view.bucket, *(view.variants[name] for name in computed)] for view in views]
        print_table(["submodel", "bucket", *(f"variant of {name}" for name in computed)], rows)


def _common(views: Sequence[VariantView], computed: str) -> bool:
    return len({view.variants[computed] for view in views}) == 1
