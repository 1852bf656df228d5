"""The published T5 v1.1 with a conditional encoder: the presets of such encoders, each with a decoder as deep as it."""

from __future__ import annotations

from collections.abc import Mapping

from ..coda.architecture.presets import PRESETS as ENCODERS
from .config import CodaEncoderDecoderConfig

PRESETS: Mapping[str, CodaEncoderDecoderConfig] = {
    f"{name}-with-decoder": CodaEncoderDecoderConfig(
        encoder=encoder,
        num_decoder_layers=encoder.num_hidden_layers,
        tie_word_embeddings=False,
        scale_decoder_outputs=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    for name, encoder in ENCODERS.items()
}
