"""What a session takes, and where its cache lies."""

from __future__ import annotations

from ....bundle.entries.generation_entry import GenerationEntry
from ....errors import InputError
from ...engines.runner import device_source
from ..cache_memory import CacheMemory, DeviceMemory, HostMemory
from .asked_rows import require_positions


def memory_for(entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int) -> CacheMemory:
    """Of ``rows`` with room for ``capacity`` tokens each, behind prompts of up to ``prompt_tokens`` that an encoder
    reads. Raises BundleError where there is no device on which engines of ``entry`` keep a cache."""
    take = device_source(entry.engines[0], None)
    if take is None:
        return HostMemory(entry, rows, capacity, prompt_tokens)
    return DeviceMemory(entry, rows, capacity, prompt_tokens, take)


def session_bytes(entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int = 0) -> int:
    """What a session takes, with the logits of steps. Raises InputError for what its engines do not take."""
    most = max(engine.bucket.batch for engine in entry.engines)
    if rows > most:
        raise InputError(f"rows: expected at most {most}, which the engines take at once, got {rows}")
    require_positions(entry, capacity)
    kept = entry.cache_bytes(rows, capacity) + entry.source_bytes(rows, prompt_tokens)
    return kept + 4 * entry.vocabulary * rows * len(entry.writers)  # each that is bound has logits of its own
