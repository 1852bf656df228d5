"""Outputs of two models compared by hand-checkable formulas; figures are gathered batch by batch, so that no more than
one batch of either output is ever held.

Logits are ``[..., V]``, whose functions reduce the last dimension; embeddings are rows ``[n, H]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...bundle.entries.tensor_spec import Role, TensorSpec
from ...bundle.figures import NEIGHBOURS, RECALL, recall_in
from ...errors import InputError
from ..inputs.arrays import Array
from .samples import Batch

# Scores of this many rows against all others are held at once.
_ROWS_SCORED_AT_ONCE = 256
# Logits of this many values are widened to float64 at once: so few stay in the processor's cache on their way through.
_VALUES_WIDENED_AT_ONCE = 2**17


class VectorTally:
    """Cosine and neighbours of embeddings ``[B, H]``, or of ``[B, S, H]`` averaged over the positions that count; the
    neighbours also by the first numbers alone, as many as each of the output's dimensions.

    It takes both models' outputs of each batch, the universal model's first, and ends with figures by name.
    ``positions`` is how many were compared, None for outputs without positions. Outputs that are not finite, and
    samples without any position, raise InputError.
    """

    positions: int | None = None

    def __init__(self, spec: TensorSpec) -> None:
        self._output = spec.name
        self._cuts = (spec.dimensions or ())[1:]
        self._rows: tuple[list[Array], list[Array]] = ([], [])

    def add(self, batch: Batch, reference: Array, found: Array) -> None:
        for kept, output in zip(self._rows, (reference, found), strict=True):
            rows = output[: batch.rows].astype(np.float64)
            if rows.ndim == 3:  # [rows, S, H]
                weights = batch.counted[:, :, None]
                rows = np.where(weights, rows, 0.0).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)
            kept.append(_finite(rows, self._output))

    def figures(self) -> dict[str, SampleMean]:
        reference, found = (np.concatenate(rows) for rows in self._rows)
        figures = {"mean_cosine": mean_over(cosines(reference, found))}
        for name, rows in {RECALL: found, **{recall_in(cut): found[:, :cut] for cut in self._cuts}}.items():
            recalls = recalls_at(reference, rows, NEIGHBOURS) if len(reference) > 1 else np.ones(1)
            figures[name] = mean_over(recalls)
        return figures


class DistributionTally:
    """Choices and divergences of logits ``[B, V]`` or ``[B, S, V]``, over every position that counts; see
    ``VectorTally``.

    For ``next_tokens`` a position counts where the text goes on: what follows the last token of a text is not known.
    """

    def __init__(self, role: Role, spec: TensorSpec, ids: TensorSpec | None) -> None:
        self._role, self._output = role, spec.name
        self._ids = ids if role == "next_tokens" else None
        self._per_position = "sequence" in spec.dims
        self._sums: list[Array] = []  # of each sample: positions, choices alike, both divergences, losses
        self._prefixes: list[int] = []
        self._right: list[Array] = []

    @property
    def positions(self) -> int | None:
        return int(sum(sums[0] for sums in self._sums)) if self._per_position else None

    def add(self, batch: Batch, reference: Array, found: Array) -> None:
        counted, following = batch.counted, None
        if self._ids is not None:
            counted, following = counted[:, :-1] & counted[:, 1:], batch.feeds[self._ids.name][:, 1:]
        elif not self._per_position:
            counted, reference, found = np.ones((batch.rows, 1), bool), reference[:, None], found[:, None]
        for row in range(batch.rows):
            parts = [
                self._compare(reference[row, at], found[row, at], None if following is None else following[row, at])
                for at in _parts(np.flatnonzero(counted[row]), reference.shape[-1])
            ]
            if parts:
                self._sums.append(np.sum([sums for _, sums in parts], axis=0))
                self._prefixes.append(prefix_length(np.concatenate([same for same, _ in parts])))
        if batch.labels is not None:
            self._right.append(found[: batch.rows, 0].argmax(axis=-1) == batch.labels)

    def _compare(self, reference: Array, found: Array, truth: Array | None) -> tuple[Array, Array]:
        """Positions with logits ``[n, V]``: where both choose alike, ``[n]``, and what they add to a sample's sums."""
        p, q = (log_softmax(_finite(logits, self._output)) for logits in (found, reference))
        loss = 0.0 if truth is None else negative_log_likelihood(p, truth).sum()
        same = same_choice(reference, found)
        return same, np.array([len(same), same.sum(), kl_divergence(p, q).sum(), kl_divergence(q, p).sum(), loss])

    def figures(self) -> dict[str, SampleMean]:
        if not self._sums:
            raise InputError("no sample has a position to compare; to a language model a text of one token is none")
        counts, same, small, universal, losses = np.array(self._sums).T
        figures = {
            "class_agreement" if self._role == "classes" else "token_agreement": SampleMean(same, counts),
            "kl_small_to_universal": SampleMean(small, counts),
            "kl_universal_to_small": SampleMean(universal, counts),
        }
        if self._right:
            figures["accuracy"] = mean_over(np.concatenate(self._right))
        if self._ids is not None:
            figures["matched_prefix"] = mean_over(np.array(self._prefixes))
            figures["loss"] = SampleMean(losses, counts)
        return figures


Tally = VectorTally | DistributionTally


def tally_for(role: Role, spec: TensorSpec, ids: TensorSpec | None) -> Tally:
    """The tally of one output; ``ids`` is the input whose tokens an output of ``next_tokens`` foretells."""
    return VectorTally(spec) if role == "embedding" else DistributionTally(role, spec, ids)


@dataclass(frozen=True)
class SampleMean:
    """The sum of a figure for every sample and over how many ``counts`` (positions, or 1), float64 ``[n]``."""

    totals: Array
    counts: Array

    @property
    def mean(self) -> float:
        """Over all counts, so that a sample of more positions counts more."""
        return float(self.totals.sum() / self.counts.sum())

    @property
    def error(self) -> float | None:
        """Its standard error, of samples drawn independently (positions of one are not); None of a single sample.

        That of a ratio of sums, to first order: Cochran, Sampling Techniques, section 6.3.
        """
        samples = len(self.counts)
        if samples < 2:
            return None
        rest = self.totals - self.mean * self.counts
        return float(np.sqrt(samples / (samples - 1) * np.square(rest).sum()) / self.counts.sum())


def mean_over(values: Array) -> SampleMean:
    """Mean of one value a sample, ``[n]``."""
    return SampleMean(values.astype(np.float64), np.ones(len(values)))


def log_softmax(logits: Array) -> Array:
    """Log-probabilities ``[..., V]`` in nats, float64; logits of any finite size neither overflow nor vanish."""
    shifted: Array = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(p: Array, q: Array) -> Array:
    """``KL(P || Q)`` ``[...]`` in nats, of log-probabilities ``[..., V]``; exactly 0 where both are the same."""
    divergence: Array = np.sum(np.exp(p) * (p - q), axis=-1)
    return np.maximum(divergence, 0.0)  # below 0 is rounding


def same_choice(reference: Array, found: Array) -> Array:
    """Whether both logits are largest at the same place ``[...]``; among equal ones the first counts."""
    return reference.argmax(axis=-1) == found.argmax(axis=-1)


def negative_log_likelihood(p: Array, truth: Array) -> Array:
    """``-log P(truth)`` ``[...]`` in nats, of log-probabilities ``[..., V]`` and whole numbers ``[...]``."""
    taken: Array = np.take_along_axis(p, truth[..., None], axis=-1)
    return -taken[..., 0]


def prefix_length(same: Array) -> int:
    """How many of the booleans ``[n]`` are true before the first that is not."""
    differing = np.flatnonzero(~same)
    return int(differing[0]) if len(differing) else len(same)


def cosines(reference: Array, found: Array) -> Array:
    """Cosine similarity of rows ``[n, H]``, float64 ``[n]``; of a row of zeros it is 0."""
    return np.sum(unit(reference) * unit(found), axis=1)


def recalls_at(reference: Array, found: Array, k: int) -> Array:
    """Share of each row's ``k`` nearest others by ``reference`` that are among its ``k`` by ``found``, float64 ``[n]``.

    Nearness is cosine similarity, of equal ones the earlier row is nearer; ``k`` is at most ``n - 1``.
    """
    k = min(k, len(reference) - 1)
    near = [_nearest(rows, k) for rows in (reference, found)]
    return np.array([len(set(a) & set(b)) / k for a, b in zip(*near, strict=True)])


def unit(rows: Array) -> Array:
    """Rows ``[n, H]`` of length 1, float64."""
    wide = rows.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


def _nearest(rows: Array, k: int) -> list[list[int]]:
    directions = unit(rows)
    nearest: list[list[int]] = []
    for start in range(0, len(rows), _ROWS_SCORED_AT_ONCE):
        scores = directions[start : start + _ROWS_SCORED_AT_ONCE] @ directions.T  # [rows, n]
        own = np.arange(len(scores))
        scores[own, start + own] = -np.inf
        nearest += np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
    return nearest


def _parts(steps: Array, values: int) -> Iterator[Array]:
    """``steps`` in parts of so few that their logits of ``values`` each are cheap to widen."""
    size = max(1, _VALUES_WIDENED_AT_ONCE // values)
    for start in range(0, len(steps), size):
        yield steps[start : start + size]


def _finite(values: Array, output: str) -> Array:
    if not np.isfinite(values).all():
        raise InputError(f"output {output} is not finite where it counts, so nothing can be compared")
    return values
