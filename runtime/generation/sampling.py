"""The next token of a row, picked from the logits ``[V]`` of its last position.

Options apply in transformers' order (``GenerationMixin._get_logits_processor``): repetition penalty, temperature,
top-k, top-p, min-p. A token is drawn by inversion: probabilities are added up in the order of the ids, and the token
is the first whose sum exceeds a uniform number.

**Reproducible.** Row ``r`` under seed ``s`` takes its uniforms from
``PCG64(SeedSequence(s, spawn_key=(r,)))``, one for each token drawn: the upper 53 bits of a raw draw, over 2^53. numpy
promises that stream for every platform and version, and other rows of a batch do not change it. Probabilities are
float64. The last bit of ``exp`` may differ between platforms, and the engine's logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...argument_types import option, take_numbers
from ...errors import InputError

Logits = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked.

    ``temperature`` divides the logits; 0 is greedy: the most likely token, of equal ones the lowest id, whatever
    ``top_k``, ``top_p`` and ``min_p``, which all keep it. ``top_k`` keeps the k most likely tokens and those as
    likely as the last of them, 0 all; ``top_p`` the fewest most likely that have this probability together (Holtzman et
    al. 2020, section 3.1; of equal ones the lowest ids); ``min_p`` those at least this likely in proportion to the most
    likely (Nguyen et al. 2024). ``repetition_penalty`` divides the positive logits of every token that the row already
    has, prompt included, and multiplies its negative ones (Keskar et al. 2019, section 4.1); no finite logit overflows
    of it. Raises InputError for a value out of its range.
    """

    temperature: float = option(
        "Temperature; 0 takes the most likely token. Default: the model's own, else 0.", 0.0, min=0
    )
    top_k: int = option("Draw from the K most likely tokens; 0: from all.", 0, min=0)
    top_p: float = option(
        "Draw from the fewest most likely tokens with this probability together.", 1.0, above=0, max=1
    )
    min_p: float = option("Draw from tokens at least this likely in proportion to the likeliest.", 0.0, min=0, max=1)
    repetition_penalty: float = option(
        "Penalty of tokens that the text already has; above 1 they are less likely.", 1.0, min=1e-6, max=10**6
    )
    seed: int = option("Random seed. Default: 0.", 0, min=0, max=2**63 - 1)

    def __post_init__(self) -> None:
        take_numbers(self, SAMPLING_OPTIONS)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature == 0


SAMPLING_OPTIONS = tuple(each.name for each in fields(Sampling))


class Sampler:
    """Picks the tokens of one row. Not thread-safe: its stream of uniforms moves on with every token drawn.

    ``logits`` is ``[V]`` float32 and is not changed. ``history`` is ``[T]`` int64, the row's tokens so far, prompt
    included, all in 0..V-1; only a repetition penalty reads it. Methods raise InputError if the largest logit is not
    finite.
    """

    def __init__(self, sampling: Sampling, row: int = 0) -> None:
        self.sampling = sampling
        self._row = row
        self._stream = np.random.PCG64(np.random.SeedSequence(sampling.seed, spawn_key=(row,)))

    def pick(self, logits: Logits, history: Ids) -> int:
        """The next token. Greedy uses no uniform, anything else one, and gives what ``draw(probabilities(...))``
        would."""
        logits = self._penalised(logits, history)
        best = self._most_likely(logits)
        if self.sampling.greedy:
            return best
        ids, probabilities = self._kept(logits, logits[best])
        return int(ids[self.draw(probabilities)])

    def probabilities(self, logits: Logits, history: Ids) -> Probabilities:
        """The distribution ``[V]`` that tokens are drawn from, after penalty, temperature and filters; 1 at the most
        likely token if greedy. Speculative sampling accepts and rejects drafted tokens by it."""
        logits = self._penalised(logits, history)
        best = self._most_likely(logits)
        whole = np.zeros(len(logits), np.float64)
        if self.sampling.greedy:
            whole[best] = 1
        else:
            ids, kept = self._kept(logits, logits[best])
            whole[ids] = kept
        return whole

    def draw(self, weights: Probabilities) -> int:
        """The place ``i`` of ``weights`` ``[N]`` (not negative, any positive sum) with probability ``weights[i]`` over
        their sum. Uses one uniform."""
        sums = weights.cumsum()
        # Below the sum even for the largest uniform, so the place found has a weight above 0.
        return int(sums.searchsorted(self.uniform() * sums[-1], side="right"))

    def uniform(self) -> float:
        """The next number of the row's stream, in [0, 1)."""
        return (int(self._stream.random_raw()) >> 11) * 2.0**-53

    def _penalised(self, logits: Logits, history: Ids) -> Logits:
        penalty = self.sampling.repetition_penalty
        if penalty == 1 or not len(history):
            return logits
        seen = logits[history]
        logits = logits.copy()
        logits[history] = np.where(seen < 0, seen * penalty, seen / penalty)  # [T]; once for a token that is repeated
        return logits

    def _most_likely(self, logits: Logits) -> int:
        """The first of the largest logits."""
        best = int(logits.argmax())  # of a NaN, if there is one
        if not math.isfinite(logits[best]):
            raise InputError(
                f"row {self._row}: expected finite logits, the largest is {logits[best]}: the engine overflowed; "
                "generate with a submodel or a precision that does not"
            )
        return best

    def _kept(self, logits: Logits, largest: np.float32) -> tuple[Ids, Probabilities]:
        """The ids that every filter keeps, ``[K]`` in rising order, and their probabilities."""
        options = self.sampling
        ids = np.arange(len(logits))
        if options.top_k:
            ids = _largest(logits, options.top_k)
            logits = logits[ids]
        with np.errstate(over="ignore"):  # of a tiny temperature: exp(-inf) is the 0 that it should be
            weights = np.exp((logits.astype(np.float64) - largest) / options.temperature)  # [K], at most 1
        if options.top_p < 1:
            kept = _nucleus(weights, options.top_p)
            ids, weights = ids[kept], weights[kept]
        if options.min_p > 0:
            kept = np.flatnonzero(weights >= options.min_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights / weights.sum()


@dataclass(frozen=True)
class LogProbabilities:
    """Natural logarithms of the model's own distribution: of ``token``, and of the most likely ones with their ids,
    the most likely first (of equal ones the lowest id)."""

    token: float
    top: tuple[tuple[int, float], ...]


def log_probabilities(logits: Logits, token: int, top: int = 0) -> LogProbabilities:
    """Log-probabilities of ``token`` and of the ``top`` most likely tokens (at most V), by the model's own
    distribution: before penalty, temperature and filters. ``logits`` is ``[V]`` float32 with a finite largest one."""
    largest = logits.max()
    weights = np.exp(logits.astype(np.float64) - largest)
    scale = float(largest) + math.log(weights.sum())  # log of the sum of exp(logits)
    best: list[int] = []
    if top > 0:
        ids = _largest(logits, top)
        best = ids[np.argsort(-logits[ids], kind="stable")][:top].tolist()
    return LogProbabilities(float(logits[token]) - scale, tuple((i, float(logits[i]) - scale) for i in best))


def _largest(logits: Logits, k: int) -> Ids:
    """Ids of the ``k`` largest logits and of those equal to the last of them, in rising order."""
    if k >= len(logits):
        return np.arange(len(logits))
    return np.flatnonzero(logits >= np.partition(logits, -k)[-k])


def _nucleus(weights: Probabilities, top_p: float) -> Ids:
    """Places of the fewest largest ``weights`` that have ``top_p`` of their sum, in rising order."""
    whole = weights.sum()
    wanted = top_p * whole
    # The smallest have together at most what is left out if each has less than its N-th part: they need no sorting.
    likely = weights[weights >= (whole - wanted) / len(weights)]
    falling = np.sort(likely)[::-1]  # values alone: sorting places takes twenty times as long
    before = np.concatenate(([0.0], falling.cumsum()[:-1]))  # sum of the larger ones
    count = int(before.searchsorted(wanted))
    least = falling[count - 1]
    kept = weights > least
    alike = np.flatnonzero(weights == least)
    kept[alike[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


class Drafted(NamedTuple):
    """A drafted token, with the distribution ``[V]`` that it was drawn from; None where chance had no part in it.

    A token drawn from a draft's distribution ``q`` is accepted with probability ``min(1, p/q)``, where ``p`` is the
    checking submodel's; one that is not is replaced by a draw from ``max(0, p - q)``. The outcome is distributed as
    ``p`` (Leviathan et al. 2023, theorem 3.5; Chen et al. 2023). Both distributions are those after penalty,
    temperature and filters.
    """

    token: int
    probabilities: Probabilities | None = None


def draw_draft(sampler: Sampler, logits: Logits, history: Ids) -> Drafted:
    """The draft's next token by its ``logits`` ``[V]`` behind ``history``, the tokens drafted before included."""
    if sampler.sampling.greedy:
        return Drafted(sampler.pick(logits, history))
    probabilities = sampler.probabilities(logits, history)
    return Drafted(sampler.draw(probabilities), probabilities)


def pick_checked(sampler: Sampler, logits: Logits, history: Ids, drafted: Drafted) -> int:
    """The next token by the checking submodel's ``logits`` ``[V]``: the drafted one where it is accepted, else
    never that one."""
    if sampler.sampling.greedy:
        return sampler.pick(logits, history)
    own = sampler.probabilities(logits, history)
    token, draft = drafted
    if draft is None:
        draft = np.zeros_like(own)
        draft[token] = 1
    rest = np.maximum(own - draft, 0)
    # The sum is 0 where both are the same but for rounding.
    if sampler.uniform() * draft[token] < own[token] or not rest.any():
        return token
    return sampler.draw(rest)
