"""The engines of a bundle that generate: which may be open under the memory cap of its model, and what else counts."""

import threading
from collections.abc import Sequence, Set
from typing import Literal

from ...bundle.entries.generation_entry import PROMPT_TOKENS, GenerationEntry
from ...bundle.open_bundle import Bundle
from ...errors import SelectionError
from ...ownership import Owned, Owner
from ..engines.memory import MemoryCap, residencies_for
from ..engines.onnxruntime_gpu.provider import Provider
from ..engines.residency import Residency
from ..engines.runner import EnginePool


class AdmittedEngines(EnginePool):
    """The engines of one bundle, of which an admitted one may be opened. Thread-safe.

    Residencies are decided by the first call, and under a cap by every call that no other generation runs beside: what
    the cap leaves is another each time.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        residency: Residency | Literal["auto"],
        provider: Provider | None,
        affinity: Sequence[int],
        memory: MemoryCap | None,
    ) -> None:
        """``memory`` also counts what else is open."""
        super().__init__(bundle, {}, threads, provider, affinity, memory)
        self._residency = residency
        self._users = Owned[None]()
        self._longest_prompt = Owner()  # of the bytes that it takes, which are kept for later runs
        self._lock = threading.Lock()

    def use(self, owner: Owner) -> None:
        """Until ``owner`` is over no other call decides anew."""
        with self._lock:
            self._users.add(owner, None)

    def admit(self, entry: GenerationEntry, needed_bytes: int) -> Set[str]:
        """The ids of engines that may be open beside ``needed_bytes`` more, for a caller that is in ``use`` of them.
        Raises SelectionError where that is none."""
        with self._lock:
            if not self.residencies or (self._memory is not None and len(self._users.present()) == 1):
                self.reassign(self._decided(entry, needed_bytes))
            return self.residencies.keys()

    def take(self, owner: Owner, count: int, what: str, mend: str) -> None:
        """Counts ``count`` bytes beside the engines until ``owner`` is over. Raises SelectionError, see MemoryCap."""
        if self._memory is not None:
            self._memory.take(owner, count, what, mend)

    def uncounted(self, prompt_bytes: int) -> int:
        """How much of these, for one prompt, no prompt before it has taken."""
        counted = 0 if self._memory is None else self._memory.taken_by(self._longest_prompt)
        return max(0, prompt_bytes - counted)

    def take_prompt(self, prompt_bytes: int, tokens: int) -> None:
        """Counts these bytes from now on, of a prompt of ``tokens``: the memory is kept for later runs. Raises
        SelectionError as ``take``."""
        with self._lock:
            if more := self.uncounted(prompt_bytes):
                what = f"activations for a prompt of {tokens} tokens"
                self.take(self._longest_prompt, more, what, "shorten the prompt")

    def _decided(self, entry: GenerationEntry, needed_bytes: int) -> dict[str, Residency]:
        """Under what the cap leaves beside ``needed_bytes``."""
        memory = self._memory
        if memory is None:
            return residencies_for(self.bundle, entry.every_engine, None, self._residency)
        left_mb = memory.left_mb_without(self.held) - needed_bytes / 1e6
        limit = f"memory_mb={memory.memory_mb:g}, {left_mb:.1f} MB left beside other engines, sessions and this request"
        if left_mb <= 0:
            raise SelectionError(
                f"memory_mb={memory.memory_mb:g}: a cache and buffers of {needed_bytes / 1e6:.1f} MB leave nothing for "
                "engines beside what is open; close a session, ask for fewer rows, a smaller capacity or fewer tokens, "
                "or raise the cap"
            )
        return residencies_for(self.bundle, entry.every_engine, left_mb, self._residency, limit)


def longer_prompt_bytes(entry: GenerationEntry, tokens: int) -> int:
    """Bytes of an encoder's activations for a prompt of ``tokens`` beside the figure of the manifest: at most by the
    square of its length, which is how scores of attention grow."""
    if entry.encoder is None or entry.encoder.input is not None or tokens <= PROMPT_TOKENS:
        return 0
    counted = max(engine.activation_bytes for engine in entry.encoder.engines)
    return counted * (tokens**2 - PROMPT_TOKENS**2) // PROMPT_TOKENS**2
