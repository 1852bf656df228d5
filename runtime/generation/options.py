"""The request of a generation: a prompt and options, each stated once and checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ...argument_types import again, document_fields, option, require_types, take_numbers
from ...errors import CapacityError, InputError, SelectionError
from ..inputs.options import BUDGET, SUBMODEL, TASK
from .sampling import SAMPLING_OPTIONS, Sampling
from .session import Session
from .text_stream import Stops

# A text, or its tokens; or the array that an encoder reads.
Prompt = str | Sequence[int] | np.ndarray[Any, Any]
# A draft beside submodels and n-grams: whichever of them pays.
AUTO = "auto"
# Name of the draft that looks tokens up in the text itself.
NGRAM = "n-gram"
DEFAULT_TOKENS = 256
_CHOICES = ("session", "decoder_prompt", "stop", "budget", "submodel", "draft", "task")
_COUNTS = ("max_tokens", "logprobs", "capacity", "drafted")
_LIMITS = ("memory_mb", "tokens_per_second", "deadline_ms")


def _sampled(name: str) -> Any:
    """A field that is None where the model's own settings count, with the bounds and help of Sampling's."""
    return again(Sampling.__dataclass_fields__[name], default=None)


@document_fields
@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue (a text, or its token ids), or several, a row each; or ``messages``, a chat,
    ``[{"role": ..., "content": ...}]``, by the model's chat template. A model whose encoder reads an
    array, such as Whisper's, takes that as prompts, rows first.

    In a ``session`` prompt ``n`` is the whole text of row ``n``, earlier turns included, and what it has in common with
    what is there is not computed again. At most one of a ``budget``, a ``submodel`` and limits (``memory_mb``, and
    ``tokens_per_second`` or ``deadline_ms``) says which submodel generates; without any the largest does. A ``draft``
    changes no text, and where tokens are drawn not their distribution; it is not for limits, by which the submodel may
    change. Options of sampling are by default as the model's folder states them, else greedy. Raises InputError,
    SelectionError.
    """

    prompt: Prompt | Sequence[Prompt] | None = None
    _: KW_ONLY
    messages: Sequence[Mapping[str, str]] | None = None
    session: Session | None = None
    decoder_prompt: str | Sequence[int] | None = option(
        "Tokens that the decoder of an encoder-decoder begins with, such as those of language and task; in Python also "
        "as text. Default: the model's own."
    )
    max_tokens: int | None = option("Maximum number of new tokens. Default: what fits, at most 256.", min=1)
    temperature: float | None = _sampled("temperature")
    top_k: int | None = _sampled("top_k")
    top_p: float | None = _sampled("top_p")
    min_p: float | None = _sampled("min_p")
    repetition_penalty: float | None = _sampled("repetition_penalty")
    seed: int | None = _sampled("seed")
    stop: str | int | Sequence[str | int] = option(
        "Text, or token id, that ends a row beside the model's own end tokens; or several.", default=()
    )
    logprobs: int | None = option(
        "Log-probabilities of the tokens, and of the N most likely ones.", min=0, max=100, metavar="N"
    )
    budget: str | None = again(BUDGET)
    submodel: str | None = again(SUBMODEL)
    memory_mb: float | None = option("Memory limit of a submodel with its KV cache, in MB.", above=0, unit="MB")
    tokens_per_second: float | None = option(
        "Rate of each row, in tokens/s: each token comes from the largest submodel that keeps it.",
        above=0,
        unit="tokens/s",
    )
    deadline_ms: float | None = option(
        "Time limit of all tokens from the call on, the prompt included, in ms: each token comes from the largest "
        "submodel that keeps it.",
        above=0,
        unit="ms",
    )
    capacity: int | None = option(
        "Tokens of a row that the KV cache has room for. Default: what the request needs.", min=2
    )
    draft: str | None = option(
        "Speculative decoding of one row: a smaller submodel, by id or label, drafts tokens that one run checks; or "
        "n-gram, the text itself where it repeats; or auto, whichever is expected to be fastest.",
        metavar="ID|n-gram|auto",
    )
    drafted: int | None = option(
        "Number of tokens drafted in a run. Default: 4; with auto at most 8.", min=1, metavar="N"
    )
    task: str | None = again(TASK)

    def __post_init__(self) -> None:
        require_types(type(self), {name: getattr(self, name) for name in _CHOICES})
        take_numbers(self, _COUNTS)
        take_numbers(self, _LIMITS, SelectionError)
        chosen = [name for name in ("budget", "submodel", *_LIMITS) if getattr(self, name) is not None]
        if len(chosen) > 1 and not set(chosen) <= set(_LIMITS):
            raise SelectionError(f"generate with {', '.join(chosen)}: expected a budget, or a submodel, or limits")
        if self.tokens_per_second is not None and self.deadline_ms is not None:
            raise SelectionError("expected at most one of `tokens_per_second` and `deadline_ms`")
        if self.draft is None and self.drafted is not None:
            raise InputError(f"drafted {self.drafted}: by no draft; name one with `draft`")
        if self.draft is not None and set(chosen) & set(_LIMITS):
            raise SelectionError(
                f"generate with draft, {', '.join(chosen)}: limits may change the submodel at every token, a draft is "
                "checked by one; ask for either"
            )
        _ = self.sampling({}), self.stops_beside(())  # they check themselves

    @property
    def is_timed(self) -> bool:
        """Whether tokens are promised in time, so that the submodel may change from one to the next."""
        return self.tokens_per_second is not None or self.deadline_ms is not None

    def sampling(self, own: Mapping[str, float]) -> Sampling:
        """As requested; what was not, as in the model's ``own`` settings."""
        found: dict[str, Any] = {}
        for name in SAMPLING_OPTIONS:
            requested = getattr(self, name)
            if requested is not None:
                found[name] = requested
            elif name in own:
                value = own[name]  # a manifest has no whole numbers here
                found[name] = int(value) if name in ("top_k", "seed") and value == value // 1 else value
        return Sampling(**found)

    def stops_beside(self, end_ids: Iterable[int]) -> Stops:
        """The requested stops and ``end_ids``."""
        stops = self.stop if isinstance(self.stop, Sequence) and not isinstance(self.stop, str) else [self.stop]
        ids = frozenset(int(stop) for stop in stops if not isinstance(stop, str))
        return Stops(ids | {*end_ids}, tuple(stop for stop in stops if isinstance(stop, str)))

    def tokens_for(self, longest: int, capacity: int, limit: str) -> int:
        """How many tokens a row may get behind a prompt of ``longest`` tokens. Raises CapacityError for more than there
        is room for by ``limit``, which has ``capacity``."""
        room = capacity - longest
        wanted = self.max_tokens or max(1, min(DEFAULT_TOKENS, room))
        if wanted > room:
            raise CapacityError(
                f"prompt: {longest} tokens and `max_tokens={wanted}` are more than {limit}; shorten the prompt or ask "
                "for fewer tokens"
            )
        return wanted
