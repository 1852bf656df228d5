"""CODA encoders of base width with random weights, compiled at several reductions: what benchmarks of them measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...bucket import Bucket
from ...compiler.compile import compile_bundle
from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.coda.config import REDUCTION, CodaConfig, Router
from ...exporters.families.coda.family import PRESETS
from ...exporters.families.coda.model import CodaEncoder
from ..kept import CACHE
from ..subjects import elsewhere

BUCKET = Bucket(1, 512)
# Of the preset's twelve equal layers: what is compared is time per layer, and a small vocabulary leaves layers alone.
LAYERS, _WORDS = 4, 1000
OFFERED = (8, 4, 2, 1)


def coda_config(keys: str, router: Router = "soft_top_k") -> CodaConfig:
    """Of ``keys`` as presets name them, ``k-to-k`` or ``k-to-all``."""
    preset = PRESETS[f"coda-t5-base-{keys}"]
    return replace(
        preset,
        num_hidden_layers=LAYERS,
        vocab_size=_WORDS,
        router=router,
        soft_top_k=preset.soft_top_k if router == "soft_top_k" else None,
        reduction=4,
        reductions=OFFERED,
        reduction_of_one="dense",
    )


def coda_folder(config: CodaConfig) -> Path:
    """The model as a checkpoint."""
    folder = CACHE / f"coda-{config.keys_of}-{config.router}-checkpoint"
    if not folder.exists():
        torch.manual_seed(0)
        save_model(CodaEncoder(config).eval(), config, folder)
    return folder


def coda_bundle(config: CodaConfig, reductions: tuple[int, ...]) -> Path:
    """The model compiled at ``reductions``, once."""
    path = CACHE / f"coda-{config.keys_of}-{config.router}-{'-'.join(map(str, reductions))}.bundle"
    if not path.exists():
        submodels = [coda_submodel(config, reduction) for reduction in reductions]
        folder = coda_folder(config)
        compile_bundle(
            folder, elsewhere(), path, buckets=[BUCKET], submodels=submodels, include="budgets", measure=False
        )
    return path


def coda_submodel(config: CodaConfig, reduction: int) -> str:
    """The id of the whole width at ``reduction``."""
    return f"ffn{config.intermediate_size}-{REDUCTION}{reduction}"
