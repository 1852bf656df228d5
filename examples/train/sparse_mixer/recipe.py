"""Every setting of the training, in one place; training.json repeats them beside what came of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....exporters.families.sparse_mixer.architecture.config import SparseMixerConfig


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
