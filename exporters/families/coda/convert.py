"""An ordinary encoder with adapters that add nothing and routers that are drawn: where training starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import PlanError, UnsupportedModelError
from ....profiles.nest_request import ConversionSettings
from ....strict import unstructure
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import config_from_json
from ..bert import LAYOUTS
from ..t5 import read_t5, scales_outputs
from .config import SCHEDULE, CodaConfig
from .encoder_decoder import CodaEncoderDecoder
from .encoder_decoder_config import ENCODER, CodaEncoderDecoderConfig
from .model import CodaEncoder, Layer
from .ops import is_added
from .ordinary_encoders import DenseEncoder, from_bert, from_t5, from_vit, reader

_REDUCTIONS = (8, 5, 3, 2, 1)
_READERS: Mapping[str, Callable[[Checkpoint], DenseEncoder]] = {
    "t5": from_t5,
    "vit": from_vit,
    "deit": from_vit,
    **dict.fromkeys(LAYOUTS, from_bert),
}


@dataclass(frozen=True)
class Conversion:
    """``model`` with its ``config``, and what of the checkpoint was ``left_out``."""

    config: CodaConfig
    model: CodaEncoder
    left_out: tuple[str, ...]


def converted(checkpoint: Checkpoint, settings: ConversionSettings) -> Conversion:
    """The encoder in ``checkpoint`` made conditional. Adapters start with ``up`` at zero, so that where every token
    passes whole the model is the checkpoint's encoder; routers are drawn as ``CodaEncoder`` draws.

    Raises UnsupportedModelError for a class that is not read, CheckpointError for a checkpoint that does not map or
    settings that make no model of it, and PlanError for other bad settings.
    """
    dense = _read(checkpoint)
    config = _config(checkpoint, dense, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = CodaEncoder(config)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for name, weight in layer.adapter.named_parameters():
            if name.endswith("up.weight"):
                torch.nn.init.zeros_(weight)
    drawn = {name: value for name, value in model.state_dict().items() if is_added(name)}
    model.load_state_dict({**drawn, **dense.weights}, assign=True)
    modules = ("modules of sentence-transformers",) if checkpoint.has_modules else ()
    return Conversion(config, model.eval().requires_grad_(False), (*dense.left_out, *modules))


def _read(checkpoint: Checkpoint) -> DenseEncoder:
    model_type = checkpoint.config.get("model_type")
    read = _READERS.get(model_type) if isinstance(model_type, str) else None
    if read is None:
        raise UnsupportedModelError(
            f"{checkpoint.folder / 'config.json'}: model_type {model_type!r:.80} cannot be made conditional; expected "
            f"one of {', '.join(_READERS)}: encoders whose layers have nothing that needs neighbouring tokens, such as "
            "a convolution"
        )
    checkpoint.require_weights()
    return read(checkpoint)


def _config(checkpoint: Checkpoint, dense: DenseEncoder, settings: ConversionSettings) -> CodaConfig:
    image = dense.fields.get("image")
    most = dense.fields["max_position_embeddings"] if image is None else image.tokens
    own = _stated(settings, dense.fields["num_hidden_layers"], most)
    stated = {key: unstructure(value) for key, value in {**dense.fields, **own}.items() if value is not None}
    return config_from_json(CodaConfig, stated, f"{checkpoint.folder}, made conditional")


def _stated(settings: ConversionSettings, layers: int, most_tokens: int) -> dict[str, Any]:
    """Fields of ``CodaConfig`` that ``settings`` decide, for a model of so many ``layers`` and tokens of a row.

    Raises PlanError for layers that the model has not, or where none is left to be conditional, and for an activation
    of LoRA.
    """
    if settings.adapter == "lora" and settings.adapter_activation is not None:
        raise PlanError(f"adapter activation: lora has none, got {settings.adapter_activation}; leave it out")
    conditional = tuple(layer for layer in range(layers) if layer not in settings.dense_layers)
    if unknown := [layer for layer in settings.dense_layers if not 0 <= layer < layers]:
        raise PlanError(f"dense layers: expected numbers from 0 to {layers - 1}, got {unknown[0]}")
    if not conditional:
        raise PlanError(f"dense layers: all {layers} are listed; expected at least one conditional layer")
    offered = {*_REDUCTIONS, settings.reduction} if settings.reductions is None else {*settings.reductions}
    if settings.reductions is None:
        offered = {r for r in offered if r <= most_tokens or r == settings.reduction}
    return {
        "adapter": settings.adapter,
        "adapter_size": settings.adapter_size,
        "adapter_activation": None if settings.adapter == "lora" else settings.adapter_activation or "relu",
        "router": settings.router,
        "soft_top_k": SCHEDULE if settings.router == "soft_top_k" else None,
        "keys_of": settings.keys_of,
        "ffn_residual": "raw",
        "reduction": settings.reduction,
        "reductions": tuple(sorted(offered, reverse=True)),
        "reduction_of_one": "dense" if 1 in offered else "routed",
        "conditional_layers": conditional if settings.dense_layers else None,
        "num_labels": settings.num_labels,
    }


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
    read = reader(checkpoint, t5.names_in_files(checkpoint))
    own = {f"{ENCODER}{name}": weight for name, weight in encoder.state_dict().items()}
    others = {name: read(name) for name, _ in model.named_parameters() if not name.startswith(ENCODER)}
    model.load_state_dict({**own, **others}, assign=True)
    return model.eval().requires_grad_(False)
