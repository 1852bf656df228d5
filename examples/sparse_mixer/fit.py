"""Training of one masked-token model: recipe, first weights, steps, and how good it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.sparse_mixer.config import Router, SparseMixerConfig
from ...exporters.families.sparse_mixer.mixing import LinearMixing
from ...exporters.families.sparse_mixer.model import ProjectedEmbeddings, SparseMixer
from ...exporters.families.sparse_mixer.moe import DROPPED, Experts, MoE, Routes, first_choice
from ...exporters.modules.attention import NestedAttention
from ...exporters.modules.layers import Ffn, MaskedLmHead
from ..byte_windows import MaskedBytes, MaskedRows, read_masked_bytes
from ..python_text import byte_tokenizer
from ..training import Record, decay_groups, descend, one_thread, parameters_of, quality_of, replace_folder, seconds_of

_BETAS = (0.9, 0.98)
_TABLE_SPREAD = 0.02
# Gain of a sublayer: what it adds to its input is smaller than that.
_GAIN = 0.5
# Tokens; a mixing layer begins by looking at about so many to either side.
_REACH = 2.0
# The slowest wave of positions over the fastest, which turns by one radian a token: no longer than a row.
_LONGEST = 30.0
# Factor of positions in queries and keys: a head begins with a token and a little of those beside it.
_FOCUS = 2.0


@dataclass(frozen=True)
class Recipe:
    """``steps`` steps of AdamW over ``batch`` rows each, alike for every model; ``share`` of a row's bytes is hidden.

    ``held_out`` rows of each held-out part judge.
    """

    steps: int
    batch: int
    decay: float
    share: float
    held_out: int


@dataclass(frozen=True)
class Subject:
    """A model to train, and the ``rate`` of its AdamW at most."""

    config: SparseMixerConfig
    rate: float


RECIPE = Recipe(steps=1600, batch=8, decay=0.05, share=0.15, held_out=512)
# The paper's Small layout, with attention above the experts as in its Base: 8 rows of 128 tokens make one group, as
# its 8 rows of 512 did.
SPARSE_MIXER = SparseMixerConfig(
    vocab_size=257,  # bytes and the mask
    hidden_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=128,
    type_vocab_size=1,
    mixing="linear",
    attention_layers=(4, 5),
    moe_layers=(2, 3),
    num_experts=8,
    router="experts_choose",
    group_size=1024,
    group_sizes=(128, 512, 1024),
    expert_counts=(2, 4, 6, 8),
    head="masked_lm",
)
TOKENS_CHOOSE = replace(SPARSE_MIXER, router="tokens_choose", expert_counts=None)
# As deep and as wide, every layer with attention and a dense FFN: as many parameters outside the experts.
BERT = replace(
    SPARSE_MIXER,
    attention_layers=tuple(range(SPARSE_MIXER.num_hidden_layers)),
    moe_layers=(),
    num_experts=0,
    group_sizes=None,
    expert_counts=None,
)
# By folder name. Half the rate for the BERT: of trainings of 300 steps, that at 1e-3 had learnt nothing (12 % right on
# validation rows, which the commonest byte alone gives), and that at 5e-4 had begun to (20 %).
MODELS = {
    "sparse-mixer": Subject(SPARSE_MIXER, 1e-3),
    "tokens-choose": Subject(TOKENS_CHOOSE, 1e-3),
    "bert": Subject(BERT, 5e-4),
}


def fit(
    model: SparseMixer,
    batches: Iterable[MaskedRows],
    recipe: Recipe,
    rate: float,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Trains ``model`` in place, one step a batch, on the cross-entropy of the hidden bytes and its routers' losses."""
    groups = decay_groups(model.named_parameters(), rate, recipe.decay)
    descend(groups, _BETAS, (partial(loss, model, batch) for batch in batches), recipe.steps, on_step)


def loss(model: SparseMixer, rows: MaskedRows) -> torch.Tensor:
    """Mean cross-entropy in nats of the hidden bytes, and the losses of the routers, as their weights have them."""
    logits, routes = answers(model, rows)
    nats = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten())
    return nats + routing_loss(routes.values(), model.config.router)


def answers(model: SparseMixer, rows: MaskedRows) -> tuple[torch.Tensor, dict[int, Routes]]:
    """Logits [N, K, V] of the chosen positions of ``rows``, and the routes by layer."""
    (logits,), routes = model.routed(rows.inputs, torch.zeros_like(rows.inputs))
    return rows.asked(logits), routes


@torch.no_grad()
def quality(model: SparseMixer, rows: MaskedRows, batch: int) -> Record:
    """``accuracy`` and ``loss`` (nats) of the hidden bytes of all ``rows``, read ``batch`` at a time, and by layer of
    experts the share of tokens that none computed, ``dropped``."""
    shares: dict[str, list[float]] = defaultdict(list)

    def answered() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in rows.parts(batch):
            logits, routes = answers(model, part)
            for layer, found in routes.items():
                shares[str(layer)].append(dropped_share(found))
            yield logits, part.targets

    found = quality_of(answered())
    return {**found, "dropped": {layer: sum(each) / len(each) for layer, each in shares.items()}}


def dropped_share(routes: Routes) -> float:
    """Share of the tokens that no expert computed."""
    groups, tokens = routes.scores.shape[:2]
    if routes.chosen.ndim == 2:  # [G, T], the expert of each token
        return float((routes.chosen == DROPPED).double().mean())
    taken = torch.zeros(groups, tokens, dtype=torch.bool).scatter_(1, routes.chosen.flatten(1), True)
    return 1 - float(taken.double().mean())


@torch.no_grad()
def draw_start(model: SparseMixer) -> None:
    """Draws all matrices anew, from torch's own random numbers; biases stay 0 and norms 1."""
    for part in model.modules():
        match part:
            case ProjectedEmbeddings():
                assert part.position is not None
                waves = _waves(part.position.weight.shape[0], model.config.head_dim)
                torch.nn.init.zeros_(part.position.weight)[:, : waves.shape[1]] = waves
                torch.nn.init.normal_(part.word.weight, std=_TABLE_SPREAD)[:, : waves.shape[1]] = 0
                torch.nn.init.eye_(part.projection.weight)  # so that attention finds the waves where they are
            case LinearMixing():
                part.sequence.copy_(_local(part.sequence.shape[0]))
                _draw(part.hidden, gain=_GAIN)
            case NestedAttention():
                _look_beside(part)
                _draw(part.value.weight)
                _draw(part.output.weight, gain=_GAIN)
            case Ffn():
                _draw(part.up.weight)
                _draw(part.down.weight, gain=_GAIN)
            case Experts():
                for up, down in zip(part.up_weight, part.down_weight, strict=True):
                    _draw(up.T)
                    _draw(down.T)  # a gate of about a half stands for the gain
            case MaskedLmHead():
                _draw(part.transform.weight)


def _draw(weight: torch.Tensor, gain: float = 1.0) -> None:
    """Keeps the size of what ``weight`` [out, in] is applied to, times ``gain``."""
    weight.normal_(std=gain * weight.shape[1] ** -0.5)


def _local(length: int) -> torch.Tensor:
    """A matrix [length, length] that weighs neighbours by a random function of their distance, fading with it."""
    distance = torch.arange(1 - length, length)
    weights = torch.randn(2 * length - 1) * torch.exp(-distance.abs() / _REACH)
    place = torch.arange(length)
    matrix: torch.Tensor = (weights / weights.norm())[place[None] - place[:, None] + length - 1]
    return matrix


def _look_beside(attention: NestedAttention) -> None:
    """Heads that begin with the tokens before, after, two before and so on: queries and keys read positions alone, and
    keys take theirs for one beside it."""
    size = attention.head_dim
    for part in (attention.query, attention.key):
        torch.nn.init.zeros_(part.weight)
    for head in range(attention.query.weight.shape[0] // size):
        rows = slice(head * size, (head + 1) * size)
        offset = (1 + head // 2) * (-1 if head % 2 else 1)
        attention.query.weight[rows, :size] = _FOCUS * torch.eye(size)
        attention.key.weight[rows, :size] = _FOCUS * _shift(size, offset)


def _waves(length: int, width: int) -> torch.Tensor:
    """Sines and cosines of the position [length, width], as large as the other tables."""
    angles = torch.arange(length)[:, None] * _rates(width)
    return _TABLE_SPREAD * 2**0.5 * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def _shift(width: int, offset: int) -> torch.Tensor:
    """The matrix [width, width] that makes the waves of a position those of the one ``offset`` further."""
    turn, sine = offset * _rates(width), torch.arange(0, width, 2)
    matrix = torch.zeros(width, width)
    matrix[sine, sine] = matrix[sine + 1, sine + 1] = turn.cos()
    matrix[sine, sine + 1], matrix[sine + 1, sine] = turn.sin(), -turn.sin()
    return matrix


def _rates(width: int) -> torch.Tensor:
    """Radians per token of the waves in ``width`` (even) dimensions."""
    rates: torch.Tensor = _LONGEST ** -(torch.arange(width // 2) / (width // 2))
    return rates


@dataclass(frozen=True)
class Run:
    """``model`` names the subject; ``folder`` is where the model is published, if it is."""

    model: str
    subject: Subject
    seed: int
    folder: Path | None = None

    @property
    def name(self) -> str:
        return self.model if not self.seed else f"{self.model} seed {self.seed}"


@dataclass(frozen=True)
class Trainer:
    """Trains any run on the data that the ``recipe`` names; ``stdlib`` is where that is read, if not in this Python."""

    recipe: Recipe
    window: int
    stdlib: Path | None = None

    def data(self) -> MaskedBytes:
        """The same on every call."""
        return read_masked_bytes(self.window, self.recipe.share, self.recipe.held_out, self.stdlib)

    def __call__(self, run: Run) -> Record:
        """Trains and measures. The record has the ``parameters``, the ``seconds`` of a core that training alone took,
        and the ``quality`` of every budget on the validation and the test rows."""
        with one_thread():
            data = self.data()
            torch.manual_seed(run.seed)
            config = run.subject.config
            model = SparseMixer(config)
            draw_start(model)
            batches = data.batches(self.recipe.batch, self.recipe.steps, run.seed)
            seconds = seconds_of(model, lambda: fit(model, batches, self.recipe, run.subject.rate))
            if run.folder is not None:
                files = {"tokenizer.json": byte_tokenizer(["[MASK]"]).to_str()}
                replace_folder(run.folder, lambda beside: save_model(model, config, beside, files))
            parts = {"validation": data.validation, "test": data.test}
            figures = [
                {"budget": budget} | {part: quality(model, rows, self.recipe.batch) for part, rows in parts.items()}
                for budget in budgets(model)
            ]
        return {"parameters": parameters_of(model), "seconds": seconds, "quality": figures}


def budgets(model: SparseMixer) -> Iterator[str]:
    """Sets ``model`` to one budget after the other and gives its name: every capacity offered in the trained group,
    then every smaller group at the trained capacity. A model without experts has one."""
    config = model.config
    if not config.moe_layers:
        yield "whole"
        return
    offered = config.choices
    capacities = offered.get("moe.capacity_factor", (config.trained_capacity,))
    groups = offered.get("moe.group_size", (config.group_size,))
    pairs = [(percent, config.group_size) for percent in reversed(capacities)]
    pairs += [(config.trained_capacity, group) for group in reversed(groups[:-1])]
    for percent, group in pairs:
        for part in model.modules():
            if isinstance(part, MoE):
                part.percent, part.group_size = percent, group
        yield f"{percent} % of {group} tokens"


BALANCE_WEIGHT = 0.01
Z_WEIGHT = 1e-4


def routing_loss(routes: Iterable[Routes], policy: Router) -> torch.Tensor:
    """The weighted losses of all layers, summed. Experts that choose are always full and need no balance."""
    total = torch.zeros(())
    for layer in routes:
        total = total + Z_WEIGHT * z_loss(layer.logits)
        if policy == "tokens_choose":
            total = total + BALANCE_WEIGHT * balance_loss(layer.scores)
    return total


def balance_loss(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` [G, T, E] to the mean over groups of ``E * sum_e f_e * p_e``; 1 where tokens are spread evenly.

    ``f`` is the share of tokens whose first choice is e, before capacity counts, and ``p`` the mean score of e.
    """
    experts = scores.shape[-1]
    chosen = torch.nn.functional.one_hot(first_choice(scores), experts).to(scores.dtype).mean(1)  # [G, E]
    return experts**2 * (chosen * scores.mean(1)).mean()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` [G, T, E] to the mean over tokens of the squared log of their summed exponentials."""
    return logits.logsumexp(-1).square().mean()
