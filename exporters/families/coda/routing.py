"""Which k tokens of each row a conditional layer computes, and how much of what it computes they get.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden, ``k`` tokens that are selected.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...modules.top_tokens import highest
from ...onnx_translations import add_rows, one_hot, table_rows
from .config import CodaConfig, SoftTopK
from .ops import COMBINE, DISPATCH

# The score of padding: below every token's and finite, so that a row of nothing but padding gives no NaN.
_SCORE_OF_PADDING = -1e9


@dataclass(frozen=True)
class Selection:
    """The tokens of one layer in one pass.

    ``ranked`` [B, n] is what the choice compares. ``own`` [B, k] are the tokens that the router chooses, by falling
    rank, ``chosen`` those that were computed: the same unless others were given. ``gates`` [B, k] are those of
    ``chosen``, 0 for padding.
    """

    ranked: torch.Tensor
    own: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor


class Router(torch.nn.Module):
    """``weight`` [d], of routers that compare scores; in float32 or wider, whatever the rest computes in. A soft top-k
    has its ``temperatures`` beside it, which tasks on one frozen model differ in.

    ``choose(scores, k)`` gives the places of the highest.
    """

    choose: Callable[[torch.Tensor, int], torch.Tensor]
    temperatures: torch.Tensor

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        self.config = config
        self.choose = highest
        if config.has_scores:
            self.weight = torch.nn.Parameter(torch.empty(config.hidden_size))
        schedule = config.soft_top_k
        if schedule is not None:  # [rounds + 1]; values even where parameters are built without any
            values = torch.tensor(schedule.all_temperatures, dtype=torch.float32, device="cpu")
            self.register_buffer("temperatures", values, persistent=False)

    def forward(
        self, normed: torch.Tensor, is_token: torch.Tensor | None, count: int, given: torch.Tensor | None = None
    ) -> Selection:
        """The ``count`` tokens of ``normed`` [B, n, d], of which ``is_token`` [B, n] says what is no padding (None:
        nothing is); ``given`` [B, k] replaces the router's own."""
        if self.config.route_padding:
            is_token = None
        if not self.config.has_scores:
            return self._first(normed, is_token, count)
        dtype = torch.promote_types(normed.dtype, torch.float32)
        # By a matrix of one column: ONNX Runtime takes ten times as long for a product with a vector.
        scores = (normed.to(dtype) @ self.weight.to(dtype)[:, None])[..., 0]  # [B, n]
        if is_token is not None:
            scores = torch.where(is_token, scores, _SCORE_OF_PADDING)
        schedule = self.config.soft_top_k
        gates = scores.sigmoid() if schedule is None else soft_top_k(scores, count, schedule, self.temperatures)
        if is_token is not None:
            gates = gates * is_token.to(dtype)
        ranked = scores if self.config.selected_by == "scores" else gates
        own = self.choose(ranked, count)
        chosen = own if given is None else given
        return Selection(ranked, own, chosen, gates.gather(-1, chosen).to(normed.dtype))

    def _first(self, normed: torch.Tensor, is_token: torch.Tensor | None, count: int) -> Selection:
        """The first ``count`` tokens of each row, then padding, wherever that stands."""
        rows, tokens = normed.shape[:2]
        if is_token is None:
            places = torch.arange(count, device=normed.device).expand(rows, count)
            gates = torch.ones_like(normed[..., 0])  # [B, n]
            return Selection(gates, places, places, gates[:, :count])
        place = torch.arange(tokens, dtype=torch.float32, device=normed.device)
        ranked = torch.where(is_token, -place, -place - tokens)  # [B, n], no two alike
        own = self.choose(ranked, count)
        return Selection(ranked, own, own, is_token.to(normed.dtype).gather(-1, own))


def soft_top_k(
    scores: torch.Tensor, count: int, schedule: SoftTopK, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """``scores`` [..., n] (float32 or wider) to gates [..., n] between 0 and 1 whose sum comes close to ``count``:
    ``argmax sum(s * g) + epsilon * H(g)`` over gates of sum k, in T rounds.

    ``temperatures`` [T + 1] are those of the rounds and of the gates, in place of the ``schedule``'s. The rounds are
    part of the model, not a solver: how far they come is what was trained. In place of the paper's two vectors a and b
    the state is one number for each row, ``c = -a`` (b follows from it): an equivalent form whose exponents are at most
    0, so that nothing overflows. With u = s, or 0 where b starts at minus the scores:

        T times, at temperature e:   c = e (ln sum exp(u / e) - ln k),   u = min(s, c)
        gates = exp(min(s - c, 0) / epsilon)

    In a graph a round costs by its operations, not by its numbers. So c is kept in units of the temperature to come,
    where ``x = min(s, c) / e`` is compared and summed without a product, and ``- ln k`` is not subtracted from round to
    round but put into the scores of every round beforehand: they are shifted by
    ``o_t = -ln k (e_t + ... + e_(T-1)) / e_t``, so that what is left of all shifts at the end is 0. The sum is read off
    a log-softmax, ``x - log_softmax(x)``, which keeps its exponents at most 0 in every engine.
    """
    if temperatures is None:
        temperatures = torch.tensor(schedule.all_temperatures, dtype=scores.dtype)
    given = temperatures.to(scores.dtype)
    rounds = given[:-1]
    # A traced row of any length has a count that the graph computes.
    share = torch.full((), count, dtype=scores.dtype).log() if isinstance(count, torch.SymInt) else math.log(count)
    shifts = torch.cat([rounds.flip(0).cumsum(0).flip(0) / rounds * -share, torch.zeros_like(given[-1:])])
    ratios = rounds / given[1:]  # of each temperature to the next
    each = (-1, *(1 for _ in scores.shape))
    first, *others = torch.split(scores / given.view(each) + shifts.view(each), 1)  # T + 1 of [1, ..., n]
    x = first if schedule.initial == "zero" else torch.zeros_like(first) + shifts[:1]
    level = x
    for number, shifted in enumerate(others):
        # One by one, which the compiler folds where they are constants; not so a split.
        level = (x - x.log_softmax(-1)) * ratios[number : number + 1]
        x = torch.minimum(shifted, level)
    return (x - level).exp()[0]


class Rows:
    """Selected tokens [B, k] read out of all, and what was made of them added back; no token is selected twice, so that
    no two additions meet.

    As the model is written: by rows of one table of all tokens, which torch moves and differentiates whole; by
    places of single numbers a step of training took a third longer."""

    def read(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """``tokens`` [B, n, d] to the selected ones [B, k, d]."""
        return functional.embedding(table_rows(places, tokens.shape[1]), tokens.flatten(0, 1))

    def add(self, tokens: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``tokens`` [B, n, d] with ``values`` [B, k, d] added to the selected ones."""
        rows = table_rows(places, tokens.shape[1]).flatten()
        return tokens.flatten(0, 1).index_add(0, rows, values.flatten(0, 1)).view_as(tokens)


class TracedRows(Rows):
    """The same in the variants ``coda.dispatch`` and ``coda.combine`` of an engine."""

    def __init__(self, variants: Mapping[str, str]) -> None:
        self.dispatch, self.combine = variants[DISPATCH], variants[COMBINE]

    def read(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if self.dispatch == "one_hot":
            return one_hot(places, tokens.shape[1]) @ tokens
        return super().read(tokens, places)

    def add(self, tokens: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.combine == "one_hot":
            return tokens + one_hot(places, tokens.shape[1]).transpose(1, 2) @ values
        rows = table_rows(places, tokens.shape[1])
        added: torch.Tensor = add_rows(tokens.flatten(0, 1), rows.flatten(), values.flatten(0, 1))
        return added.view_as(tokens)
