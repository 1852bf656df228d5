"""A multi-exit model out of a BERT checkpoint: its encoder as it stands, new exits after every layer."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from ....errors import CheckpointError
from ....exporters.checkpoints.checkpoint import Checkpoint
from ....exporters.families.cost_eff.architecture import CostEffArchitecture, Widths
from ....exporters.families.cost_eff.model import CostEffModel
from ....exporters.families.cost_eff.sidecar import ExitSpec

_EXIT_SPREAD = 0.02  # BERT's initial spread of a classifier
_UNUSED = ("pooler.", "embeddings.position_ids")


def multi_exit_model(checkpoint: Checkpoint, classes: int) -> CostEffModel:
    """The encoder in ``checkpoint`` (``model_type`` bert) with untrained exits over the tanh of mean-pooled states.

    The mean, since that is how sentence-embedding checkpoints were trained to be read. Seed torch before.
    Raises CheckpointError if the checkpoint is no such encoder.
    """
    architecture = architecture_of(checkpoint, classes)
    model = CostEffModel(architecture)
    for layer in architecture.exits.layers:
        torch.nn.init.normal_(model.get_parameter(f"exits.{layer}.weight"), std=_EXIT_SPREAD)
        torch.nn.init.zeros_(model.get_parameter(f"exits.{layer}.bias"))
    weights: dict[str, torch.Tensor] = {}
    for file in sorted({header.file for header in checkpoint.tensors.values()}):
        weights |= load_file(checkpoint.folder / file)
    encoder = {name: data.float() for name, data in weights.items() if not name.startswith(_UNUSED)}
    wanted = {name: shape for name, shape in architecture.parameter_shapes.items() if not name.startswith("exits.")}
    for name in sorted(wanted.keys() | encoder.keys()):
        found = tuple(encoder[name].shape) if name in encoder else None
        if found != wanted.get(name):
            raise CheckpointError(f"{checkpoint.folder}: tensor {name}: expected {wanted.get(name)}, got {found}")
    model.load_state_dict(encoder, strict=False)
    return model


def architecture_of(checkpoint: Checkpoint, classes: int) -> CostEffArchitecture:
    """The multi-exit architecture of a BERT configuration, nothing pruned, embedding dense.

    Raises CheckpointError for another kind of model or a missing field.
    """
    config = checkpoint.config
    if config.get("model_type") != "bert":
        raise CheckpointError(f"{checkpoint.folder}: expected model_type bert, got {config.get('model_type')!r:.80}")
    try:
        heads, depth, hidden = (int(config[key]) for key in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
        layers = (Widths(heads, int(config["intermediate_size"])),) * depth
        return CostEffArchitecture(
            hidden=hidden,
            head_size=hidden // heads,
            vocabulary=int(config["vocab_size"]),
            positions=int(config["max_position_embeddings"]),
            types=int(config["type_vocab_size"]),
            pad=int(config["pad_token_id"]),
            rank=None,
            activation=str(config["hidden_act"]),
            norm_eps=float(config["layer_norm_eps"]),
            layers=layers,
            exits=ExitSpec(tuple(range(1, depth + 1)), pool="mean", activation="tanh", classes=classes),
            has_entropy=True,
            stored=layers,
            kept={},
        )
    except KeyError as failure:
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {failure.args[0]} is missing") from failure
