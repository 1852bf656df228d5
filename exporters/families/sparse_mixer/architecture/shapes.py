"""Every parameter of a Sparse Mixer, and which of them shrink with what: known from its configuration alone.

Linear weights are ``[out, in]``, as torch stores them. Those of experts are stacked, ``[E, in, out]``, so that the
first experts are a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping

from .....elastic import Axis, ElasticSpec, PrefixSlice
from .....errors import CheckpointError
from ....checkpoints.checkpoint import Checkpoint, compare_with_headers
from ....hugging_face.tensors import Shape, linear_shapes, norm_shapes
from .config import CAPACITY, EXPERTS, SparseMixerConfig

TABLES = ("embeddings.word.weight", "embeddings.position.weight", "embeddings.token_type.weight")
_EXPERT_PARTS = ("up_weight", "up_bias", "down_weight", "down_bias")


def parameter_shapes(config: SparseMixerConfig) -> dict[str, Shape]:
    """Parameters of ``SparseMixer``; the head's matrix back to the vocabulary is that of the words, and not among
    them."""
    d, width = config.hidden_size, config.embedding_width
    rows = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    shapes: dict[str, Shape] = {name: (count, width) for name, count in zip(TABLES, rows, strict=True)}
    shapes |= norm_shapes("embeddings.norm", width) | linear_shapes("embeddings.projection", width, d)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        if config.mixes(layer):
            shapes |= _mixing(config, f"{at}.mixing")
        else:
            for part in ("query", "key", "value", "output"):
                shapes |= linear_shapes(f"{at}.attention.{part}", d, d)
        shapes |= norm_shapes(f"{at}.mixing_norm", d)
        if config.routes(layer):
            shapes |= _experts(config, f"{at}.moe")
        else:
            shapes |= linear_shapes(f"{at}.ffn.up", d, config.intermediate_size)
            shapes |= linear_shapes(f"{at}.ffn.down", config.intermediate_size, d)
        shapes |= norm_shapes(f"{at}.ffn_norm", d)
    if config.predicts_tokens:
        shapes |= linear_shapes("head.transform", d, width) | norm_shapes("head.norm", width)
        shapes["head.bias"] = (config.vocab_size,)
    if config.pools:
        shapes |= linear_shapes("pooler", d, d)
    if config.num_labels is not None:
        shapes |= linear_shapes("classifier", d, config.num_labels)
    return shapes


def elastic_spec(config: SparseMixerConfig) -> ElasticSpec:
    """The axes that ``config.choices`` offers; experts alone slice parameters. The router follows their order, and
    keeps the scores of all.

    Levels lower the capacity alone, unless ``config.granularities`` says otherwise: every other axis makes a model that
    its training did not see.
    """
    choices = config.choices
    axes = tuple(Axis(name, values[-1], values) for name, values in choices.items())
    at = [f"layers.{layer}.moe" for layer in config.moe_layers if EXPERTS in choices]
    slices = tuple(PrefixSlice(f"{layer}.experts.{part}", 0, EXPERTS) for layer in at for part in _EXPERT_PARTS)
    scores = tuple(PrefixSlice(f"{layer}.router.{part}", 0, EXPERTS) for layer in at for part in ("weight", "bias"))
    granularities = config.granularities
    if granularities is None and choices:
        capacities = choices.get(CAPACITY)
        granularities = (
            {CAPACITY: tuple(value / capacities[-1] for value in capacities)}
            if capacities
            else {next(iter(choices)): (1.0,)}
        )
    return ElasticSpec(
        axes,
        slices,
        depth=config.num_hidden_layers,
        widths=frozenset(),
        granularities=granularities,
        order_followers=scores,
        per_layer_order=frozenset({EXPERTS}),  # an expert has nothing to do with those of its number in other layers
    )


def compare_weights(checkpoint: Checkpoint, config: SparseMixerConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless the weights hold exactly ``shapes``."""
    where = checkpoint.folder / "config.json"
    for layer in range(config.num_hidden_layers):
        trained = _extent(checkpoint, f"layers.{layer}.moe.experts.up_weight")
        if config.routes(layer) and trained not in (None, config.num_experts):
            raise CheckpointError(
                f"{where}: num_experts: {config.num_experts}, but the weights of layer {layer} hold {trained}"
            )
        trained = _extent(checkpoint, f"layers.{layer}.mixing.sequence")
        if config.mixes(layer) and config.mixing == "toeplitz" and trained is not None:
            trained = (trained + 1) // 2
        if config.mixes(layer) and trained not in (None, config.max_position_embeddings):
            raise CheckpointError(
                f"{where}: max_position_embeddings: {config.max_position_embeddings}, but the {config.mixing} mixing "
                f"of layer {layer} is bound to the {trained} tokens that it was trained for"
            )
    compare_with_headers(checkpoint, shapes)


def _mixing(config: SparseMixerConfig, at: str) -> dict[str, Shape]:
    """The learned parameters of mixing along the sequence and along the hidden axis; spectral mixing has none."""
    sizes = {"sequence": config.max_position_embeddings, "hidden": config.hidden_size}
    match config.mixing:
        case "linear":
            return {f"{at}.{side}": (size, size) for side, size in sizes.items()}
        case "circulant":
            return {f"{at}.{side}": (size,) for side, size in sizes.items()}
        case "toeplitz":
            return {f"{at}.{side}": (2 * size - 1,) for side, size in sizes.items()}
    return {}


def _experts(config: SparseMixerConfig, at: str) -> dict[str, Shape]:
    count, d, f = config.num_experts, config.hidden_size, config.expert_width
    shapes = ((count, d, f), (count, f), (count, f, d), (count, d))
    stacked = {f"{at}.experts.{part}": shape for part, shape in zip(_EXPERT_PARTS, shapes, strict=True)}
    return linear_shapes(f"{at}.router", d, count) | stacked


def _extent(checkpoint: Checkpoint, name: str) -> int | None:
    """The first extent of a stored tensor, or None where there is no such tensor or it is a single number."""
    header = checkpoint.tensors.get(name)
    return header.shape[0] if header is not None and header.shape else None
