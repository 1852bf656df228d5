"""A small model of a configuration: two layers, or one of each kind, and narrow widths, by the names that
configurations give their sizes."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import offline_transformers, refuse_foreign
from .interface import Loading
from .transformers_model import class_of

# Sizes of a small model by the names that configurations give them; each counts where the type has it.
_SMALL: dict[int, str] = {
    32: "hidden_size d_model dim n_embd embed_dim emb_dim embedding_size word_embed_proj_dim hidden_dim_size width "
    "model_dim decoder_hidden_size encoder_hidden_size text_hidden_size lm_hidden_size hidden_size_per_layer_input "
    "out_hidden_size pooler_output_size channels attention_hidden_size linear_num_value_dim embedding_dim n_embed "
    "image_size input_size img_size max_source_positions conv_pos projection_hidden_size attention_dim lru_width "
    "decoder_dim encoder_dim num_mel_bins upsample_groups audio_hidden_size condition_dim projection_size",
    48: "intermediate_size intermediate_size_mlp d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim n_inner "
    "ffn_hidden_size d_inner inner_dim dense_intermediate_size feed_forward_size mlp_dim encoder_intermediate_size "
    "decoder_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_block_layers num_frames "
    "num_hidden_groups num_experts_per_tok top_k moe_top_k moe_k num_experts_per_token num_selected_experts "
    "attn_layer_period expert_layer_period decoder_sparse_step full_attention_interval",
    4: "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts rotary_dim window_size num_groups "
    "encoder_num_attention_heads decoder_num_attention_heads",
    1: "n_group num_expert_group topk_group n_groups num_nextn_predict_layers first_k_dense_replace n_shared_experts "
    "num_channel_groups attn_layer_offset expert_layer_offset",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state patch_size mamba_d_head "
    "linear_key_head_dim linear_value_head_dim encoder_stride ssm_state_size "
    "mamba_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank projection_dim time_step_rank "
    "moe_shared_expert_intermediate_size expert_intermediate_size conv_dim_size num_conv_pos_embeddings lora_rank",
    128: "vocab_size vocab_size_per_layer_input text_vocab_size entity_vocab_size encoder_hash_byte_group_vocab",
    64: "max_position_embeddings n_positions max_sequence_length max_seq_len max_seq_length n_ctx max_target_positions "
    "max_length codebook_size num_conv_pos window context_size",
}
_SIZE_OF = {name: size for size, names in _SMALL.items() for name in names.split()}
# Those of the sizes that are widths.
_WIDTHS = (8, 16, 32, 48)
# Settings on which arrays of a request depend; and texts, which have the tokens of a tokenizer.
_OF_ARRAYS = frozenset(
    f"{_SMALL[64]} image_size input_size img_size max_source_positions "
    "num_mel_bins patch_size encoder_stride num_frames window_size".split()
)
_OF_TEXTS = frozenset(f"{_SMALL[128]} vocab_size_per_layer_input".split())
# Sizes without which some classes are not made, whose configurations may leave them out.
_NEEDED = ("num_experts_per_tok", "n_routed_experts", "num_key_value_heads", "head_dim")
# Keys that repeat the number of layers.
_OF_LAYERS = ("out_features", "out_indices", "stage_names")
# Changes of some layers, by their numbers.
_BY_LAYER = "per_layer_config"
# Files beside a model that no width changes.
_COMPANIONS = (
    "token*.json",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
)
_MOST_PARAMETERS = 300_000_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
# Layers at the end that read keys and values of others before them.
_SHARING = "num_kv_shared_layers"
_SHARED_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "linear_num_key_heads")


def smaller(config: Any, scale: int = 1, keep: Collection[str] = ()) -> dict[str, Any]:
    """Changes to a configuration that leave a model of two layers, or more where a list says that they are of several
    kinds, and of some thousand weights, its widths by ``scale`` larger; parts of it in turn. Settings named in ``keep``
    stay."""
    stated = config.to_dict()
    parts = [name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    found: dict[str, Any] = {}
    for name in parts:
        part = getattr(config, name)
        gone = () if layers_of(part) is None else _OF_LAYERS  # stages without a number stay
        own = {key: value for key, value in part.to_dict().items() if key not in gone}
        found[name] = {**own, **smaller(part, scale, keep)}
    layers = layers_of(config)
    kept_layers = _one_of_each_kind(stated, layers or 0)
    widths = {each for name, value in stated.items() if _are_stages(name, value) for each in value}
    for name, value in stated.items():
        if isinstance(value, Mapping) and "mrope_section" in value:
            found[name] = {**value, "mrope_section": [2 * scale, scale, scale]}
        if isinstance(value, Mapping) and name == _BY_LAYER:
            numbered = [(number, value.get(layer, value.get(str(layer)))) for number, layer in enumerate(kept_layers)]
            found[name] = {number: own for number, own in numbered if own is not None}
        if value is None and name in _NEEDED and name not in keep:
            found |= _needed_number(name, stated, scale)
        if name in parts or name in keep or isinstance(value, (bool, str, Mapping)) or value is None:
            continue
        if name.endswith("token_id") and "vocab_size" in keep:
            continue
        if name in _LAYERS and value == layers:
            found[name] = min(value, max(2, len(kept_layers)))
        elif name == _SHARING:
            found[name] = sum(layer >= (layers or 0) - value for layer in kept_layers)
        elif isinstance(value, int):
            if "channels" in name and value in widths:
                found[name] = _narrower(value, max(widths), scale)
            else:
                found |= _smaller_number(name, value, stated, scale)
        elif isinstance(value, (list, tuple)) and value:
            of_kept = [value[layer] for layer in kept_layers] if len(value) == layers else list(value)
            kept = _smaller_list(name, of_kept, max(widths, default=0), scale)
            found |= {} if kept == list(value) else {name: kept}
    return found


def _smaller_number(name: str, value: int, stated: Mapping[str, Any], scale: int) -> dict[str, int]:
    if name in _SIZE_OF:
        size = _SIZE_OF[name]
        return {name: min(value, size * scale if size in _WIDTHS else size)}
    if name in _SHARED_HEADS:
        heads = next(
            (stated[each] for each in ("num_attention_heads", "n_head") if isinstance(stated.get(each), int)), 0
        )
        return {name: min(value, 4 if value >= heads else 2)}
    if name.endswith("token_id") and value >= 100:
        return {name: value % 97 + 1}
    return {}


def _needed_number(name: str, stated: Mapping[str, Any], scale: int) -> dict[str, int]:
    """A size that ``stated`` leaves out, as classes that need none have it."""
    small = {key: _smaller_number(key, value, stated, scale) for key, value in stated.items() if type(value) is int}
    heads, width = (small.get(key, {}).get(key) for key in ("num_attention_heads", "hidden_size"))
    if name == "num_key_value_heads":
        return {} if heads is None else {name: heads}
    if name == "head_dim":
        return {} if heads is None or width is None else {name: width // heads}
    return {name: _SIZE_OF[name]}


def layers_of(config: Any) -> int | None:
    """How many layers a configuration states, if it does."""
    stated = config.to_dict()
    return next((stated[name] for name in _LAYERS if isinstance(stated.get(name), int)), None)


def _one_of_each_kind(stated: Mapping[str, Any], layers: int) -> list[int]:
    """The first and the last of the layers, and the first of every other kind. Lists tell kinds apart by their words,
    and by whether their numbers are 0."""
    lists = [
        value
        for name, value in stated.items()
        if isinstance(value, (list, tuple)) and len(value) == layers and name not in _OF_LAYERS
    ]
    sharing = stated.get(_SHARING) or 0
    kinds = [
        (
            layer >= layers - sharing,
            *(each[layer] if isinstance(each[layer], str) else bool(each[layer]) for each in lists),
        )
        for layer in range(layers)
    ]
    ends = {0, layers - 1} if layers else set()
    others = {kinds.index(kind) for kind in kinds} - {kinds.index(kinds[layer]) for layer in ends}
    return sorted(ends | others)


def _smaller_list(name: str, value: list[Any], widest: int, scale: int) -> list[Any]:
    """A list of smaller sizes; ``widest`` is the largest width of a stage in any list. Lists of stages shrink by one
    factor, so that stages still fit together."""
    if not all(type(each) is int for each in value):
        return value
    if name == "encode_proj_layers":  # the numbers of stages, of which there are as many
        return value
    if "depth" in name or "layers" in name or name in ("num_blocks",):
        return [1] * len(value)
    if "feature_layer" in name:  # the numbers of layers
        return [min(each, 1) for each in value]
    if _are_stages(name, value):
        return [_narrower(each, widest, scale) for each in value]
    if max(value) >= 64 and _are_widths(name):
        return [_narrower(each, max(value), scale) for each in value]
    if "heads" in name:
        return [min(each, 2) for each in value]
    return value


def _are_widths(name: str) -> bool:
    return any(word in name for word in ("size", "dim", "channel", "widths"))


def _are_stages(name: str, value: Any) -> bool:
    """Whether a list is of the widths of stages: several, and no height and width."""
    if not isinstance(value, (list, tuple)) or not all(type(each) is int for each in value) or len({*value}) < 2:
        return False
    return _are_widths(name) and name not in _SIZE_OF and ("channel" in name or max(value) >= 64)


def _narrower(width: int, widest: int, scale: int) -> int:
    return min(width, max(4, width * 32 * scale // widest // 4 * 4))


@dataclass(frozen=True)
class SmallCopy:
    """A random model in ``folder`` of the class and configuration of another, which has so many ``layers`` if it says
    so; ``changes`` are the sizes by name, before and after."""

    folder: Path
    model_class: str
    layers: int | None
    parameters: int
    changes: Mapping[str, tuple[Any, Any]]


def random_model(cls: Any, config: Any, most: int) -> Any:
    """A model of ``cls`` whose every parameter matters: biases and norms would start at constants. Raises ValueError
    for one of more than ``most`` parameters."""
    import torch

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    if parameters > most:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters are left; no name of a size is known")
    torch.manual_seed(0)
    model = cls(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def save_small_copy(checkpoint: Checkpoint, folder: Path, scale: int, reads_texts: bool) -> SmallCopy:
    """Saves a random model of few layers, as ``smaller``, with widths by ``scale``, that takes the inputs of the one
    that ``config.json`` of ``checkpoint`` describes: positions and images stay, and if it ``reads_texts`` the
    vocabulary, with the tokenizer beside it. Weights are not read.

    Raises CheckpointError where its class makes no such model, or none of the configuration as it is.
    """
    import torch

    refuse_foreign(checkpoint)
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in offline_transformers().models.auto.CONFIG_MAPPING:
        raise checkpoint.misfit(f"model_type {model_type!r:.80}: a trial is of models of transformers alone")
    config, cls, _ = class_of(checkpoint, Loading())
    made = f"{cls.__name__} cannot be made of it"
    try:
        with torch.device("meta"):
            cls(config)
        made = f"no small model of {cls.__name__} can be made"
        changed = smaller(config, scale, _OF_ARRAYS | _OF_TEXTS if reads_texts else _OF_ARRAYS)
        stated = {name: value for name, value in config.to_dict().items() if name not in _OF_LAYERS}
        small = type(config)(**{**stated, **changed})
        model = random_model(cls, small, _MOST_PARAMETERS)
        model.save_pretrained(folder)
    except Exception as failure:  # of any kind: the code of hundreds of models
        said = " ".join(str(failure).split())
        raise checkpoint.misfit(f"{made}: {type(failure).__name__}: {said:.300}") from failure
    for pattern in _COMPANIONS if reads_texts else ():
        for path in checkpoint.folder.glob(pattern):
            shutil.copy(path, folder / path.name)
    changes = {name: (stated.get(name), value) for name, value in changed.items() if type(value) is int}
    changes = {name: pair for name, pair in changes.items() if pair[0] != pair[1]}
    count = sum(parameter.numel() for parameter in model.parameters())
    return SmallCopy(folder, cls.__name__, layers_of(config), count, changes)
