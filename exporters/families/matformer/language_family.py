"""MatLM, the nested decoder-only language model of MatFormer. See docs/matformer.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where the configuration nests them, ``heads``
(blocks of ``head_dim`` rows of query, key and value, the same columns of ``attention.output``, and where positions are
a relative bias, its rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ....elastic import Bucket, ElasticSpec, Submodel
from ....runtime.bundle.manifest import TensorSpec, TextEntry
from ....workload import Op
from ...checkpoints.checkpoint import Checkpoint
from ...family import Family, Signature
from .architecture.config import MatformerConfig, read_config
from .architecture.forward_ops import language_model_ops
from .architecture.language_presets import LANGUAGE
from .architecture.shapes import compare_weights, elastic_spec, language_model_shapes

if TYPE_CHECKING:
    import torch


class MatformerLmFamily(Family):
    name: ClassVar[str] = "matformer_lm"
    model_types: ClassVar[tuple[str, ...]] = ("matformer_lm",)
    reads_config_alone: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: config.to_json() for name, config in LANGUAGE.items()}

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        config = read_config(checkpoint, MatformerConfig)
        return elastic_spec(config, language_model_shapes(config))

    def signature(self, checkpoint: Checkpoint) -> Signature:
        config = read_config(checkpoint, MatformerConfig)
        tokens = ("batch", "sequence")
        # No mask: attention is causal, so padding on the right changes nothing before it.
        ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
        logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
        text = None
        if (checkpoint.folder / "tokenizer.json").is_file():
            text = TextEntry("tokenizer.json", "input_ids", None, None, None)
        return Signature((ids,), (logits,), config.max_position_embeddings, text=text)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        return language_model_ops(read_config(checkpoint, MatformerConfig), submodel, bucket)

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        config = read_config(checkpoint, MatformerConfig)
        shapes = language_model_shapes(config)
        if checkpoint.has_weights:
            compare_weights(checkpoint, config, shapes)
        return shapes

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint))

    def is_embedding(self, parameter: str, shape: tuple[int, ...]) -> bool:
        """The bias per token of the vocabulary counts with the table that it belongs to, as in the paper's figures."""
        return parameter == "lm_head.bias" or super().is_embedding(parameter, shape)


FAMILY = MatformerLmFamily()
