"""Small folders of a conditional encoder with T5's decoder: 1 layer each, 3 heads of 8, FFN 32, hidden 16, random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.coda.config import CodaConfig
from nestforge.exporters.families.coda.encoder_decoder import CodaEncoderDecoder, load_model
from nestforge.exporters.families.coda.encoder_decoder_config import CodaEncoderDecoderConfig
from nestforge.exporters.families.coda.ops import is_of_task
from nestforge.exporters.families.coda.tasks import save_task
from support.gated_decoders import edit_config
from support.tiny_coda import SCHEDULE, coda_config
from support.tiny_t5 import save_t5

VOCABULARY, POSITIONS = 40, 24
# As every published T5 has them.
DISTANCES = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
SETTINGS = nestforge.ConversionSettings(adapter_size=4, reduction=3, reductions=(3, 1), seed=3)
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "head_dim": 8,
    "softmax_scale": 1.0,
    "intermediate_size": 32,
    "gated_ffn": True,
    "reductions": (3, 1),
    "reduction_of_one": "dense",
}


def encoder_config(**changes: Any) -> CodaConfig:
    return coda_config(**{**_ENCODER, **changes})


def pair_config(encoder: CodaConfig | None = None, **changes: Any) -> CodaEncoderDecoderConfig:
    stated: dict[str, Any] = {
        "num_decoder_layers": 1,
        "tie_word_embeddings": True,
        "scale_decoder_outputs": True,
        "decoder_start_token_id": 0,
    }
    return CodaEncoderDecoderConfig(encoder=encoder or encoder_config(), **{**stated, **changes})


def tiny_pair(config: CodaEncoderDecoderConfig) -> CodaEncoderDecoder:
    """The model, with weights so large that every part of it shows in the outputs."""
    torch.manual_seed(0)
    model = CodaEncoderDecoder(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + name.endswith("norm.weight")
    return model.eval().requires_grad_(False)


def save_tiny_pair(folder: Path, **changes: Any) -> Path:
    """``tiny_pair`` as a user's folder would hold it."""
    config = pair_config(**changes)
    return save_model(tiny_pair(config), config, folder)


def save_small_t5(folder: Path, **changes: Any) -> Path:
    """A T5 of the same sizes with a decoder, as transformers writes it."""
    return save_t5(folder, text=False, **{"num_decoder_layers": 1, "vocab_size": VOCABULARY, **DISTANCES, **changes})


def converted_t5(model: Path, output: Path) -> Path:
    """``model`` made conditional, with its decoder, for texts of few tokens and in few rounds, which trace faster."""
    report = nestforge.convert_coda(model, output, SETTINGS, with_decoder=True)
    smaller = replace(report.config, max_position_embeddings=POSITIONS, soft_top_k=SCHEDULE)
    return edit_config(output, encoder=smaller.to_json())


def save_pair_task(base: Path, folder: Path, seed: int, epsilon: float | None = None, **changes: Any) -> Path:
    """A task on ``base`` as its folder; the whole checkpoint lies beside it, with ``.trained`` behind its name."""
    found = load_model(base)
    if epsilon is not None:
        changes["soft_top_k"] = replace(found.config.encoder.soft_top_k, epsilon=epsilon)  # type: ignore[type-var]
    config = replace(found.config, encoder=replace(found.config.encoder, **changes))
    model = CodaEncoderDecoder(config)
    model.load_state_dict(found.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.startswith("encoder.") and is_of_task(name.removeprefix("encoder.")):
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.3
    return save_task(save_model(model, config, folder.with_suffix(".trained")), base, folder)
