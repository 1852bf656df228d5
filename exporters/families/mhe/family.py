"""Models with MHE attention, or one that its paper (arXiv 2310.07911) compares with. See docs/mhe.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where a head can be left out, ``heads`` (rows
of the tables of head embeddings, or blocks of rows of what each head projects; columns of ``attention.output``), or in
the layout that has it in front ``head_width`` (the same, by numbers of a head; of projections that are shared too).
Decoders behind an encoder also have ``cross_heads`` or ``cross_head_width``, of their attention to it; their whole
engine answers a pair of texts at every position of the second. Both have the bucket's length, since what pads the first
is masked, and what pads the second on its right changes nothing before it.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ...architecture import Architecture, Folded
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Deferred, own_family
from ...parts import CacheAxes, CachedSpec, EncoderSpec
from ...signature import TOKENS, next_token_logits, text_signature
from .config import KINDS, PRESETS, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import (
    ATTENTION,
    CROSS,
    DECODER,
    ENCODER,
    FORMS,
    ONNXRUNTIME_FORMS,
    cached_form,
    cached_heads,
    compare_weights,
    elastic_spec,
    folded_shapes,
    form_problem,
    key_spread,
    parameter_group,
    parameters,
    places_of,
    prompt_form,
)
from .ops import encoding_ops, forward_ops, step_ops, variant_ops

if TYPE_CHECKING:
    import torch

    from ...modules import attention as shared_attention
    from . import attention, model
else:
    shared_attention = Deferred("...modules.attention", __package__)
    attention, model = Deferred(".attention", __package__), Deferred(".model", __package__)


_TABLES = ("embeddings.word.weight", "embeddings.position.weight", "lm_head.weight")


def _read(kind: type[MheConfig], checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, kind)
    shapes = parameters(config).shapes
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)
    spread = key_spread(checkpoint, config)
    places = places_of(config)
    problems = {role: _problems(config, spread, role) for role in dict.fromkeys(place.role for place in places)}
    made = {name: shape for place in places for name, shape in folded_shapes(config, place.at).items()}
    return Architecture(
        # Where attention is causal, padding on the right changes nothing before it.
        signature=text_signature(
            checkpoint,
            [_output(config)],
            config.max_position_embeddings,
            config.vocab_size,
            needs=None if isinstance(config, MheDecoderConfig) else "token",
            start=config.decoder_start_token_id if isinstance(config, MheEncoderDecoderConfig) else None,
        ),
        workload=partial(forward_ops, config),
        load=lambda: model.answering(checkpoint, config),
        spec=elastic_spec(config),
        parameter_shapes=shapes,
        is_embedding=lambda parameter, _: parameter in _TABLES,
        group_of=parameter_group,
        variants=partial(variant_ops, config, spread=spread),
        variant_problems=problems,
        onnxruntime_variants=ONNXRUNTIME_FORMS if config.has_tables else frozenset(),
        lower=attention.lower if config.has_tables else None,
        folded=Folded(made, attention.folded_tensor) if made else None,
        cached=_cached(config, spread),
    )


def _problems(config: MheConfig, spread: float, role: str) -> dict[str, str]:
    """The forms that attention in ``role`` may not have, to why."""
    found = {form: form_problem(config, form, spread, role) for form in FORMS}
    return {form: problem for form, problem in found.items() if problem is not None}


def _output(config: MheConfig) -> TensorSpec:
    if not isinstance(config, MheEncoderConfig):
        return next_token_logits(config.vocab_size)
    match config.head:
        case "masked_lm":
            return TensorSpec("logits", "float32", (*TOKENS, config.vocab_size), role="tokens")
        case "classifier":
            return TensorSpec("logits", "float32", ("batch", config.num_labels or 0), role="classes")
    return TensorSpec("last_hidden_state", "float32", (*TOKENS, config.hidden_size))


def _cached(config: MheConfig, spread: float) -> CachedSpec | None:
    vocabulary, positions = config.vocab_size, config.max_position_embeddings
    layer, variant = CachedLayer(cached_heads(config), config.head_size), cached_form(config)
    recorded: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: model.Recorded(module.model)  # noqa: E731
    if isinstance(config, MheDecoderConfig):
        return CachedSpec(
            vocabulary,
            positions,
            (layer,) * config.num_hidden_layers,
            lambda module: shared_attention.CachedLM(module.model),
            recorded,
            variants={ATTENTION: variant} if config.has_tables else {},
            cache_axes=cache_axes(config, ATTENTION),
        )
    if not isinstance(config, MheEncoderDecoderConfig):
        return None
    forms = {ENCODER: prompt_form(config, spread), DECODER: variant, CROSS: variant} if config.has_tables else {}
    encoder = EncoderSpec(
        config.decoder_start_token_id,
        positions,
        lambda module: model.SourceEncoder(module.model),
        partial(encoding_ops, config, spread=spread),
        partial(step_ops, config),
        cache_axes=cache_axes(config, CROSS),
    )
    return CachedSpec(
        vocabulary,
        positions,
        (layer,) * config.decoder_layers,
        lambda module: model.CachedDecoder(module.model),
        recorded,
        encoder=encoder,
        cache_axes=cache_axes(config, DECODER),
        variants=forms,
    )


def cache_axes(config: MheConfig, role: str) -> tuple[CacheAxes, ...]:
    """Cached heads of attention in ``role``, layer by layer; none where all submodels keep the same: heads that all
    read one pair of keys and values leave that as it is."""
    axes = [place.axis for place in places_of(config) if place.role == role]
    if config.width_first:
        return tuple(CacheAxes(size=axis) for axis in axes if axis is not None)
    return tuple(CacheAxes(heads=axis) for axis in axes if axis is not None and cached_heads(config) > 1)


FAMILIES = tuple(
    own_family(
        model_type,
        partial(_read, kind),
        {name: config for name, config in PRESETS.items() if isinstance(config, kind)},
    )
    for model_type, kind in KINDS.items()
)
