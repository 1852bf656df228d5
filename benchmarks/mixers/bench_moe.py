"""A compiled block of experts against every expert on every token, masked: the lowering that needs no routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from ...bucket import Bucket
from ...compiler.planning.variants import chosen_variants
from ...exporters.families.sparse_mixer.architecture.capacity import capacity
from ...exporters.families.sparse_mixer.architecture.config import SparseMixerConfig
from ...exporters.families.sparse_mixer.architecture.presets import PRESETS
from ...exporters.families.sparse_mixer.model.moe import MoE
from ...exporters.families.sparse_mixer.model.static_moe import StaticMoE
from ...exporters.source import open_source
from ...profiles.measure_rates import measure_host_rates
from ...profiles.probe_host import host_profile
from ..blocks import HiddenStates, block_engine
from ..harness import Row, interleaved, ratio
from ..kept import CACHE
from ..subjects import CORES, default_session

_PRESET = "sparse-mixer-base"
# Of the speed-up that leaving out all but one expert's work would be.
_SHARE = 0.7
_ROUNDS = {Bucket(1, 512): 12, Bucket(8, 512): 4}


def run() -> list[Row]:
    return [_row(PRESETS[_PRESET], bucket, rounds) for bucket, rounds in _ROUNDS.items()]


class EveryExpert(torch.nn.Module):
    """``moe``, where experts choose, as all experts on all tokens, weighted by gates that are mostly zero."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, S, d] to [B, S, d]."""
        moe, tokens = self.moe, x.flatten(0, 1)  # one group: [T, d]
        scores = moe.router(tokens).softmax(-1).T  # [E, T]
        gates, chosen = scores.topk(capacity(moe.config, moe.percent, len(tokens)), dim=-1)  # [E, C]
        masks = torch.zeros_like(scores).scatter(1, chosen, gates)[..., None].unbind()  # E times [T, 1]
        terms = [moe.experts.compute(expert, tokens) * mask for expert, mask in enumerate(masks)]
        return sum(terms[1:], terms[0]).view_as(x)


class Routed(torch.nn.Module):
    """The answer of a block in its static variants."""

    def __init__(self, moe: MoE, variants: Mapping[str, str]) -> None:
        super().__init__()
        self.moe = StaticMoE(moe, variants)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.moe(x)[0]
        return answer


def _row(config: SparseMixerConfig, bucket: Bucket, rounds: int) -> Row:
    source = open_source(f"preset:{_PRESET}")
    here = replace(host_profile(), rates=measure_host_rates(CORES))  # as fast as it is now
    variants = chosen_variants(source, source.spec.universal(), bucket, here)
    moe = _random_block(config)
    folder = CACHE / f"moe-{bucket.label}"
    folder.mkdir(parents=True, exist_ok=True)
    x = torch.randn(bucket.batch, bucket.sequence, config.hidden_size, generator=torch.Generator().manual_seed(1))
    feeds = {"x": x.numpy()}
    blocks = {"every": EveryExpert(moe), "ours": Routed(moe, variants)}
    files = {
        name: block_engine(block, HiddenStates(config.hidden_size), bucket, folder / name)
        for name, block in blocks.items()
    }
    sessions = {name: default_session(file) for name, file in files.items()}
    calls = {name: (lambda session=session: session.run(None, feeds)[0]) for name, session in sessions.items()}
    np.testing.assert_allclose(calls["ours"](), calls["every"](), atol=1e-3)
    times = interleaved(calls, rounds, runs=1, warmup=1)
    speed, bar = ratio(times, "every", "ours"), _SHARE * config.num_experts
    return Row(
        f"block of {config.num_experts} experts, {bucket.tokens} tokens, against every expert on every token",
        f"{speed:.1f}x (best {min(times['ours']):.1f} against {min(times['every']):.1f} ms)",
        f">= {bar:.1f}x",
        speed >= bar,
        f"median ratio of {rounds} interleaved rounds; {', '.join(map(' '.join, variants.items()))}",
    )


def _random_block(config: SparseMixerConfig) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config).eval().requires_grad_(False)
    for parameter in moe.parameters():
        parameter.data = torch.randn_like(parameter) * 0.02
    return moe
