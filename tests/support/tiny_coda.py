"""Small folders of conditional models with random weights, and of tasks on them, as training would leave them.

Encoders have 2 layers, 4 heads of 8, FFN 48, hidden 32; pairs with T5's decoder 1 layer each, 3 heads of 8, FFN 32,
hidden 16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.coda.config import CodaConfig, CodaEncoderDecoderConfig, ImageInput, SoftTopK
from nestforge.exporters.families.coda.encoder_decoder import CodaEncoderDecoder
from nestforge.exporters.families.coda.encoder_decoder import load_model as load_pair
from nestforge.exporters.families.coda.model import CodaEncoder, load_model
from nestforge.exporters.families.coda.ops import is_of_task
from nestforge.exporters.families.coda.tasks import save_task
from support.tiny_models import edit_config, save_t5
from support.tokenizer_files import word_tokenizer

torch.set_num_threads(1)  # several threads on products this small only wait for each other

SCHEDULE = SoftTopK(rounds=3, epsilon=0.5, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")
TINY_CODA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "activation": "relu",
    "gated_ffn": False,
    "norm": "rms",
    "position": "relative",
    "adapter_size": 8,
    "adapter_activation": "relu",
    "router": "soft_top_k",
    "soft_top_k": SCHEDULE,
    "keys_of": "all",
    "ffn_residual": "raw",
    "reduction": 1,
    "reductions": (4, 1),
}
# In the place of texts: images of 2 x 8 x 12, whose six patches stand behind one token.
OF_IMAGES: dict[str, Any] = {
    "vocab_size": None,
    "max_position_embeddings": None,
    "image": ImageInput(channels=2, height=8, width=12, patch_height=4, patch_width=4),
}


def coda_config(**overrides: Any) -> CodaConfig:
    settings = {**TINY_CODA, **overrides}
    if settings["router"] != "soft_top_k":
        settings["soft_top_k"] = None
    if settings.get("adapter") == "lora":
        settings["adapter_activation"] = None
    return CodaConfig(**settings)


def tiny_coda(config: CodaConfig, seed: int = 0) -> CodaEncoder:
    """The model, with weights so large that every part of it shows in the outputs."""
    torch.manual_seed(seed)
    model = CodaEncoder(config)
    for name, parameter in model.named_parameters():
        scale = 1.0 if name == "embeddings.word.weight" else 0.3
        parameter.data = torch.randn_like(parameter) * scale + name.endswith("norm.weight")
    return model.eval().requires_grad_(False)


def save_tiny_coda(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """``tiny_coda`` as a user's folder would hold it, with the tokenizer of ``tiny_models``."""
    config = coda_config(**overrides)
    tokenizer = word_tokenizer(config.vocab_size).to_str()
    return save_model(tiny_coda(config, seed), config, folder, {"tokenizer.json": tokenizer})


# One conditional layer of two, and a reduction: as few engines as show everything.
TASK_SETTINGS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_labels": 3,
    "conditional_layers": (1,),
}


def trained(base: Path, folder: Path, seed: int, **changes: Any) -> Path:
    """A whole checkpoint of another task on the frozen weights of ``base``; ``epsilon`` is its schedule's."""
    found = load_model(base)
    epsilon = changes.pop("epsilon", None)
    if epsilon is not None:
        changes["soft_top_k"] = replace(found.config.soft_top_k, epsilon=epsilon)
    config = replace(found.config, **changes)
    model = CodaEncoder(config)
    model.load_state_dict(found.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_of_task(name):
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.2
    return save_model(model, config, folder)


def save_tiny_task(base: Path, folder: Path, seed: int, **changes: Any) -> Path:
    """The same as a task's folder; the whole checkpoint lies beside it, with ``.trained`` behind its name."""
    return save_task(trained(base, folder.with_suffix(".trained"), seed, **changes), base, folder)


VOCABULARY, POSITIONS = 40, 24
# As every published T5 has them.
DISTANCES = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
T5_SETTINGS = nestforge.ConversionSettings(adapter_size=4, reduction=3, reductions=(3, 1), seed=3)
_PAIR_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "head_dim": 8,
    "softmax_scale": 1.0,
    "intermediate_size": 32,
    "gated_ffn": True,
    "reductions": (3, 1),
    "reduction_of_one": "dense",
}


def encoder_config(**changes: Any) -> CodaConfig:
    return coda_config(**{**_PAIR_ENCODER, **changes})


def pair_config(encoder: CodaConfig | None = None, **changes: Any) -> CodaEncoderDecoderConfig:
    stated: dict[str, Any] = {
        "num_decoder_layers": 1,
        "tie_word_embeddings": True,
        "scale_decoder_outputs": True,
        "decoder_start_token_id": 0,
    }
    return CodaEncoderDecoderConfig(encoder=encoder or encoder_config(), **{**stated, **changes})


def tiny_pair(config: CodaEncoderDecoderConfig) -> CodaEncoderDecoder:
    """The model, with weights so large that every part of it shows in the outputs."""
    torch.manual_seed(0)
    model = CodaEncoderDecoder(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + name.endswith("norm.weight")
    return model.eval().requires_grad_(False)


def save_tiny_pair(folder: Path, **changes: Any) -> Path:
    """``tiny_pair`` as a user's folder would hold it."""
    config = pair_config(**changes)
    return save_model(tiny_pair(config), config, folder)


def save_small_t5(folder: Path, **changes: Any) -> Path:
    """A T5 of the same sizes with a decoder, as transformers writes it."""
    return save_t5(folder, text=False, **{"num_decoder_layers": 1, "vocab_size": VOCABULARY, **DISTANCES, **changes})


def converted_t5(model: Path, output: Path) -> Path:
    """``model`` made conditional, with its decoder, for texts of few tokens and in few rounds, which trace faster."""
    report = nestforge.convert_coda(model, output, T5_SETTINGS, with_decoder=True)
    smaller = replace(report.config, max_position_embeddings=POSITIONS, soft_top_k=SCHEDULE)
    return edit_config(output, encoder=smaller.to_json())


def save_pair_task(base: Path, folder: Path, seed: int, epsilon: float | None = None, **changes: Any) -> Path:
    """A task on ``base`` as its folder; the whole checkpoint lies beside it, with ``.trained`` behind its name."""
    found = load_pair(base)
    if epsilon is not None:
        changes["soft_top_k"] = replace(found.config.encoder.soft_top_k, epsilon=epsilon)
    config = replace(found.config, encoder=replace(found.config.encoder, **changes))
    model = CodaEncoderDecoder(config)
    model.load_state_dict(found.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.startswith("encoder.") and is_of_task(name.removeprefix("encoder.")):
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.3
    return save_task(save_model(model, config, folder.with_suffix(".trained")), base, folder)
