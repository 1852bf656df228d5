"""Models with MHE attention, or one that its paper (arXiv 2310.07911) compares with. See docs/mhe.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where a head can be left out, ``heads`` (rows
of the tables of head embeddings, or blocks of rows of what each head projects; columns of ``attention.output``), or in
the layout that has it in front ``head_width`` (the same, by numbers of a head; of projections that are shared too).
Decoders behind an encoder also have ``cross_heads`` or ``cross_head_width``, of their attention to it; their whole
engine answers a pair of texts at every position of the second. Both have the bucket's length, since what pads the first
is masked, and what pads the second on its right changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from ....bucket import Bucket
from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ....elastic import Submodel
from ....workload import Op
from ...architecture import Architecture, Folded
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...hugging_face.tensors import Shape
from ...parts import CachedForm, EncoderForm, KeptAxes
from ...signature import Signature, text_entry
from .config import PRESETS, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import (
    ATTENTION,
    CROSS,
    DECODER,
    ENCODER,
    FORMS,
    ONNXRUNTIME_FORMS,
    cached_form,
    cached_heads,
    folded_shapes,
    form_problem,
    key_spread,
    places_of,
    prompt_form,
)
from .ops import decoder_ops, encoder_decoder_ops, encoder_ops, encoding_ops, step_ops, variant_ops
from .shapes import (
    compare_weights,
    decoder_shapes,
    elastic_spec,
    encoder_decoder_shapes,
    encoder_shapes,
    parameter_group,
)

if TYPE_CHECKING:  # plans are made without torch
    import torch


_TABLES = ("embeddings.word.weight", "embeddings.position.weight", "lm_head.weight")
_MASK = "attention_mask"
_Config = TypeVar("_Config", bound=MheConfig)


@dataclass(frozen=True)
class Kind(Generic[_Config]):
    """One of the models: ``shapes`` of its parameters, its ``signature``, the ``ops`` of a pass, and how it generates,
    by its configuration and by what ``key_spread`` says of its weights."""

    config: type[_Config]
    shapes: Callable[[_Config], dict[str, Shape]]
    signature: Callable[[Checkpoint, _Config], Signature]
    ops: Callable[[_Config, Submodel, Bucket], list[Op]]
    cached: Callable[[_Config, float], CachedForm] | None = None

    def family(self, model_type: str) -> Family:
        """The family of folders with this ``model_type``."""
        presets = {name: config.to_json() for name, config in PRESETS.items() if isinstance(config, self.config)}
        return Family(model_type, (model_type,), self.read, reads_config_alone=True, presets=presets)

    def read(self, checkpoint: Checkpoint) -> Architecture:
        """The model in ``checkpoint``, whose weights may be absent altogether."""
        config = read_config(checkpoint, self.config)
        shapes = self.shapes(config)
        if checkpoint.has_weights:
            compare_weights(checkpoint, config, shapes)
        spread = key_spread(checkpoint, config)
        places = places_of(config)
        problems = {role: _problems(config, spread, role) for role in dict.fromkeys(place.role for place in places)}
        made = {name: shape for place in places for name, shape in folded_shapes(config, place.at).items()}
        return Architecture(
            signature=self.signature(checkpoint, config),
            workload=partial(self.ops, config),
            load=partial(_load, checkpoint, config),
            spec=elastic_spec(config, shapes),
            parameter_shapes=shapes,
            is_embedding=lambda parameter, _: parameter in _TABLES,
            group_of=parameter_group,
            variants=partial(variant_ops, config, spread=spread),
            variant_problems=problems,
            onnxruntime_variants=ONNXRUNTIME_FORMS if config.has_tables else frozenset(),
            lower=_lower if config.has_tables else None,
            folded=Folded(made, _folded_tensor) if made else None,
            cached=None if self.cached is None else self.cached(config, spread),
        )


def _problems(config: MheConfig, spread: float, role: str) -> dict[str, str]:
    """The forms that attention in ``role`` may not have, to why."""
    found = {form: form_problem(config, form, spread, role) for form in FORMS}
    return {form: problem for form, problem in found.items() if problem is not None}


def _load(checkpoint: Checkpoint, config: MheConfig) -> torch.nn.Module:
    from ...modules.layers import Answering
    from .model import model_of

    return Answering(model_of(checkpoint, config))


def _lower(module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:
    from ...modules.layers import Answering
    from .attention_forms import lower

    assert isinstance(module, Answering)
    return lower(module, variants)


def _folded_tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    from ...modules.layers import Answering
    from .attention_forms import folded_tensor

    assert isinstance(module, Answering)
    return folded_tensor(module, name)


def kept_axes(config: MheConfig, role: str) -> tuple[KeptAxes, ...]:
    """Cached heads of attention in ``role``, layer by layer; none where all submodels keep the same: heads that all
    read one pair of keys and values leave that as it is."""
    axes = [place.axis for place in places_of(config) if place.role == role]
    if config.width_first:
        return tuple(KeptAxes(size=axis) for axis in axes if axis is not None)
    return tuple(KeptAxes(heads=axis) for axis in axes if axis is not None and cached_heads(config) > 1)


def _encoder_signature(checkpoint: Checkpoint, config: MheEncoderConfig) -> Signature:
    tokens = ("batch", "sequence")
    inputs = (
        TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size),
        TensorSpec(_MASK, "int64", tokens, pad=0, high=2, row_needs="token"),
    )
    match config.head:
        case "masked_lm":
            output = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="tokens")
        case "classifier":
            output = TensorSpec("logits", "float32", ("batch", config.num_labels or 0), role="classes")
        case "none":
            output = TensorSpec("last_hidden_state", "float32", (*tokens, config.hidden_size))
    return Signature(
        inputs, (output,), config.max_position_embeddings, _MASK, text_entry(checkpoint, "input_ids", _MASK)
    )


def _decoder_signature(checkpoint: Checkpoint, config: MheDecoderConfig) -> Signature:
    tokens = ("batch", "sequence")
    # No mask: attention is causal, so padding on the right changes nothing before it.
    ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
    return Signature((ids,), (logits,), config.max_position_embeddings, text=text_entry(checkpoint, "input_ids"))


def _decoder_cached(config: MheDecoderConfig, _: float) -> CachedForm:
    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import CachedLM

        return CachedLM(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import RecordedLM

        return RecordedLM(module.model).eval()

    layers = (CachedLayer(cached_heads(config), config.head_size),) * config.num_hidden_layers
    return CachedForm(
        config.vocab_size,
        config.max_position_embeddings,
        layers,
        cached,
        recorded,
        variants={ATTENTION: cached_form(config)} if config.has_tables else {},
        kept=kept_axes(config, ATTENTION),
    )


def _pair_signature(checkpoint: Checkpoint, config: MheEncoderDecoderConfig) -> Signature:
    tokens = ("batch", "sequence")
    ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    mask = TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="token")
    follows = TensorSpec("decoder_input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
    text = text_entry(checkpoint, "input_ids", mask.name)
    if text is not None:
        text = replace(text, shifted=follows.name, start=config.decoder_start_token_id)
    return Signature((ids, mask, follows), (logits,), config.max_position_embeddings, mask.name, text)


def _pair_cached(config: MheEncoderDecoderConfig, spread: float) -> CachedForm:
    def encoder(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import SourceEncoder

        return SourceEncoder(module.model).eval()

    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import CachedDecoder

        return CachedDecoder(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import RecordedPair

        return RecordedPair(module.model).eval()

    positions, kept = config.max_position_embeddings, cached_form(config)
    encoding, step = partial(encoding_ops, config, spread=spread), partial(step_ops, config)
    form = EncoderForm(config.decoder_start_token_id, positions, encoder, encoding, step, kept=kept_axes(config, CROSS))
    return CachedForm(
        config.vocab_size,
        positions,
        (CachedLayer(cached_heads(config), config.head_size),) * config.decoder_layers,
        cached,
        recorded,
        encoder=form,
        kept=kept_axes(config, DECODER),
        variants={ENCODER: prompt_form(config, spread), DECODER: kept, CROSS: kept} if config.has_tables else {},
    )


_ENCODER = Kind(MheEncoderConfig, encoder_shapes, _encoder_signature, encoder_ops).family("mhe_encoder")
_DECODER = Kind(MheDecoderConfig, decoder_shapes, _decoder_signature, decoder_ops, _decoder_cached).family(
    "mhe_decoder"
)
_PAIR = Kind(
    MheEncoderDecoderConfig, encoder_decoder_shapes, _pair_signature, encoder_decoder_ops, _pair_cached
).family("mhe_encoder_decoder")
FAMILIES = (_ENCODER, _DECODER, _PAIR)
