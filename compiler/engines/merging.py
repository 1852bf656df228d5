"""Engines that a task is merged into when they are opened: each built, and proven with the base's own tensors, beside
the one that takes a task's as inputs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from ...bucket import Bucket
from ...elastic import Submodel
from ...exporters.source import ModelSource
from ..graph.template import Template, without_pairs
from .build_engine import EngineBuilder
from .emitted import engine_names

_MERGED = "merged"


@dataclass(frozen=True)
class MergingBuilder(EngineBuilder):
    """Builds them from the templates and references of the other builder, into the same stage."""

    @classmethod
    def beside(cls, builder: EngineBuilder) -> MergingBuilder:
        """The one whose engines stand beside those of ``builder``."""
        own = {field.name: getattr(builder, field.name) for field in fields(builder)}
        draft = replace(builder.draft, manifest=replace(builder.draft.manifest, tasks=None))
        return cls(**{**own, "draft": draft})

    @cached_property
    def source(self) -> ModelSource:
        source = self.universal.source
        workload = source.tasks.merged_workload if source.tasks is not None else None
        if workload is None:
            return source
        return replace(source, architecture=replace(source.architecture, workload=workload))

    def named(self, submodel: Submodel, part: str | None, bucket: Bucket) -> tuple[str, str]:
        return engine_names(submodel, (_MERGED,) if part is None else (_MERGED, part), bucket)

    def emitted_of(self, template: Template) -> Template:
        return without_pairs(template)
