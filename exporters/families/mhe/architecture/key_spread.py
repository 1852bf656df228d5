"""How far apart a head of mhe_add may weigh two keys, as the weights of a model bound it (no torch here).

What a head ``i`` adds to the scores of a key is ``e_i . k`` with ``k = W x`` (section 6.4), a linear function ``u . x``
of what the key is made of. Where that comes of a LayerNorm, ``x = gamma * z + beta``: ``z`` has mean 0 and a length of
at most ``sqrt(H)``, so that two keys differ by at most ``2 sqrt(H) |P(gamma * u)|``, ``P`` what leaves out the mean. Of
embeddings, which have none in translation models, by what the tables hold.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes  # noqa: F401  (numpy then reads bfloat16)
import numpy as np
from safetensors import safe_open

from ....checkpoints.checkpoint import Checkpoint
from .config import MheConfig, MheDecoderConfig, MheEncoderConfig
from .places import places_of

Read = Callable[[str], np.ndarray]


def key_spread(checkpoint: Checkpoint, config: MheConfig) -> float:
    """The largest difference of ``e_i . k`` between two keys, times the softmax scale, over all heads and sublayers; 0
    of a model that has no such heads, heads that share no keys (rotary positions), or no weights yet.

    Raises CheckpointError for numbers that are not finite.
    """
    if config.attention != "mhe_add" or config.position == "rotary" or not checkpoint.has_weights:
        return 0.0

    def read(name: str) -> np.ndarray:
        with safe_open(checkpoint.folder / checkpoint.tensors[name].file, framework="numpy") as file:
            tensor: np.ndarray = file.get_tensor(name)
        wide = tensor.astype(np.float64)
        if not np.isfinite(wide).all():
            raise checkpoint.not_finite(name)
        return wide

    return max(_spread(config, place.at, read) for place in places_of(config))


def _spread(config: MheConfig, at: str, read: Read) -> float:
    """Of the sublayer ``at``."""
    table = read(f"{at}.embedding.query")
    by_key = (table.T if config.width_first else table) @ read(f"{at}.key.weight") * config.scale  # u [n, H]
    norm = _norm_before(config, at)
    if norm is None:
        tables = (read(f"embeddings.{name}.weight") @ by_key.T for name in ("word", "position"))
        return float(sum(np.ptp(table, axis=0) for table in tables).max())
    stretched = by_key * read(f"{norm}.weight")
    centred = stretched - stretched.mean(1, keepdims=True)
    return float(2 * config.hidden_size**0.5 * np.linalg.norm(centred, axis=1).max())


def _norm_before(config: MheConfig, at: str) -> str | None:
    """The LayerNorm of which the keys of the sublayer ``at`` are made; None where they are made of embeddings."""
    side, _, rest = at.rpartition("layers.")
    layer, _, part = rest.partition(".")
    if isinstance(config, MheDecoderConfig):
        return f"{at}_norm"
    if part == "cross_attention":
        return f"encoder.layers.{config.num_hidden_layers - 1}.ffn_norm"
    if int(layer):
        return f"{side}layers.{int(layer) - 1}.ffn_norm"
    return "embeddings.norm" if isinstance(config, MheEncoderConfig) else None
