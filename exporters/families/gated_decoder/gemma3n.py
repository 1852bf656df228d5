"""What Gemma 3n adds to a gated decoder: alternating updates, LAuReL, per-layer embeddings, sparse activations.

AltUp keeps several streams of the residual: each layer predicts all of them, works on one, and corrects the others.
LAuReL is a low-rank branch beside attention. A second embedding table gives every layer an input of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....bucket import Bucket
from ....workload import Op, elementwise, linear, lookup
from ...hugging_face.tensors import Shape


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
        """What happens once before the layers: per-layer inputs, and the other streams."""
        tokens, own = bucket.tokens, layers * self.layer_hidden
        return [
            lookup("layer_inputs.embedding", tokens * own),
            linear("layer_inputs.projection", tokens, hidden, own, bias=False),
            elementwise("layer_inputs.norm", tokens * own, passes=9),
            *self._streams("streams.spread", tokens, hidden),
        ]

    def last_ops(self, bucket: Bucket, hidden: int) -> list[Op]:
        """What happens once behind the layers: the streams are averaged."""
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
