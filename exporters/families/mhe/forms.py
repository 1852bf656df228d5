"""Parameters of MHE models, and the forms in which engines may compute attention of heads with embeddings.

Linear weights are ``[out, in]``, as torch stores them. Tables of head embeddings are ``[heads, head size]``, or turned
where the layout has the width of heads in front; their name says how those of ``mhe_mul`` are stored: ``embedding``
holds what 1 is added to, ``factor`` has that 1.

Section 6 of the reference derives the forms: ``literal`` (form A) as the module is written; ``expanded`` (B), an
ordinary MHA; ``expanded_queries`` (C), queries of each head over keys and values that all share; ``normal`` (D), those
queries made of one projection; ``one_head``, the same by one operator of ONNX Runtime, which is given all heads'
queries as rows of one head; ``shared_scores`` (E), one matrix of scores for all heads and a number for each key;
``one_exponential`` (6.7), that matrix's softmax for all heads, times an exponential for each head and key.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (numpy then reads bfloat16)
import numpy as np
from safetensors import safe_open

from ....elastic import Axis, ElasticSpec, PrefixSlice
from ....errors import CheckpointError
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...hugging_face.tensors import Parameters, Shape
from ...parts import SIZE_MULTIPLE
from .config import ROLES, WITH_SHARED_KEYS, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig

# Parts that have these forms, as variants call them: all attention of a model with one side; of one with two, by its
# role.
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
# The addends of a head to the scores of two keys may differ by so much where its exponential is taken apart: between 1
# and exp(-8), 3e-4, which half precision has too.
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


def parameters(config: MheConfig) -> Parameters:
    """Parameters of the model; ``lm_head.weight`` only where it is not the table of tokens."""
    found, d, vocabulary = Parameters(), config.hidden_size, config.vocab_size
    found.add("embeddings.word.weight", vocabulary, d)
    if config.places:
        found.add("embeddings.position.weight", config.places, d)
    if isinstance(config, MheEncoderConfig):
        found.norm("embeddings.norm", d)
    for layer in layers_of(config):
        for place in places_in(config, layer):
            _add_attention(found, config, place.at, place.axis)
            found.norm(f"{place.at}_norm", d)
        found.linear(f"{layer}.ffn.up", d, config.intermediate_size, rows=f"{layer}.ffn")
        found.linear(f"{layer}.ffn.down", config.intermediate_size, d, columns=f"{layer}.ffn")
        found.norm(f"{layer}.ffn_norm", d)
    if isinstance(config, MheEncoderConfig):
        if config.head == "masked_lm":
            found.linear("head.transform", d, d)
            found.norm("head.norm", d)
            found.add("head.bias", vocabulary)
        if config.num_labels is not None:
            found.linear("pooler", d, d)
            found.linear("classifier", d, config.num_labels)
    if isinstance(config, MheDecoderConfig):
        found.norm("norm", d)
    if isinstance(config, MheDecoderConfig | MheEncoderDecoderConfig) and not config.tie_word_embeddings:
        found.add("lm_head.weight", vocabulary, d)
    return found


def _add_attention(found: Parameters, config: MheConfig, at: str, axis: str | None) -> None:
    """One sublayer, which shrinks along ``axis``: the heads, or how many numbers each has."""
    d, bias = config.hidden_size, config.attention_bias
    for part in config.projections:
        own = part in config.own_projections
        rows = axis if own or config.width_first else None  # the one head that all share does not go, its numbers do
        unit, outputs = (config.step, config.inner) if own else (1, config.head_size)
        found.linear(f"{at}.{part}", d, outputs, bias, rows=rows, unit=unit)
    if config.has_tables:
        tables = [f"{at}.{table(config)}.{role}" for role in ROLES]
        found.shapes |= dict.fromkeys(tables, config.table_shape)
        found.slices += [PrefixSlice(name, 0, axis) for name in tables if axis is not None]
    found.linear(f"{at}.output", config.inner, d, bias, columns=axis, unit=config.step)


def table(config: MheConfig) -> str:
    """Names of the tables of head embeddings, by how they are stored."""
    return "factor" if config.factors == "1+e" else "embedding"


def elastic_spec(config: MheConfig) -> ElasticSpec:
    """The axes ``ffn`` of every layer and, where the heads of attention shrink, how many there are or how many numbers
    each has."""
    axes: list[Axis] = []
    for layer in layers_of(config):
        axes.append(Axis(f"{layer}.ffn", config.intermediate_size))
        axes += [Axis(place.axis, config.axis_size) for place in places_in(config, layer) if place.axis is not None]
    # Decoders whose heads are of a size that the operator takes which reads a cache keep to such sizes.
    keeps_caches = not isinstance(config, MheEncoderConfig) and config.head_size % SIZE_MULTIPLE == 0
    return ElasticSpec(
        tuple(axes),
        tuple(parameters(config).slices),
        config.nested,
        depth=len(layers_of(config)),
        granularities=config.levels,
        folded={
            name: cut
            for place in places_of(config)
            for name, cut in folded_slices(config, place.at, place.axis).items()
        },
        multiples={"head_width": SIZE_MULTIPLE} if keeps_caches else {},
    )


def parameter_group(parameter: str) -> str | None:
    """The group that ``inspect`` counts ``parameter`` in: the paper's tables have attention with its output projection
    and without. Biases, which its counts omit, are in none."""
    if "attention." not in parameter or parameter.endswith(".bias"):
        return None
    return "attention output" if parameter.endswith("attention.output.weight") else "attention q/k/v"


def compare_weights(checkpoint: Checkpoint, config: MheConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless the weights hold exactly ``shapes``, with their tables stored as stated."""
    stated = table(config)
    other = {"factor": "embedding", "embedding": "factor"}[stated]
    for name in checkpoint.tensors:
        if f"attention.{other}." in name and config.has_tables:
            held, means = ("1+e", "1 would be added twice") if other == "factor" else ("e", "1 would be missing")
            if config.attention == "mhe_add":
                held, means = "1+e", "these are factors of mhe_mul"
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} holds {held}, but config.json says factors {config.factors!r} of "
                f"{config.attention}; {means}"
            )
    rows = "a row for each head in the order of the blocks"
    if config.width_first:
        rows = "as layout width_first has it, a row for each number of a head in the order of the columns"
    for name in shapes:
        found = checkpoint.tensors.get(name)
        if found is not None and f"attention.{stated}." in name and found.shape != shapes[name]:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {list(found.shape)}; expected {list(shapes[name])}, "
                f"{rows} of attention.output"
            )
    compare_with_headers(checkpoint, shapes)


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

    The part of a head ``i`` in the scores of a key is ``e_i . k`` with ``k = W x`` (section 6.4), a linear function
    ``u . x`` of what the key is made of. Where that comes of a LayerNorm, ``x = gamma * z + beta``: ``z`` has mean 0
    and a length of at most ``sqrt(H)``, so that two keys differ by at most ``2 sqrt(H) |P(gamma * u)|``, ``P`` what
    leaves out the mean. Embeddings, which have none in translation models, are bounded by what the tables hold.

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
