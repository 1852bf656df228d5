"""An ordinary encoder with adapters that add nothing and routers that are drawn: where training starts.

Read are transformers' BERT layout (norms last, learned positions, kinds of token), T5 and T5 v1.1 (norms first,
relative positions, scores that are not scaled), ViT and DeiT (norms first, learned positions, patches behind a class
token, and of DeiT a distillation token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import PlanError, UnsupportedModelError
from ....profiles.nest_request import ConversionSettings
from ....strict import unstructure
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import config_from_json, stored_tensor
from ...hugging_face.tensors import RELATIVE_BUCKETS, RELATIVE_REACH
from ..bert import LAYOUTS, read_bert
from ..t5 import ENCODER as T5_ENCODER
from ..t5 import MOST_TOKENS, TABLE, class_name, read_t5, scales_outputs
from ..vit import read_vit
from .config import ENCODER, SCHEDULE, CodaConfig, CodaEncoderDecoderConfig, ImageInput
from .encoder_decoder import CodaEncoderDecoder
from .model import CodaEncoder, Layer
from .ops import is_added

_REDUCTIONS = (8, 5, 3, 2, 1)


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


# transformers' names of the activations that layers may have.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_BERT_PARTS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
_T5_PARTS = {
    "attention_norm": "layer.0.layer_norm",
    "attention.query": "layer.0.SelfAttention.q",
    "attention.key": "layer.0.SelfAttention.k",
    "attention.value": "layer.0.SelfAttention.v",
    "attention.output": "layer.0.SelfAttention.o",
    "ffn_norm": "layer.1.layer_norm",
    "ffn.down": "layer.1.DenseReluDense.wo",
}
_UP = {"ffn.up": "layer.1.DenseReluDense.wi"}
_GATE_AND_UP = {"ffn.gate": "layer.1.DenseReluDense.wi_0", "ffn.up": "layer.1.DenseReluDense.wi_1"}
_GATED = "gated-"
_QUERY_KEY_VALUE = {
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
}
_VIT_PARTS = {
    "attention_norm": "layernorm_before",
    "attention.output": "attention.o_proj",
    "ffn_norm": "layernorm_after",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
}
_BOTH = ("weight", "bias")
# Common to BERT and ViT.
_LAYER_NORMS = {"gated_ffn": False, "norm": "layer", "position": "learned", "bias": True}


@dataclass(frozen=True)
class DenseEncoder:
    """``fields`` of ``CodaConfig``, ``weights`` of ``CodaEncoder`` by its names in float32, and by name what the
    checkpoint has behind the encoder, which is ``left_out``."""

    fields: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    left_out: tuple[str, ...] = ()


def from_bert(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder, whatever its class has behind it. Raises CheckpointError for what does not map."""
    bert = read_bert(checkpoint)
    if bert.causal:
        raise checkpoint.misfit("is_decoder: a decoder's tokens cannot be routed; expected an encoder")
    if bert.embedding != bert.hidden:
        raise checkpoint.misfit(
            f"embedding_size: {bert.embedding} numbers of a token are projected to {bert.hidden}, which encoders with "
            "conditional adapters do not have; expected as many as hidden_size"
        )
    read = reader(checkpoint, bert.names_in_files(checkpoint), bert.prefix)
    weights = layer_weights(
        read, [f"encoder.layer.{layer}" for layer in range(len(bert.widths))], _BERT_PARTS, ["weight", "bias"]
    )
    weights |= {
        "embeddings.word.weight": read("embeddings.word_embeddings.weight"),
        # From where the first token's place stands.
        "embeddings.position.weight": read("embeddings.position_embeddings.weight")[bert.reserved :],
        "embeddings.norm.weight": read("embeddings.LayerNorm.weight"),
        "embeddings.norm.bias": read("embeddings.LayerNorm.bias"),
    }
    if bert.types:
        weights["embeddings.token_type.weight"] = read("embeddings.token_type_embeddings.weight")
    fields = {
        "hidden_size": bert.hidden,
        "num_hidden_layers": len(bert.widths),
        "num_attention_heads": bert.heads,
        "intermediate_size": bert.widths[0],
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.positions,
        "type_vocab_size": bert.types,
        "activation": activation_named(checkpoint, "hidden_act", checkpoint.config.get("hidden_act", "gelu")),
        **_LAYER_NORMS,
        "norm_place": "after",
        "norm_eps": norm_eps(checkpoint, "layer_norm_eps", 1e-12),
    }
    behind = {"pooler": bert.pooler, "head": bert.head is not None}
    return DenseEncoder(fields, weights, tuple(name for name, has in behind.items() if has))


def from_t5(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder of a folder: of an encoder alone, or of a model that has a decoder too, which is not judged.

    Raises CheckpointError for what does not map.
    """
    t5 = read_t5(checkpoint, encoder_alone=True)
    read = reader(checkpoint, t5.names_in_files(checkpoint))
    reach = checkpoint.config.get("relative_attention_max_distance", RELATIVE_REACH)
    if (t5.buckets, reach) != (RELATIVE_BUCKETS, RELATIVE_REACH):
        raise checkpoint.misfit(
            f"relative_attention_num_buckets and relative_attention_max_distance: expected {RELATIVE_BUCKETS} and "
            f"{RELATIVE_REACH}, as every published T5 has them, got {t5.buckets} and {reach}"
        )
    weights = layer_weights(
        read,
        [f"encoder.block.{layer}" for layer in range(t5.layers)],
        {**_T5_PARTS, **(_GATE_AND_UP if t5.gated else _UP)},
        ["weight"],
    )
    weights |= {
        "embeddings.word.weight": read(TABLE),
        "relative_bias.weight": read("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        "norm.weight": read("encoder.final_layer_norm.weight"),
    }
    fields = {
        "hidden_size": t5.hidden,
        "num_hidden_layers": t5.layers,
        "num_attention_heads": t5.heads,
        "head_dim": t5.head_dim,
        "intermediate_size": t5.ffn,
        "vocab_size": t5.vocabulary,
        "max_position_embeddings": MOST_TOKENS,
        "activation": _t5_activation(checkpoint),
        "gated_ffn": t5.gated,
        "norm": "rms",
        "norm_eps": norm_eps(checkpoint, "layer_norm_epsilon", 1e-6),
        "position": "relative",
        "softmax_scale": 1.0,
    }
    return DenseEncoder(fields, weights, ("decoder",) if class_name(checkpoint) != T5_ENCODER else ())


def _t5_activation(checkpoint: Checkpoint) -> str:
    """As transformers reads ``feed_forward_proj``: ``gated-gelu`` means the tanh form."""
    kind = checkpoint.config.get("feed_forward_proj", "relu")
    named = "gelu_new" if kind == "gated-gelu" else kind.removeprefix(_GATED)
    stated = checkpoint.config.get("dense_act_fn", named)
    if stated != named:
        raise checkpoint.misfit(f"dense_act_fn: expected {named}, as feed_forward_proj {kind} says, got {stated!r:.80}")
    return activation_named(checkpoint, "feed_forward_proj", named)


def from_vit(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder, whatever its class has behind it. Raises CheckpointError for what does not map."""
    vit = read_vit(checkpoint)
    if len(set(vit.widths)) > 1:
        raise checkpoint.misfit("intermediate_size: layers of different widths cannot be made conditional")
    read = reader(checkpoint, vit.names_in_files(checkpoint), vit.prefix)
    at = [f"layers.{layer}" for layer in range(len(vit.widths))]
    weights = layer_weights(read, at, _VIT_PARTS, _BOTH)
    weights |= layer_weights(read, at, _QUERY_KEY_VALUE, _BOTH if vit.qkv_bias else ["weight"])
    if not vit.qkv_bias:  # the other linear layers have one, and one of zeros is none
        weights |= {
            f"{layer}.{part}.bias": torch.zeros(vit.heads * vit.head_dim) for layer in at for part in _QUERY_KEY_VALUE
        }
    front = ["cls_token", *(["distillation_token"] if vit.model_type == "deit" else [])]
    weights |= {
        "embeddings.patch.weight": read("embeddings.patch_embeddings.projection.weight"),
        "embeddings.patch.bias": read("embeddings.patch_embeddings.projection.bias"),
        "embeddings.front": torch.cat([read(f"embeddings.{token}")[0] for token in front]),
        "embeddings.position.weight": read("embeddings.position_embeddings")[0],
        "norm.weight": read("layernorm.weight"),
        "norm.bias": read("layernorm.bias"),
    }
    image = ImageInput(
        channels=vit.channels,
        height=vit.image[0],
        width=vit.image[1],
        patch_height=vit.patch[0],
        patch_width=vit.patch[1],
        front_tokens=len(front),
    )
    fields = {
        "hidden_size": vit.hidden,
        "num_hidden_layers": len(vit.widths),
        "num_attention_heads": vit.heads,
        "head_dim": vit.head_dim,
        "intermediate_size": vit.widths[0],
        "image": image,
        "activation": activation_named(checkpoint, "hidden_act", checkpoint.config.get("hidden_act", "gelu")),
        **_LAYER_NORMS,
        "norm_eps": norm_eps(checkpoint, "layer_norm_eps", 1e-12),
    }
    behind = {"pooler": vit.pooled is not None, "head": vit.head is not None}
    return DenseEncoder(fields, weights, tuple(name for name, has in behind.items() if has))


def reader(checkpoint: Checkpoint, names: Mapping[str, str], prefix: str = "") -> Callable[[str], torch.Tensor]:
    """Reads a parameter by the name below ``prefix`` that its module gives it; ``names`` are those in files."""
    return lambda parameter: stored_tensor(checkpoint, names[f"{prefix}{parameter}"])


def layer_weights(
    read: Callable[[str], torch.Tensor], at: Sequence[str], parts: Mapping[str, str], kinds: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Every layer's ``kinds`` (weight, bias) of ``parts``, from the name in a layer of ``CodaEncoder`` to that in a
    layer of the checkpoint, of which ``at`` lists where each begins."""
    return {
        f"layers.{layer}.{own}.{kind}": read(f"{start}.{theirs}.{kind}")
        for layer, start in enumerate(at)
        for own, theirs in parts.items()
        for kind in kinds
    }


def activation_named(checkpoint: Checkpoint, key: str, name: object) -> str:
    """The activation that transformers calls ``name``. Raises CheckpointError, which names ``key``, for another."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise checkpoint.misfit(f"{key}: {name!r:.80} is no activation of conditional layers; expected one of {known}")
    return _ACTIVATIONS[name]


def norm_eps(checkpoint: Checkpoint, key: str, default: float) -> float:
    """Epsilon of the norms, ``default`` where config.json does not have ``key``. Raises CheckpointError."""
    value: Any = checkpoint.config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise checkpoint.misfit(f"{key}: expected a number between 0 and 1, got {value!r:.80}")
    return float(value)


_READERS: Mapping[str, Callable[[Checkpoint], DenseEncoder]] = {
    "t5": from_t5,
    "vit": from_vit,
    "deit": from_vit,
    **dict.fromkeys(LAYOUTS, from_bert),
}
