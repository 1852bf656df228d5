"""k where it is another number than ``ceil(n / r)``, as a checkpoint states it (no torch here).

By the tokens of a row and the reduction: ``{"512": {"3": 192}}``, or ``{"512": {"3": [192, 128]}}`` with a number for
each conditional layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

StatedTokens = Mapping[str, Mapping[str, int | tuple[int, ...]]]


def tokens_of_layers(stated: StatedTokens | None, tokens: int, reduction: int, layers: int) -> tuple[int, ...]:
    """k of each of so many conditional ``layers``, of rows of ``tokens``."""
    found = (stated or {}).get(str(tokens), {}).get(str(reduction), (tokens + reduction - 1) // reduction)
    return found if isinstance(found, tuple) else (found,) * layers


def stated_tokens_problem(stated: StatedTokens, reductions: Sequence[int], layers: int, most_tokens: int) -> str | None:
    """What makes no sense for a model offered at ``reductions`` (falling), as ``key: problem``, or None."""
    for length, by_reduction in stated.items():
        if not _is_number(length, 1, most_tokens):
            return f"{length[:80]!r}: expected the tokens of a row, 1 to {most_tokens}"
        tokens = int(length)
        held = [r for r in reductions if r <= tokens]
        for reduction, count in by_reduction.items():
            where = f"{length}: {reduction[:80]}"
            if not _is_number(reduction, 2, tokens) or int(reduction) not in held:
                offered = ", ".join(str(r) for r in held if r > 1)
                return f"{where}: expected a reduction that is offered, {offered or 'none'}"
            counts = count if isinstance(count, tuple) else (count,) * layers
            if len(counts) != layers:
                return f"{where}: expected a number for each of {layers} conditional layers, got {len(counts)}"
            if outside := [k for k in counts if not 1 <= k <= tokens]:
                return f"{where}: expected 1 to {tokens} tokens, got {outside[0]}"
        by_share = [tokens_of_layers(stated, tokens, r, layers) for r in held]
        for fewer, more, low, high in zip(by_share, by_share[1:], held, held[1:], strict=False):
            if any(a > b for a, b in zip(fewer, more, strict=True)):
                return f"{length}: {low}: selects more tokens of a layer than reduction {high} does"
    return None


def _is_number(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdecimal() and text == str(int(text[:10])) and least <= int(text) <= most
