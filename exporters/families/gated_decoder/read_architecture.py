"""Reads a gated decoder's ``config.json`` strictly, and holds the weights against it (no torch here)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from ....errors import CheckpointError
from ....strict import structure
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.config import MOST_LAYERS, read_widths, refuse_unhonoured
from ...hugging_face.interface import TOKEN, DecoderInterface, read_interface
from ...hugging_face.rotary_positions import constant_positions
from ...hugging_face.tensors import parameter_names
from .architecture import DecoderArchitecture
from .gemma3n import Gemma3nParts
from .layouts import LAYOUTS, Layout
from .windows import read_windows

# Tensors that published folders carry and no module has.
_UNUSED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq")
# Of the classes that are read, all of them linear layers.
_HEAD_TENSOR = re.compile(r"(lm_head|score|qa_outputs)\.(?:weight|bias)")
_SHARED_KEY_TENSOR = re.compile(r"(?:\w+\.)?layers\.(\d{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")
# Under these names transformers keeps the text part of a multimodal Gemma 3n, and saves it again.
_TEXT_PREFIX = "model.language_model."


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The keys that determine the graph, with the defaults that all model types share."""

    vocab_size: int = field(metadata={"min": 1})
    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1})
    num_attention_heads: int = field(metadata={"min": 1})
    max_position_embeddings: int = field(metadata={"min": 1})
    num_key_value_heads: int | None = field(default=None, metadata={"min": 1})
    head_dim: int | None = field(default=None, metadata={"min": 1})
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    is_causal: bool = True


@dataclass(frozen=True, kw_only=True)
class _Gemma3nStated:
    """The keys that Gemma 3n adds, with the defaults of its class."""

    altup_num_inputs: int = field(default=4, metadata={"min": 2})
    vocab_size_per_layer_input: int = field(default=262_144, metadata={"min": 1})
    hidden_size_per_layer_input: int = field(default=256, metadata={"min": 1})
    laurel_rank: int = field(default=64, metadata={"min": 1})
    num_kv_shared_layers: int = field(default=15, metadata={"min": 0})
    activation_sparsity_pattern: tuple[float, ...] | None = None


def read_architecture(checkpoint: Checkpoint) -> DecoderArchitecture:
    """The architecture of the model in ``checkpoint``, whose weights may be absent altogether.

    Raises CheckpointError for what config.json lacks or gets wrong, for what a static graph cannot keep, and for a
    tensor that is missing, misfits or has no place.
    """
    config, layout = checkpoint.config, LAYOUTS[checkpoint.config["model_type"]]
    refuse_unhonoured(checkpoint)
    stated = structure(_Stated, _keys(_Stated, {**layout.defaults, **config}), _where(checkpoint), CheckpointError)
    for problem in _refusals(stated, masked=checkpoint.has_modules):
        raise checkpoint.misfit(problem)
    heads = stated.num_attention_heads
    architecture = DecoderArchitecture(
        interface=_interface(checkpoint, layout, stated),
        heads=heads,
        kv_heads=stated.num_key_value_heads or heads,
        head_dim=stated.head_dim or stated.hidden_size // heads,
        widths=read_widths(checkpoint, stated.num_hidden_layers),
        positions=constant_positions(config, stated.max_position_embeddings, layout.original_positions),
        stated_positions=stated.max_position_embeddings,
        windows=read_windows(
            layout.window, {**layout.defaults, **config}, stated.num_hidden_layers, _where(checkpoint)
        ),
        tied=stated.tie_word_embeddings,
        qkv_bias=layout.qkv_bias or (layout.reads_attention_bias and stated.attention_bias),
        output_bias=layout.reads_attention_bias and stated.attention_bias,
        ffn_bias=layout.reads_mlp_bias and stated.mlp_bias,
        head_norms=layout.head_norms,
        norms_around=layout.norms_around,
        score_cap=layout.caps and stated.attn_logit_softcapping is not None,
        logit_cap=layout.caps and stated.final_logit_softcapping is not None,
        packed=layout.packed,
        gemma3n=_gemma3n(checkpoint, stated.num_hidden_layers) if layout.gemma3n else None,
    )
    if checkpoint.has_weights:
        names, unused = names_in_files(checkpoint, architecture), partial(_is_unused, architecture=architecture)
        compare_with_headers(checkpoint, architecture.stored_shapes, names, unused)
    return architecture


def _keys(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in config.items() if key in names}


def _refusals(stated: _Stated, masked: bool) -> Iterator[str]:
    """``masked``: the model takes a mask, which hides padding from positions that see later ones."""
    heads, pairs = stated.num_attention_heads, stated.num_key_value_heads or stated.num_attention_heads
    if stated.num_hidden_layers > MOST_LAYERS:
        yield f"num_hidden_layers: expected at most {MOST_LAYERS}, got {stated.num_hidden_layers}"
    if heads % pairs:
        yield f"num_key_value_heads: {heads} heads cannot share {pairs} pairs of keys and values"
    if (stated.use_bidirectional_attention or not stated.is_causal) and not masked:
        key = "is_causal" if not stated.is_causal else "use_bidirectional_attention"
        yield (
            f"{key}: positions that see later ones are not supported; this model takes no mask, so the padding behind "
            "a text would change its answer"
        )


def _gemma3n(checkpoint: Checkpoint, layers: int) -> Gemma3nParts:
    stated = structure(_Gemma3nStated, _keys(_Gemma3nStated, checkpoint.config), _where(checkpoint), CheckpointError)
    if stated.num_kv_shared_layers >= layers:
        shared = stated.num_kv_shared_layers
        raise checkpoint.misfit(f"num_kv_shared_layers: expected fewer than the {layers} layers, got {shared}")
    pattern = stated.activation_sparsity_pattern
    if pattern is None:  # the class's own default
        pattern = tuple(0.95 if layers > 10 and layer < 10 else 0.0 for layer in range(layers))
    if len(pattern) != layers:
        problem = f"activation_sparsity_pattern: expected {layers} numbers, one per layer, got {len(pattern)}"
        raise checkpoint.misfit(problem)
    return Gemma3nParts(
        streams=stated.altup_num_inputs,
        layer_vocabulary=stated.vocab_size_per_layer_input,
        layer_hidden=stated.hidden_size_per_layer_input,
        laurel_rank=stated.laurel_rank,
        shared_layers=stated.num_kv_shared_layers,
        sparse=tuple(share > 0 for share in pattern),
    )


def names_in_files(checkpoint: Checkpoint, architecture: DecoderArchitecture) -> dict[str, str]:
    """Every tensor of the folder, by the name that the module gives the parameter, or by that of the class's own module
    where ours has several parameters in its place."""
    # The text part of a multimodal Gemma 3n has names of its own.
    renamed = ((_TEXT_PREFIX, "model."),) if architecture.gemma3n is not None else ()
    prefix = architecture.prefix.rstrip(".") or "model"
    return parameter_names(checkpoint, architecture.stored_shapes, prefix, renamed)


def _interface(checkpoint: Checkpoint, layout: Layout, stated: _Stated) -> DecoderInterface:
    found = read_interface(checkpoint, layout.classes, stated.vocab_size, stated.hidden_size, layout.pad)
    if found.head == TOKEN and checkpoint.config.get("token_classification_bias") is False:
        return replace(found, head=replace(found.head, bias=False))
    return found


def _is_unused(name: str, architecture: DecoderArchitecture) -> bool:
    """A head of another class or a copy of the tied one, constants of old files, or keys and values of a layer that
    reads another's."""
    head = _HEAD_TENSOR.fullmatch(name)
    if head is not None:
        behind = architecture.interface.head
        own = behind is not None and behind.module == head[1]
        return not own or (architecture.tied and name == "lm_head.weight")
    if _UNUSED_TENSOR.fullmatch(name):
        return True
    shared = _SHARED_KEY_TENSOR.fullmatch(name)
    return shared is not None and not architecture.has_keys(int(shared[1]))


def _where(checkpoint: Checkpoint) -> str:
    return str(checkpoint.folder / "config.json")
