"""The engines of a written bundle that generate, as users run them, against the PyTorch submodel."""

from __future__ import annotations

from ...runtime.bundle.open_bundle import Bundle
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.engines.runner import runner_for
from ..parity.engine_verdict import EngineVerdict
from ..parity.references import References
from ..work.clock import Clock
from .cached_cases import cached_batches, run_batches
from .cached_gate import judge_cached


def verify_cached(bundle: Bundle, references: References, clock: Clock) -> list[EngineVerdict]:
    """One verdict for each; packed, where the gate of the build ran them shared."""
    entry, form = bundle.manifest.generation, references.universal.source.cached
    if entry is None or form is None:
        return []
    verdicts = []
    for engine in clock.each(entry.engines):
        batches = cached_batches(form, long=references.universal.spec.parse(engine.submodel).is_universal)
        with runner_for(bundle, engine, "packed", threads_or_default(None)) as runner:
            found = run_batches(runner, engine, entry, batches)
        verdicts.append(EngineVerdict.of(engine, judge_cached(references, form, engine, batches, found)))
    return verdicts
