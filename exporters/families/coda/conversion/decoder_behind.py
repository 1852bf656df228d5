"""T5's decoder, kept behind its encoder once that is conditional."""

from __future__ import annotations

import torch

from ....checkpoints.checkpoint import Checkpoint
from ....checkpoints.own_config import config_from_json
from ...coda_encoder_decoder.config import ENCODER, CodaEncoderDecoderConfig
from ...coda_encoder_decoder.model import CodaEncoderDecoder
from ...t5.architecture import names_in_files, read_t5, scales_outputs
from ..model.encoder import CodaEncoder
from .dense import reader


def decoder_behind(checkpoint: Checkpoint, encoder: CodaEncoder) -> CodaEncoderDecoder:
    """The decoder in ``checkpoint``, dense and with its weights, behind ``encoder``, which was made of the same.

    Raises CheckpointError for a checkpoint without one, and for an encoder that has no decoder behind it.
    """
    t5 = read_t5(checkpoint) if checkpoint.config.get("model_type") == "t5" else None
    if t5 is None or not t5.decoder_layers:
        raise checkpoint.misfit("no decoder to keep; expected a T5ForConditionalGeneration")
    stated = {
        "encoder": encoder.config.to_json(),
        "num_decoder_layers": t5.decoder_layers,
        "tie_word_embeddings": t5.tied,
        "scale_decoder_outputs": scales_outputs(checkpoint),
        "decoder_start_token_id": t5.start,
        "pad_token_id": t5.pad,
        "eos_token_id": checkpoint.config.get("eos_token_id"),
        "model_type": CodaEncoderDecoderConfig.model_type,
    }
    config = config_from_json(CodaEncoderDecoderConfig, stated, f"{checkpoint.folder}, made conditional")
    with torch.device("meta"):
        model = CodaEncoderDecoder(config)
    read = reader(checkpoint, names_in_files(checkpoint, t5))
    own = {f"{ENCODER}{name}": weight for name, weight in encoder.state_dict().items()}
    others = {name: read(name) for name, _ in model.named_parameters() if not name.startswith(ENCODER)}
    model.load_state_dict({**own, **others}, assign=True)
    return model.eval().requires_grad_(False)
