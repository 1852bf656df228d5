"""An ordinary encoder with adapters that add nothing and routers that are drawn: where training starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .....errors import UnsupportedModelError
from .....strict import unstructure
from ....checkpoints.checkpoint import Checkpoint
from ....checkpoints.own_config import config_from_json
from ...bert.layouts import LAYOUTS
from ..architecture.config import CodaConfig
from ..architecture.shapes import is_added
from ..model.encoder import CodaEncoder
from ..model.layer import Layer
from .dense import DenseEncoder
from .from_bert import from_bert
from .from_t5 import from_t5
from .from_vit import from_vit
from .settings import ConversionSettings

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
    own = settings.fields(dense.fields["num_hidden_layers"], most)
    stated = {key: unstructure(value) for key, value in {**dense.fields, **own}.items() if value is not None}
    return config_from_json(CodaConfig, stated, f"{checkpoint.folder}, made conditional")
