"""Every parameter of an MHE model, and which of them shrink with what: known from its configuration alone.

Linear weights are ``[out, in]``, as torch stores them. Tables of head embeddings are ``[heads, head size]``, or turned
where the layout has the width of heads in front; their name says how those of ``mhe_mul`` are stored: ``embedding``
holds what 1 is added to, ``factor`` has that 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ....elastic import Axis, ElasticSpec, PrefixSlice
from ....errors import CheckpointError
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...hugging_face.tensors import Shape, linear_shapes, norm_shapes
from ...parts import SIZE_MULTIPLE
from .config import MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import folded_slices, layers_of, places_in

ROLES = ("query", "key", "value")


def encoder_shapes(config: MheEncoderConfig) -> dict[str, Shape]:
    """Parameters of ``MheEncoder``."""
    d = config.hidden_size
    shapes = _embeddings(config) | norm_shapes("embeddings.norm", d) | _layers(config)
    if config.head == "masked_lm":
        shapes |= (
            linear_shapes("head.transform", d, d) | norm_shapes("head.norm", d) | {"head.bias": (config.vocab_size,)}
        )
    if config.num_labels is not None:
        shapes |= linear_shapes("pooler", d, d) | linear_shapes("classifier", d, config.num_labels)
    return shapes


def decoder_shapes(config: MheDecoderConfig) -> dict[str, Shape]:
    """Parameters of ``MheDecoder``; ``lm_head.weight`` only where it is not the table of tokens."""
    d = config.hidden_size
    shapes = _embeddings(config) | _layers(config) | norm_shapes("norm", d)
    return shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": (config.vocab_size, d)}


def encoder_decoder_shapes(config: MheEncoderDecoderConfig) -> dict[str, Shape]:
    """Parameters of ``MheEncoderDecoder``; ``lm_head.weight`` only where it is not the table of tokens."""
    shapes = _embeddings(config) | _layers(config)
    return (
        shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": (config.vocab_size, config.hidden_size)}
    )


def attention_shapes(config: MheConfig, at: str) -> dict[str, Shape]:
    """Parameters of one attention sublayer."""
    d, one, every, bias = config.hidden_size, config.head_size, config.inner, config.attention_bias
    match config.attention:
        case "mha":
            outputs = dict.fromkeys(ROLES, every)
        case "mqa":
            outputs = {"query": every, "key": one, "value": one}
        case "skv":
            outputs = {"query": every, "key_value": every}
        case "el_att":
            outputs = {"query": every}
        case _:
            outputs = dict.fromkeys(ROLES, one)
    shapes: dict[str, Shape] = {}
    for part, width in outputs.items():
        shapes |= linear_shapes(f"{at}.{part}", d, width, bias)
    if config.has_tables:
        shapes |= {f"{at}.{table(config)}.{role}": config.table_shape for role in ROLES}
    return shapes | linear_shapes(f"{at}.output", every, d, bias)


def table(config: MheConfig) -> str:
    """Names of the tables of head embeddings, by how they are stored."""
    return "factor" if config.factors == "1+e" else "embedding"


def elastic_spec(config: MheConfig, shapes: Mapping[str, Shape]) -> ElasticSpec:
    """The axes ``ffn`` of every layer and, where the heads of attention shrink, how many there are or how many numbers
    each has, and the slices of ``shapes``."""
    axes: list[Axis] = []
    slices: list[PrefixSlice] = []
    folded: dict[str, PrefixSlice | None] = {}
    for layer in layers_of(config):
        ffn = Axis(f"{layer}.ffn", config.intermediate_size)
        axes.append(ffn)
        slices += [PrefixSlice(f"{layer}.ffn.up.{kind}", 0, ffn.name) for kind in ("weight", "bias")]
        slices.append(PrefixSlice(f"{layer}.ffn.down.weight", 1, ffn.name))
        for place in places_in(config, layer):
            folded |= folded_slices(config, place.at, place.axis)
            if place.axis is not None:
                axes.append(Axis(place.axis, config.axis_size))
                slices += _slices_of_heads(config, place.at, place.axis)
    return ElasticSpec(
        tuple(axes),
        tuple(cut for cut in slices if cut.parameter in shapes),
        config.nested,
        depth=len(layers_of(config)),
        granularities=config.levels,
        folded=folded,
        multiples={"head_width": SIZE_MULTIPLE} if _keeps_caches(config) else {},
    )


def _keeps_caches(config: MheConfig) -> bool:
    """Whether its heads are of a size that the operator takes which reads a cache."""
    return not isinstance(config, MheEncoderConfig) and config.head_size % SIZE_MULTIPLE == 0


def _slices_of_heads(config: MheConfig, at: str, axis: str) -> Iterator[PrefixSlice]:
    """Slices along the heads of one attention, or with how many numbers each has; projections and biases that it
    may not have among it."""
    if config.has_tables:
        yield from (PrefixSlice(f"{at}.{table(config)}.{role}", 0, axis) for role in ROLES)
    for part in (*ROLES, "key_value"):
        own = part in config.own_projections
        if own or config.width_first:  # the one head of a projection that all share does not go, its numbers do
            for kind in ("weight", "bias"):
                yield PrefixSlice(f"{at}.{part}.{kind}", 0, axis, config.step if own else 1)
    yield PrefixSlice(f"{at}.output.weight", 1, axis, config.step)


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


def _embeddings(config: MheConfig) -> dict[str, Shape]:
    d = config.hidden_size
    shapes: dict[str, Shape] = {"embeddings.word.weight": (config.vocab_size, d)}
    if config.position == "learned":
        shapes["embeddings.position.weight"] = (config.max_position_embeddings, d)
    return shapes


def _layers(config: MheConfig) -> dict[str, Shape]:
    d, f = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {}
    for at in layers_of(config):
        for place in places_in(config, at):
            shapes |= attention_shapes(config, place.at) | norm_shapes(f"{place.at}_norm", d)
        shapes |= (
            linear_shapes(f"{at}.ffn.up", d, f)
            | linear_shapes(f"{at}.ffn.down", f, d)
            | norm_shapes(f"{at}.ffn_norm", d)
        )
    return shapes
