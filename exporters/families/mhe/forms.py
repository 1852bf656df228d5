"""The forms in which engines may compute attention of heads with embeddings, and when each gives the same numbers.

Section 6 of the reference derives them: ``literal`` (form A) as the module is written; ``expanded`` (B), an ordinary
MHA; ``expanded_queries`` (C), queries of each head over keys and values that all share; ``normal`` (D), those queries
made of one projection; ``one_head``, the same by one operator of ONNX Runtime, which is given all heads' queries as
rows of one head; ``shared_scores`` (E), one matrix of scores for all heads and a number for each key;
``one_exponential`` (6.7), that matrix's softmax for all heads, times an exponential for each head and key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (numpy then reads bfloat16)
import numpy as np
from safetensors import safe_open

from ....elastic import PrefixSlice
from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.tensors import Shape
from .config import WITH_SHARED_KEYS, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig

# What has these forms, as variants call it: all attention of a model with one side; of one with two, by its role.
ATTENTION = "attention"
ENCODER, DECODER, CROSS = "encoder_attention", "decoder_attention", "cross_attention"
# The first that holds is what figures without a device count.
FORMS = ("normal", "one_head", "shared_scores", "one_exponential", "expanded_queries", "expanded", "literal")
# Those in which heads share keys and values, so that a cache has two vectors for each token and layer.
SHARED_KEYS = ("normal", "one_head", "shared_scores", "one_exponential", "expanded_queries")
# Those in which heads share a matrix of scores too.
_SHARED_SCORES = ("shared_scores", "one_exponential")
# Those with an operator that ONNX Runtime alone has, and in float32 alone.
ONNXRUNTIME_FORMS = frozenset({"one_head"})
# What a head adds to the scores of two keys may differ by so much where its exponential is taken apart: between 1 and
# exp(-8), 3e-4, which half precision has too.
MOST_SPREAD = 8.0
Read = Callable[[str], np.ndarray]


class Place(NamedTuple):
    """Attention in the module ``at``; ``axis`` is that of its heads, or of how many numbers each has, if there is one,
    and ``role`` what the variants call its form."""

    at: str
    axis: str | None
    role: str


def layers_of(config: MheConfig) -> tuple[str, ...]:
    """Every layer, by its module and as axes call it; an encoder's before its decoder's."""
    own = tuple(f"layers.{layer}" for layer in range(config.num_hidden_layers))
    if not isinstance(config, MheEncoderDecoderConfig):
        return own
    after = (f"decoder.layers.{layer}" for layer in range(config.decoder_layers))
    return (*(f"encoder.{layer}" for layer in own), *after)


def places_of(config: MheConfig) -> tuple[Place, ...]:
    """Every sublayer of attention, in the order in which a pass comes to it."""
    return tuple(place for layer in layers_of(config) for place in places_in(config, layer))


def places_in(config: MheConfig, layer: str) -> tuple[Place, ...]:
    """The sublayers of attention of one ``layer``."""
    own, axis = f"{layer}.attention", config.heads_axis and f"{layer}.{config.heads_axis}"
    if not isinstance(config, MheEncoderDecoderConfig):
        return (Place(own, axis, ATTENTION),)
    if layer.startswith("encoder."):
        return (Place(own, axis, ENCODER),)
    cross = Place(f"{layer}.cross_attention", config.cross_axis and f"{layer}.{config.cross_axis}", CROSS)
    return (Place(own, axis, DECODER), cross)


def held_forms(config: MheConfig, spread: float = 0.0, role: str | None = None) -> tuple[str, ...]:
    """The forms that attention in a ``role``, or in all roles of a model, may have, cheapest cache first; none where
    heads have no embeddings. ``spread`` is ``key_spread``'s."""
    return tuple(form for form in FORMS if form_problem(config, form, spread, role) is None)


def cached_form(config: MheConfig) -> str:
    """The form of KV-cache engines: the one with the smallest, which is as cheap as any for one token."""
    return "normal" if form_problem(config, "normal") is None else "literal"


def prompt_form(config: MheConfig, spread: float = 0.0) -> str:
    """The form of engines that read a prompt of any length, whole: the one with the fewest products and exponentials of
    long ones."""
    held = held_forms(config, spread)
    return next(form for form in (*reversed(_SHARED_SCORES), "normal") if form in held)


def cached_heads(config: MheConfig) -> int:
    """Heads of keys and values that a cache has of each layer."""
    is_turned = config.has_tables and cached_form(config) == "literal"
    return 1 if config.attention in WITH_SHARED_KEYS and not is_turned else config.num_attention_heads


def form_problem(config: MheConfig, form: str, spread: float = 0.0, role: str | None = None) -> str | None:
    """Why ``form`` would be another function than the model (section 6.8) in a ``role``, or in one of its roles where
    none is stated, or None."""
    if not config.has_tables:
        return f"{config.attention} attention has no head embeddings, and one form alone"
    if form in SHARED_KEYS and config.position == "rotary":
        return (
            "rotary positions turn keys after their head embeddings, so that heads do not share keys; "
            "expanded and literal hold"
        )
    if form == "one_head" and _is_causal(config, role):
        return (
            "the operator takes one mask for all queries of a row, and a decoder's tokens do not see the same keys; "
            "normal holds"
        )
    if form == "one_head" and config.heads_axis == "head_width":
        return "a mask lies behind the numbers of each head, which shrink here; normal holds"
    if form in _SHARED_SCORES and config.attention == "mhe_mul":
        return "a head of mhe_mul stretches queries and keys by factors of its own; one matrix of scores is mhe_add's"
    if form == "one_exponential" and not spread <= MOST_SPREAD:
        return (
            f"by the weights of this model a head may weigh two keys exp({spread:.3g}) apart, more than exp("
            f"{MOST_SPREAD:g}), up to which no product of exponentials rounds to nothing; shared_scores holds"
        )
    return None


def _is_causal(config: MheConfig, role: str | None) -> bool:
    """Whether tokens see those before them alone, in ``role`` or in any."""
    if isinstance(config, MheEncoderDecoderConfig):
        return role in (DECODER, None)
    return isinstance(config, MheDecoderConfig)


def folded_shapes(config: MheConfig, at: str) -> dict[str, Shape]:
    """Tensors that forms of the attention sublayer ``at`` read in place of parameters, by name, to their shapes; none
    where heads have no embeddings.

    Each is made of parameters head by head, so that the first heads of it are what the first heads of the parameters
    give: slicing first and folding second is a prefix of what was folded once. Names below the sublayer's, ``n`` heads
    of size ``d``, which of the two in front as the layout of the model says:

    - ``folded.query`` ``[n, d]``, of mhe_mul: both factors of a head and the softmax scale, ``c_i`` of section 6.3.
    - ``folded.key`` ``[d, H]``, of mhe_add: the key projection with the softmax scale.
    - ``folded.output`` ``[H, n * d]``, of mhe_mul: the output projection with the value factors (6.5).
    - ``folded.queries.weight`` ``[n * d, H]``, ``.bias``: a query projection for each head (form C).
    - ``expanded.query.weight`` ``[n * d, H]``, ``.bias``, and of keys and values: an ordinary MHA (form B, 6.1, 6.2).
    """
    if not config.has_tables:
        return {}
    d, inner, is_mul = config.hidden_size, config.inner, config.attention == "mhe_mul"
    shapes: dict[str, Shape] = {}
    if is_mul:
        shapes[f"{at}.folded.query"] = config.table_shape
        shapes[f"{at}.folded.output"] = (d, inner)
    else:
        shapes[f"{at}.folded.key"] = (config.head_size, d)
    for part in ("folded.queries", "expanded.query", "expanded.key", "expanded.value"):
        shapes[f"{at}.{part}.weight"] = (inner, d)
        if not is_mul or config.attention_bias:  # what mhe_add adds is a bias of each head
            shapes[f"{at}.{part}.bias"] = (inner,)
    return shapes


def folded_slices(config: MheConfig, at: str, axis: str | None) -> dict[str, PrefixSlice | None]:
    """Tensor to its slice along the ``axis`` of the heads, or of how many numbers each has, if there is one."""
    slices: dict[str, PrefixSlice | None] = dict.fromkeys(folded_shapes(config, at))
    if axis is None:
        return slices
    for name in slices:
        if name.endswith("folded.query"):
            slices[name] = PrefixSlice(name, 0, axis)
        elif name.endswith("folded.key"):  # one head's, which all share
            slices[name] = PrefixSlice(name, 0, axis) if config.width_first else None
        else:
            dim = 1 if name.endswith("folded.output") else 0
            slices[name] = PrefixSlice(name, dim, axis, config.step)
    return slices


def key_spread(checkpoint: Checkpoint, config: MheConfig) -> float:
    """How far apart a head of mhe_add may weigh two keys, as the weights bound it: the largest difference of
    ``e_i . k`` between two keys, times the softmax scale, over all heads and sublayers;
    0 of a model that has no such heads, heads that share no keys (rotary positions), or no weights yet.

    What a head ``i`` adds to the scores of a key is ``e_i . k`` with ``k = W x`` (section 6.4), a linear function
    ``u . x`` of what the key is made of. Where that comes of a LayerNorm, ``x = gamma * z + beta``: ``z`` has mean 0
    and a length of at most ``sqrt(H)``, so that two keys differ by at most ``2 sqrt(H) |P(gamma * u)|``, ``P`` what
    leaves out the mean. Of embeddings, which have none in translation models, by what the tables hold.

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
    """Spread of the sublayer ``at``."""
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
