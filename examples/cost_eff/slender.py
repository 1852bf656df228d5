"""The multi-exit model made of a BERT, made thinner by Taylor importance, and written as a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...errors import CheckpointError
from ...exporters.checkpoints.checkpoint import Checkpoint, compare_with_headers, open_checkpoint
from ...exporters.checkpoints.own_folder import read_tensors
from ...exporters.families.bert import read_bert
from ...exporters.families.cost_eff.config import (
    SCHEMA_VERSION,
    SIDECAR_NAME,
    CostEffArchitecture,
    EmbeddingSpec,
    ExitSpec,
    Sidecar,
    Widths,
    read_architecture,
    read_sidecar,
)
from ...exporters.families.cost_eff.loading import factorise
from ...exporters.families.cost_eff.model import CostEffModel
from ...strict import unstructure
from .fit import label_loss
from .texts import Batch

_EXIT_SPREAD = 0.02  # BERT's initial spread of a classifier
_UNUSED = ("pooler.", "embeddings.position_ids")
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Target:
    """Widths of every layer and the rank of the word embedding."""

    heads: int
    ffn: int
    rank: int


def schedule(whole: Target, final: Target, steps: int) -> list[Target]:
    """The widths after each of ``steps`` equal steps from ``whole`` to ``final``, rounded down, the last ``final``."""

    def at(step: int, start: int, end: int) -> int:
        return start - -(-(start - end) * step // steps)

    return [
        Target(at(step, whole.heads, final.heads), at(step, whole.ffn, final.ffn), at(step, whole.rank, final.rank))
        for step in range(1, steps + 1)
    ]


def most_important(importance: Importance, target: Target) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ids that stay, per layer and ascending: heads, channels; the first of equal ones."""

    def best(scores: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        orders = (torch.argsort(layer, descending=True, stable=True) for layer in scores)
        return [order[:count].sort().values for order in orders]

    return best(importance.heads, target.heads), best(importance.ffn, target.ffn)


def slender(
    model: CostEffModel, heads: Sequence[torch.Tensor], channels: Sequence[torch.Tensor], rank: int
) -> CostEffModel:
    """A copy of ``model`` with these heads and channels of every layer, and its word embedding at ``rank``.

    The embedding is multiplied out, if it is factorised already, and factorised again. Heads and channels that
    contributed nothing may go without any change of the function; a rank below the embedding's own changes it.
    """
    d = model.architecture.head_size
    weights = {name: data.detach() for name, data in model.state_dict().items()}
    for index, (kept_heads, kept) in enumerate(zip(heads, channels, strict=True)):
        at = f"encoder.layer.{index}"
        rows = (kept_heads[:, None] * d + torch.arange(d)).flatten()
        for part in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                weights[f"{at}.attention.self.{part}.{kind}"] = weights[f"{at}.attention.self.{part}.{kind}"][rows]
        for name, dim, ids in (
            ("attention.output.dense.weight", 1, rows),
            ("intermediate.dense.weight", 0, kept),
            ("intermediate.dense.bias", 0, kept),
            ("output.dense.weight", 1, kept),
        ):
            weights[f"{at}.{name}"] = weights[f"{at}.{name}"].index_select(dim, ids)
    words, projection = factorise(word_embedding(model), rank)
    weights["embeddings.word_embeddings.weight"] = words
    weights["embeddings.word_projection.weight"] = projection.T.contiguous()
    widths = tuple(Widths(len(h), len(f)) for h, f in zip(heads, channels, strict=True))
    thinner = CostEffModel(replace(model.architecture, layers=widths, stored=widths, rank=rank))
    thinner.load_state_dict(weights)
    return thinner


def word_embedding(model: CostEffModel) -> torch.Tensor:
    """The word embedding ``[V, H]``, multiplied out if it is factorised."""
    table, projection = model.embeddings.word_embeddings.weight, model.embeddings.word_projection
    return (table if projection is None else table @ projection.weight.T).detach()


@dataclass(frozen=True)
class Importance:
    """Scores per layer: ``heads`` ``[A]`` and ``ffn`` ``[F]`` each."""

    heads: Sequence[torch.Tensor]
    ffn: Sequence[torch.Tensor]


def taylor_importance(
    model: CostEffModel, batches: Sequence[Batch], on_batch: Callable[[int, int], None]
) -> Importance:
    """``sum |dL/dw| |w|`` over the weights of each structure, the gradient's size averaged over ``batches``.

    ``L`` sums the label losses of every exit, so a structure is judged by each exit behind it. A head's weights are
    its columns of the attention output, a channel's its row of the FFN input and its column of the FFN output. Scores
    compare structures of one layer, not layers with each other. Dropout stays off.
    """
    weights = [
        model.get_parameter(f"encoder.layer.{layer}.{name}.weight")
        for layer in range(len(model.architecture.layers))
        for name in ("attention.output.dense", "intermediate.dense", "output.dense")
    ]
    sizes = [torch.zeros_like(weight) for weight in weights]
    for index, batch in enumerate(batches):
        for size, gradient in zip(sizes, torch.autograd.grad(label_loss(model, batch), weights), strict=True):
            size += gradient.abs() / len(batches)
        on_batch(index + 1, len(batches))
    products = [size * weight.detach().abs() for size, weight in zip(sizes, weights, strict=True)]
    columns = [product.sum(0).reshape(-1, model.architecture.head_size).sum(1) for product in products[0::3]]
    channels = [into.sum(1) + out.sum(0) for into, out in zip(products[1::3], products[2::3], strict=True)]
    return Importance(columns, channels)


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
    wanted = {name: shape for name, shape in architecture.parameters.shapes.items() if not name.startswith("exits.")}
    compare_with_headers(checkpoint, wanted, unused=lambda name: name.startswith(_UNUSED))
    model.load_state_dict(read_tensors(checkpoint, wanted), strict=False)
    return model


def architecture_of(checkpoint: Checkpoint, classes: int) -> CostEffArchitecture:
    """The multi-exit architecture of a BERT configuration, nothing pruned, embedding dense.

    Raises CheckpointError for another kind of model or a missing field.
    """
    config = checkpoint.config
    if config.get("model_type") != "bert":
        raise CheckpointError(f"{checkpoint.folder}: expected model_type bert, got {config.get('model_type')!r:.80}")
    bert = read_bert(checkpoint)
    layers = tuple(Widths(bert.heads, width) for width in bert.widths)
    return CostEffArchitecture(
        hidden=bert.hidden,
        head_size=bert.head_dim,
        vocabulary=bert.vocabulary,
        positions=bert.positions,
        types=bert.types,
        pad=bert.pad,
        rank=None,
        activation=str(config.get("hidden_act", "gelu")),
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        layers=layers,
        exits=ExitSpec(tuple(range(1, len(bert.widths) + 1)), pool="mean", activation="tanh", classes=classes),
        has_entropy=True,
        stored=layers,
        kept={},
    )


def save_model(model: CostEffModel, tokenizer: Path, folder: Path) -> None:
    """Makes ``folder``: configuration, sidecar, weights as they are (sliced, float32), and a copy of ``tokenizer``.

    There is no gate: thresholds are calibrated on the deployed engines.
    """
    folder.mkdir(parents=True)
    architecture = model.architecture
    embedding = EmbeddingSpec("factorised" if architecture.rank else "dense", architecture.rank)
    sidecar = Sidecar(SCHEMA_VERSION, "bert-post-ln", embedding, architecture.exits)
    _write_json(folder / "config.json", _config(architecture))
    _write_json(folder / SIDECAR_NAME, unstructure(sidecar))
    weights = {name: data.detach().contiguous() for name, data in model.state_dict().items()}
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def load_model(folder: Path) -> CostEffModel:
    """The model that ``save_model`` wrote; its parameters can train.

    Raises CheckpointError if the folder is damaged.
    """
    model = CostEffModel(read_architecture(open_checkpoint(folder), read_sidecar(folder)))
    model.load_state_dict(load_file(folder / _WEIGHTS))
    return model


def _config(architecture: CostEffArchitecture) -> dict[str, Any]:
    heads, ffn = [list(column) for column in zip(*((w.heads, w.ffn) for w in architecture.layers), strict=True)]
    return {
        "model_type": "cost_eff",
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.hidden,
        "num_hidden_layers": len(architecture.layers),
        "num_attention_heads": heads[0] if len(set(heads)) == 1 else heads,
        "head_size": architecture.head_size,
        "intermediate_size": ffn[0] if len(set(ffn)) == 1 else ffn,
        "hidden_act": architecture.activation,
        "layer_norm_eps": architecture.norm_eps,
        "max_position_embeddings": architecture.positions,
        "type_vocab_size": architecture.types,
        "pad_token_id": architecture.pad,
    }


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
