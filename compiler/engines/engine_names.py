"""What engines and their files are called."""

from __future__ import annotations

import hashlib

from ...bucket import Bucket
from ...elastic import Submodel

_MAX_STEM_LENGTH = 120


def engine_names(submodel: Submodel, parts: tuple[str, ...], bucket: Bucket) -> tuple[str, str]:
    """Id of the engine of ``submodel`` at ``bucket``, and what its files are called but for their ends; ``parts`` tell
    it from others of that submodel and bucket."""
    return (
        f"{'.'.join((submodel.id, *parts))}@{bucket.label}",
        f"{'.'.join((short(submodel.id), *parts))}.{bucket.label}",
    )


def short(submodel_id: str) -> str:
    """The id as part of a file name: ids with many different widths would not fit one."""
    if len(submodel_id) <= _MAX_STEM_LENGTH:
        return submodel_id
    return f"{submodel_id[:_MAX_STEM_LENGTH]}-{hashlib.sha256(submodel_id.encode()).hexdigest()[:8]}"
