"""Parts that Gemma 3n adds to a gated decoder: alternating updates, LAuReL, per-layer embeddings, sparse activations.

AltUp keeps several streams of the residual: each layer predicts all of them, works on one, and corrects the others.
LAuReL is a low-rank branch beside attention. A second embedding table gives every layer an input of its own.
"""

from dataclasses import dataclass, field, replace

from ...bucket import Bucket
from ...elastic import ElasticSpec
from ...errors import CheckpointError
from ...strict import structure
from ...workload import Op, elementwise, linear, lookup
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import known_keys
from ..hugging_face.tensors import Shape

# E4B was trained with FFNs of 16384 neurons and with their first 8192, which make E2B; no smaller ones are known.
_E4B_WIDTH, _E4B_LEVELS, _NO_LEVELS = 16_384, (0.5, 1.0), (1.0,)


@dataclass(frozen=True)
class Gemma3nParts:
    """``streams`` of AltUp; the vocabulary and width of the per-layer embeddings; the rank of LAuReL.

    The last ``shared_layers`` layers read keys and values of earlier ones. ``sparse[i]``: layer ``i`` keeps only the
    gate's largest activations, found by their mean and deviation over the FFN's width.
    """

    streams: int
    layer_vocabulary: int
    layer_hidden: int
    laurel_rank: int
    shared_layers: int
    sparse: tuple[bool, ...]

    def layer_shapes(self, at: str, hidden: int) -> dict[str, Shape]:
        """Parameters of one layer beside attention, FFN and their norms."""
        streams, rank, own = self.streams, self.laurel_rank, self.layer_hidden
        return {
            f"{at}.altup.correct_output_scale": (hidden,),
            f"{at}.altup.correction_coefs.weight": (streams, streams),
            f"{at}.altup.prediction_coefs.weight": (streams**2, streams),
            f"{at}.altup.modality_router.weight": (streams, hidden),
            f"{at}.altup.router_norm.weight": (hidden,),
            f"{at}.laurel.linear_left.weight": (rank, hidden),
            f"{at}.laurel.linear_right.weight": (hidden, rank),
            f"{at}.laurel.post_laurel_norm.weight": (hidden,),
            f"{at}.per_layer_input_gate.weight": (own, hidden),
            f"{at}.per_layer_projection.weight": (hidden, own),
            f"{at}.post_per_layer_input_norm.weight": (hidden,),
        }

    def model_shapes(self, prefix: str, hidden: int, layers: int) -> dict[str, Shape]:
        """Parameters outside the layers beside embedding, last norm and head."""
        own = layers * self.layer_hidden
        shapes: dict[str, Shape] = {
            f"{prefix}embed_tokens_per_layer.weight": (self.layer_vocabulary, own),
            f"{prefix}per_layer_model_projection.weight": (own, hidden),
            f"{prefix}per_layer_projection_norm.weight": (self.layer_hidden,),
        }
        for stream in range(self.streams - 1):
            shapes[f"{prefix}altup_projections.{stream}.weight"] = (hidden, hidden)
            shapes[f"{prefix}altup_unembed_projections.{stream}.weight"] = (hidden, hidden)
        return shapes

    def first_ops(self, bucket: Bucket, hidden: int, layers: int) -> list[Op]:
        """Work done once before the layers: per-layer inputs, and the other streams."""
        tokens, own = bucket.tokens, layers * self.layer_hidden
        return [
            lookup("layer_inputs.embedding", tokens * own),
            linear("layer_inputs.projection", tokens, hidden, own, bias=False),
            elementwise("layer_inputs.norm", tokens * own, passes=9),
            *self._streams("streams.spread", tokens, hidden),
        ]

    def last_ops(self, bucket: Bucket, hidden: int) -> list[Op]:
        """Work done once behind the layers: the streams are averaged."""
        return self._streams("streams.gather", bucket.tokens, hidden)

    def layer_ops(self, at: str, bucket: Bucket, hidden: int) -> list[Op]:
        """One layer's operations beside attention and FFN."""
        tokens, streams, rank = bucket.tokens, self.streams, self.laurel_rank
        states = streams * tokens * hidden
        return [
            *(
                op
                for step in ("predict", "correct")
                for op in (
                    elementwise(f"{at}.altup.{step}.norm", tokens * hidden, passes=6),
                    linear(f"{at}.altup.{step}.router", tokens, hidden, streams, bias=False),
                )
            ),
            linear(f"{at}.altup.predict.coefficients", tokens, streams, streams**2, bias=False),
            Op(f"{at}.altup.predict", "batched_gemm", 2 * states * streams, 0, 8 * states),
            # Transposed for the product and back, the input added.
            elementwise(f"{at}.altup.predict.add", states, passes=7),
            linear(f"{at}.altup.correct.coefficients", tokens, streams, streams, bias=False),
            elementwise(f"{at}.altup.correct", states, passes=8),
            linear(f"{at}.laurel.left", tokens, hidden, rank, bias=False),
            linear(f"{at}.laurel.right", tokens, rank, hidden, bias=False),
            elementwise(f"{at}.laurel.norm", tokens * hidden, passes=10),
            linear(f"{at}.layer_input.gate", tokens, hidden, self.layer_hidden, bias=False),
            elementwise(f"{at}.layer_input.activation", tokens * self.layer_hidden, passes=5),
            linear(f"{at}.layer_input.projection", tokens, self.layer_hidden, hidden, bias=False),
            elementwise(f"{at}.layer_input.norm", tokens * hidden, passes=6),
            elementwise(f"{at}.layer_input.add", states, passes=3),
        ]

    def _streams(self, at: str, tokens: int, hidden: int) -> list[Op]:
        others = self.streams - 1
        return [
            *(linear(f"{at}.{stream}", tokens, hidden, hidden, bias=False) for stream in range(others)),
            elementwise(f"{at}.magnitude", others * tokens * hidden, passes=6),
            elementwise(f"{at}.stack", self.streams * tokens * hidden, passes=2),
        ]


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The keys that Gemma 3n adds, with the defaults of its class."""

    altup_num_inputs: int = field(default=4, metadata={"min": 2})
    vocab_size_per_layer_input: int = field(default=262_144, metadata={"min": 1})
    hidden_size_per_layer_input: int = field(default=256, metadata={"min": 1})
    laurel_rank: int = field(default=64, metadata={"min": 1})
    num_kv_shared_layers: int = field(default=15, metadata={"min": 0})
    activation_sparsity_pattern: tuple[float, ...] | None = None


def read_parts(checkpoint: Checkpoint, layers: int) -> Gemma3nParts:
    """Configuration in config.json of a model of so many ``layers``. Raises CheckpointError for what makes no sense."""
    where = str(checkpoint.folder / "config.json")
    stated = structure(_Stated, known_keys(_Stated, checkpoint.config), where, CheckpointError)
    if stated.num_kv_shared_layers >= layers:
        shared = stated.num_kv_shared_layers
        raise checkpoint.misfit(f"num_kv_shared_layers: expected fewer than the {layers} layers, got {shared}")
    pattern = stated.activation_sparsity_pattern
    if pattern is None:  # the class's own default
        pattern = tuple(0.95 if layers > 10 and layer < 10 else 0.0 for layer in range(layers))
    if len(pattern) != layers:
        problem = f"activation_sparsity_pattern: expected {layers} numbers, one per layer, got {len(pattern)}"
        raise checkpoint.misfit(problem)
    return Gemma3nParts(
        streams=stated.altup_num_inputs,
        layer_vocabulary=stated.vocab_size_per_layer_input,
        layer_hidden=stated.hidden_size_per_layer_input,
        laurel_rank=stated.laurel_rank,
        shared_layers=stated.num_kv_shared_layers,
        sparse=tuple(share > 0 for share in pattern),
    )


def nested_spec(checkpoint: Checkpoint, spec: ElasticSpec, parts: Gemma3nParts) -> ElasticSpec:
    """``spec`` with how the model was trained: it is nested unless its config says otherwise, since ranking its neurons
    would undo its training, and the axes whose gates are measured against each other."""
    nested = spec.trained_nested or "nested" not in checkpoint.config
    levels = _E4B_LEVELS if {axis.size for axis in spec.axes} == {_E4B_WIDTH} else _NO_LEVELS
    return replace(
        spec,
        trained_nested=nested,
        granularities={"ffn": levels} if nested and spec.granularities is None else spec.granularities,
        jointly_normalised=frozenset(axis.name for axis, told in zip(spec.axes, parts.sparse, strict=True) if told),
    )
