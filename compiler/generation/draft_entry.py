"""What a bundle says of how its model generates, before it has engines."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

from ...bundle.entries.generation_entry import GenerationEntry
from ...exporters.checkpoints.generation_defaults import read_chat_template, read_generation_defaults
from ...exporters.source import ModelSource
from ...runtime.generation.sampling import Sampling
from ..work.staging import Stage, write_synced

_TEMPLATE_NAME = "chat_template.jinja"


def draft_entry(source: ModelSource, stage: Stage) -> GenerationEntry | None:
    """The interface of ``source``'s engines that keep a cache, its tokens that end a text, and how its folder samples;
    its chat template is written into the bundle. None for a model that is not to generate. Raises CheckpointError."""
    if source.cached is None:
        return None
    entry, template = stated_entry(source)
    if template is not None:
        write = partial(write_synced, data=template.encode())
        stage.once(stage.folder / _TEMPLATE_NAME, write)
    return entry


def stated_entry(source: ModelSource) -> tuple[GenerationEntry, str | None]:
    """What ``draft_entry`` returns of a model that is to generate, and its chat template."""
    assert source.cached is not None
    stated = read_generation_defaults(source.checkpoint, source.cached.vocabulary)
    template = read_chat_template(source.checkpoint.folder)
    entry = replace(
        source.cached.entry,
        end_ids=stated.end_ids,
        begin_id=stated.begin_id,
        sampling=_options(stated.sampling) or None,
    )
    if template is None:
        return entry, None
    return replace(entry, chat_template=_TEMPLATE_NAME, special_tokens=template.special_tokens), template.source


def _options(sampling: Sampling) -> dict[str, int | float]:
    """The options that are not the defaults."""
    usual = Sampling()
    found = {option.name: getattr(sampling, option.name) for option in fields(Sampling)}
    return {name: value for name, value in found.items() if value != getattr(usual, name)}
