"""Inputs of a class of transformers, by the parameters of its ``forward`` and what its configuration states of them:
texts, images, sound and series, the longest text, whether tokens see those behind them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...bundle.entries.tensor_spec import TensorSpec
from ..signature import IDS, MASK, TOKENS, TYPE_IDS, WRITTEN_IDS
from .decoder_positions import constant_positions
from .generating import is_encoder_decoder
from .interface import BOX_PLACES, BOXES

_USUAL_SAMPLES, _USUAL_FRAMES = 16_000, 96  # one second of sound
# Parameters of ``forward`` that carry nothing of a request's own.
_WITHOUT_DATA = re.compile(
    r"(.*_)?(labels|inputs_embeds|position_ids|past_key_values|head_mask|cache_params|cache_position|cache)"
    r"|(output|return|use)_.*|logits_to_keep|interpolate_pos_encoding|vision_feature_.*|\w*encoder_outputs|mems|kwargs"
)
# Keys of configurations by what they say; the first that is there counts.
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_SIDES = ("image_size", "img_size", "input_size")
_FRAMES = ("num_frames", "frames_per_clip")
_MELS = (
    *("num_mel_bins", "input_feat_per_channel", "feature_size", "num_mel_features", "n_mels", "input_dim"),
    "feature_projection_input_dim",
)
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "max_seq_length", "n_ctx"),
    "max_target_positions",
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth", "depths")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
_BACKBONE = "backbone_config"


def data_of(model: Any) -> Iterator[str]:
    """The parameters of ``forward`` that carry data of a request: tensors and lists, and what has no annotation, but
    not what training, caches and callers that embed tokens themselves give."""
    for name, parameter in inspect.signature(model.forward).parameters.items():
        said = "Tensor" if parameter.annotation is parameter.empty else str(parameter.annotation)
        named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if named and ("Tensor" in said or "list" in said.lower()) and not _WITHOUT_DATA.fullmatch(name):
            yield name


def inputs_of(model: Any) -> Iterator[tuple[TensorSpec, ...]]:
    """The inputs of ``forward``, by their names: all that are known, then text, image or sound alone. Inputs that a
    pass does without are left out."""
    taken = inspect.signature(model.forward).parameters
    configs = configs_of(model.config)
    texts = tuple(_text_specs(model, taken, configs)) if IDS in taken else ()
    images, sounds = tuple(_image_specs(taken, configs)), tuple(_sound_specs(taken, configs))
    behind: tuple[TensorSpec, ...] = ()
    if is_encoder_decoder(model):
        behind = (TensorSpec(WRITTEN_IDS, "int64", TOKENS, pad=_pad(model), high=vocabulary(model)),)
    series = tuple(_series_specs(taken, configs))
    every = [(*texts, *images, *(sound,)) for sound in sounds] or [(*texts, *images, *series)]
    alone = [texts, images, *((sound,) for sound in sounds), series]
    for inputs in dict.fromkeys([*every, *alone]):
        if inputs:
            yield (*inputs, *behind)


def _image_specs(taken: Mapping[str, Any], configs: Sequence[Any]) -> Iterator[TensorSpec]:
    side = _value(configs, _SIDES, 224)
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    frames = (_value(configs, _FRAMES, 16),) if _has(configs, _FRAMES) else ()
    dims = ("batch", *frames, _value(configs, _CHANNELS, 3), int(height), int(width))
    for name in ("pixel_values", "pixel_values_videos"):
        if name in taken and (name == "pixel_values" or "pixel_values" not in taken):
            yield TensorSpec(name, "float32", dims, pad=0)


def _sound_specs(taken: Mapping[str, Any], configs: Sequence[Any]) -> Iterator[TensorSpec]:
    """Each of them an alternative: frames of a spectrum behind its bands or before them, the latter also as an image of
    one channel (CLAP), or samples."""
    bands = _value(configs, _MELS, 80)
    if "input_features" in taken:
        window = 2 * _value(configs, ("max_source_positions",), _USUAL_FRAMES // 2)  # as Whisper has them
        yield TensorSpec("input_features", "float32", ("batch", bands, window), pad=0)
        yield TensorSpec("input_features", "float32", ("batch", _USUAL_FRAMES, bands), pad=0)
        yield TensorSpec("input_features", "float32", ("batch", 1, _USUAL_FRAMES, bands), pad=0)
    if "input_values" in taken:
        if _has(configs, _MELS):
            window = _value(configs, ("max_length",), _USUAL_FRAMES)
            yield TensorSpec("input_values", "float32", ("batch", window, bands), pad=0)
        yield TensorSpec("input_values", "float32", ("batch", _USUAL_SAMPLES), pad=0)
        yield TensorSpec("input_values", "float32", ("batch", 1, _USUAL_SAMPLES), pad=0)


def _series_specs(taken: Mapping[str, Any], configs: Sequence[Any]) -> Iterator[TensorSpec]:
    length, channels = (_value(configs, (key,), None) for key in ("context_length", "num_input_channels"))
    if "past_values" in taken and length and channels:
        yield TensorSpec("past_values", "float32", ("batch", length, channels), pad=0)


def _text_specs(model: Any, taken: Mapping[str, Any], configs: Sequence[Any]) -> Iterator[TensorSpec]:
    yield TensorSpec(IDS, "int64", TOKENS, pad=_pad(model), high=vocabulary(model))
    if MASK in taken:
        yield TensorSpec(MASK, "int64", TOKENS, pad=0, high=2, row_needs="token" if _sees_all(model) else "first_token")
    types = _value(configs, ("type_vocab_size",), 1)
    if TYPE_IDS in taken and types > 1:
        yield TensorSpec(TYPE_IDS, "int64", TOKENS, pad=0, high=types)
    if BOXES in taken:
        yield TensorSpec(BOXES, "int64", (*TOKENS, 4), pad=0, high=_value(configs, (BOX_PLACES,), 1))


def configs_of(config: Any) -> list[Any]:
    """A configuration and those of its parts, the parts that state what goes in last."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for part in parts if part is not None)]


def _has(configs: Sequence[Any], keys: Sequence[str]) -> bool:
    return _value(configs, keys, None) is not None


def _value(configs: Sequence[Any], keys: Sequence[str], default: Any) -> Any:
    return next((v for c in configs for key in keys if (v := getattr(c, key, None)) is not None), default)


def _tokens(model: Any) -> Any:
    """The table of tokens, None of a model that has none."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return table if isinstance(table, torch.nn.Embedding) else None


def vocabulary(model: Any) -> int:
    table = _tokens(model)
    stated = _value([model.config.get_text_config(), *configs_of(model.config)], ("vocab_size",), 2)
    return int(stated if table is None else min(stated, table.num_embeddings))


def _pad(model: Any) -> int:
    pad = _value([model.config.get_text_config(), model.config], ("pad_token_id",), 0)
    return pad if isinstance(pad, int) and 0 <= pad < vocabulary(model) else 0


def positions(model: Any) -> tuple[int | None, str | None]:
    """Tokens of the longest text, and why another number than stated. RoBERTa and its kin count positions from behind
    the one of padding; those of ``longrope`` end where their frequencies change."""
    stated = _value([model.config.get_text_config(), *configs_of(model.config)], _POSITIONS, None)
    if not isinstance(stated, int) or stated < 1:
        return None, "config.json states no number of positions"
    tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    own = [table for table in tables if table.num_embeddings == stated and table is not _tokens(model)]
    longest = stated - max((table.padding_idx + 1 for table in own if table.padding_idx is not None), default=0)
    kept = constant_positions(model.config.get_text_config().to_dict(), longest, None)
    why = f"rotary positions change for texts of more, up to the {longest} stated" if kept < longest else None
    return kept, why


def _sees_all(model: Any) -> bool:
    """Whether the type is known for models whose tokens see those behind them, and is not made a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not _is_decoder(model)


def is_causal(model: Any) -> bool:
    """Whether logits are of the token behind each: of causal models, and of what a decoder writes behind an encoder.
    Among the types that transformers lists as causal models XLNet sees every token, and so does BERT's own for
    generation where it is no decoder."""
    from transformers.models.auto import modeling_auto as auto

    if is_encoder_decoder(model):
        kinds = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")
        tables = [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds]
        return any(type(model).__name__ in table.values() for table in tables)
    listed = type(model).__name__ in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    sees_all = model.config.model_type in ("xlnet", "bert-generation") and not _is_decoder(model)
    return listed and not _sees_all(model) and not sees_all


def _is_decoder(model: Any) -> bool:
    return getattr(model.config, "is_decoder", False) is True


def depth(model: Any) -> int:
    """Layers that an answer passes through, for tolerances: those of both sides of an encoder-decoder, and of the
    backbone before them."""
    config = model.config
    backbone = getattr(config, _BACKBONE, None)
    parts = [part for part in configs_of(config) if part is not backbone]
    deepest = _most(parts, _LAYERS, 1)
    both = getattr(config, "is_encoder_decoder", False) is True
    behind = _most(parts, _DECODER_LAYERS, deepest) if both else 0
    return deepest + behind + (0 if backbone is None else _most([backbone], _LAYERS, 1))


def _most(configs: Sequence[Any], keys: Sequence[str], usual: int) -> int:
    stated = [getattr(config, key, None) for config in configs for key in keys]
    return max([layers for value in stated if (layers := _layers(value)) is not None], default=usual)


def _layers(stated: Any) -> int | None:
    """A number of layers, or the sum of those of stages."""
    if isinstance(stated, (list, tuple)) and all(isinstance(stage, int) for stage in stated):
        return sum(stated)
    return stated if isinstance(stated, int) else None
