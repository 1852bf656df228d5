"""Attributes of a ``SentenceTransformer`` that a bundle lacks, each with the reason for it."""

from __future__ import annotations

_REASONS = {
    "nothing is trained or changed here": (
        *("fit", "old_fit", "train", "eval", "parameters", "state_dict", "merge", "append", "extend", "insert", "pop"),
        *("add_adapter", "load_adapter", "set_adapter", "enable_adapters", "disable_adapters", "delete_adapter"),
        *("active_adapter", "active_adapters", "get_adapter_state_dict", "has_peft_compatible_model"),
        *("check_peft_compatible_model", "gradient_checkpointing_enable", "set_pooling_include_prompt"),
        *("smart_batching_collate", "training"),
    ),
    "a bundle is a folder, which is copied as it is": ("save", "save_pretrained", "save_to_hub", "push_to_hub"),
    "the engines run where the bundle was loaded: nestforge.load(bundle, provider=...)": (
        *("to", "cpu", "cuda", "half", "float", "bfloat16", "share_memory", "compile"),
        *("backend", "get_backend", "clear_placement_cache", "is_hpu_graph_enabled"),
    ),
    "a bundle has no PyTorch modules; preprocess() makes inputs of texts": (
        *("forward", "modules", "module_kwargs", "transformers_model", "config", "dtype", "tokenizer", "processor"),
        *("get_sentence_features", "get_model_kwargs", "model_card_data_class"),
    ),
    "a bundle takes texts alone, and is opened by its folder": (
        *("load", "modalities", "supports", "is_singular_input", "model_type", "default_huggingface_organization"),
        *("trust_remote_code", "SUPPORTED_SIMILARITY_FN_NAMES"),
    ),
}
_REASON_OF = {name: reason for reason, names in _REASONS.items() for name in names}


def absent(kind: str, name: str) -> str:
    """The message for the attribute ``name`` that an object of class ``kind`` lacks."""
    reason = _REASON_OF.get(name)
    return f"{kind!r} object has no attribute {name!r}{'' if reason is None else f': {reason}'}"
