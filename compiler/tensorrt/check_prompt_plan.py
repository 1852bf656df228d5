"""A plan that reads prompts for a decoder against the graph that it was built from.

What it makes of a prompt stays on the GPU, where the decoder's plan reads it; here it is copied back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

import numpy as np

from ...bucket import Bucket
from ...bundle.device_files.plan_index import PlanParity
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry
from ...bundle.open_bundle import Bundle
from ...runtime.device.device import Device
from ...runtime.engines.runner import Runner
from ...runtime.generation.sources.device_source import prompt_read
from ...runtime.inputs.arrays import Array
from .check_plan import check_plan, shapes_of

# Numbers that the scores of a layer may have for the longest prompt: 400 MB of float32 in the graph, and in the plan.
_MOST_SCORES = 100_000_000


def check_prompt_plan(here: Bundle, engine: EngineEntry, plan: Runner, device: Device) -> PlanParity:
    """As ``check_plan``, for the open ``plan`` of an encoder's ``engine`` on ``device``, by prompts up to the longest
    that it takes, or that is affordable."""
    generation = here.manifest.generation
    assert generation is not None
    entry = generation.of(engine)
    heads = max(layer.heads for layer in entry.source_layers)
    longest = min(engine.bucket.sequence, isqrt(_MOST_SCORES // heads))
    return check_plan(here, engine, _ReadBack(plan, engine, entry, device), shapes_of(Bucket(1, longest, None, 1)))


@dataclass(frozen=True)
class _ReadBack:
    """An encoder's plan, its answers as arrays of the host."""

    plan: Runner
    engine: EngineEntry
    entry: GenerationEntry
    device: Device

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """See ``Runner.run``."""
        routes = {one.name: np.empty(one.shape, np.int64) for one in (self.engine.routing or ()) if routing}
        device = self.device
        with device.lock, prompt_read(device, self.plan, self.entry, feeds["input_ids"][0], routes) as made:
            found = [np.empty(array.shape, np.float32) for array in made]
            for array, there in zip(found, made, strict=True):
                device.to_host(array, there.address)
            device.wait()
        return [*found, *routes.values()]
