"""BERT encoders and the models that share BERT's module layout.

Axes per layer: ``ffn`` (rows of ``intermediate.dense``, columns of ``output.dense``) and ``heads`` (blocks of
``head_dim`` rows of query, key and value, the same columns of ``attention.output.dense``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...elastic import Axis, Bucket, ElasticSpec, PrefixSlice, Submodel
from ...errors import CheckpointError
from ...runtime.manifest import TensorSpec, TextEntry
from ...workload import Op, elementwise, linear, lookup, self_attention
from ..checkpoint import Checkpoint, read_json
from ..elastic_config import read_nesting, read_number
from ..family import Family, Signature

if TYPE_CHECKING:
    import torch

_QUERY = re.compile(r"(?P<prefix>(?:.+\.)?)encoder\.layer\.(?P<layer>\d+)\.attention\.self\.query\.weight")
# Supported endings of the architecture's class name, with the tensors whose first dimension is the number of classes.
_TASKS: dict[str, tuple[str, ...]] = {
    "Model": (),
    "ForSequenceClassification": ("classifier.weight", "classifier.out_proj.weight"),
    "ForTokenClassification": ("classifier.weight",),
    "ForMaskedLM": ("cls.predictions.bias", "lm_head.bias", "generator_lm_head.bias"),
}
# Tensors that published checkpoints carry but these classes do not have, and tied copies.
_UNUSED = re.compile(r"cls\.seq_relationship\..*|cls\.predictions\.decoder\..*|lm_head\.decoder\..*|discriminator_.*")
_POOLER = re.compile(r".+\.pooler\..*")


class BertFamily(Family):
    name: ClassVar[str] = "bert"
    model_types: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta", "camembert", "electra")

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        prefix, layers = _layout(checkpoint)
        heads, head_dim = _heads(checkpoint)
        axes, slices = [], []
        for layer in range(layers):
            block = f"{prefix}encoder.layer.{layer}."
            ffn = Axis(f"layers.{layer}.ffn", _shape(checkpoint, f"{block}intermediate.dense.weight")[0])
            attention = Axis(f"layers.{layer}.heads", heads)
            axes += [ffn, attention]
            slices += [
                PrefixSlice(f"{block}intermediate.dense.weight", 0, ffn.name),
                PrefixSlice(f"{block}intermediate.dense.bias", 0, ffn.name),
                PrefixSlice(f"{block}output.dense.weight", 1, ffn.name),
                *(
                    PrefixSlice(f"{block}attention.self.{part}.{kind}", 0, attention.name, head_dim)
                    for part in ("query", "key", "value")
                    for kind in ("weight", "bias")
                ),
                PrefixSlice(f"{block}attention.output.dense.weight", 1, attention.name, head_dim),
            ]
        nesting = read_nesting(checkpoint, ("ffn", "heads"))
        spec = ElasticSpec(
            tuple(axes), tuple(slices), nesting.nested, depth=layers, granularities=nesting.granularities
        )
        for cut in slices:
            expected = next(axis.size for axis in axes if axis.name == cut.axis) * cut.unit
            found = _shape(checkpoint, cut.parameter)
            if found[cut.dim : cut.dim + 1] != (expected,):
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor {cut.parameter} has shape {list(found)}; expected {expected} in "
                    f"dimension {cut.dim} for {cut.axis}; the weights do not fit config.json"
                )
        return spec

    def signature(self, checkpoint: Checkpoint) -> Signature:
        config = checkpoint.config
        vocabulary = _shape(checkpoint, f"{_layout(checkpoint)[0]}embeddings.word_embeddings.weight")[0]
        pad = 0 if config.get("pad_token_id") is None else read_number(checkpoint, "pad_token_id", at_least=0)
        tokens = ("batch", "sequence")
        inputs = [
            TensorSpec("input_ids", "int64", tokens, pad=pad, high=vocabulary),
            TensorSpec("attention_mask", "int64", tokens, pad=0, high=2),
        ]
        types = read_number(checkpoint, "type_vocab_size", default=2, at_least=0)
        if types > 1:
            inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=types))
        outputs = tuple(_outputs(checkpoint))
        embedding = next((spec.name for spec in outputs if spec.name == "sentence_embedding"), None)
        # RoBERTa numbers positions from pad_token_id + 1, so that many entries of its table are never reached.
        reserved = 0 if config["model_type"] in {"bert", "electra"} else pad + 1
        text = None
        if (checkpoint.folder / "tokenizer.json").is_file():
            type_ids = "token_type_ids" if len(inputs) == 3 else None
            text = TextEntry("tokenizer.json", "input_ids", "attention_mask", type_ids, embedding)
        positions = read_number(checkpoint, "max_position_embeddings") - reserved
        return Signature(tuple(inputs), outputs, positions, "attention_mask", text)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        hidden, head_dim, t = read_number(checkpoint, "hidden_size"), _heads(checkpoint)[1], bucket.tokens
        ops = [lookup("embeddings", 3 * t * hidden), elementwise("embeddings.norm", t * hidden, passes=4)]
        for layer in range(_layout(checkpoint)[1]):
            at = f"layers.{layer}"
            heads, width = submodel[f"{at}.heads"], submodel[f"{at}.ffn"]
            ops += [
                *self_attention(f"{at}.attention", bucket, hidden, heads, head_dim),
                elementwise(f"{at}.attention.norm", t * hidden, passes=5),
                linear(f"{at}.ffn.up", t, hidden, width),
                elementwise(f"{at}.ffn.activation", t * width, passes=2),
                linear(f"{at}.ffn.down", t, width, hidden),
                elementwise(f"{at}.ffn.norm", t * hidden, passes=5),
            ]
        return ops

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        shapes = super().parameter_shapes(checkpoint)
        unused = [_UNUSED] if _task(checkpoint) == "Model" else [_UNUSED, _POOLER]
        if checkpoint.config["model_type"] == "bert" and _task(checkpoint) == "ForSequenceClassification":
            unused = [_UNUSED]  # the one task class that keeps the pooler
        return {name: shape for name, shape in shapes.items() if not any(p.fullmatch(name) for p in unused)}

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from ..transformers_model import EncoderModule, load_transformers

        drop_pooler = "pooler_output" not in {spec.name for spec in _outputs(checkpoint)}
        model = load_transformers(checkpoint, without_pooler=drop_pooler)
        return EncoderModule(model, self.signature(checkpoint), _pooling(checkpoint))

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
        for name, part in module.named_modules():
            match = re.fullmatch(r"(?:.+\.)?encoder\.layer\.(\d+)\.attention\.self", name)
            if match:
                heads = submodel[f"layers.{match[1]}.heads"]
                attention: Any = part
                attention.num_attention_heads = heads
                attention.all_head_size = heads * attention.attention_head_size


FAMILY = BertFamily()


def _layout(checkpoint: Checkpoint) -> tuple[str, int]:
    """Prefix of the encoder's tensor names (``bert.`` under a task head) and the number of layers."""
    matches = [match for match in map(_QUERY.fullmatch, checkpoint.tensors) if match]
    layers = read_number(checkpoint, "num_hidden_layers")
    if not matches or len(matches) != layers:
        raise CheckpointError(
            f"{checkpoint.folder}: expected {layers} tensors encoder.layer.N.attention.self.query.weight, as "
            f"config.json says, got {len(matches)}"
        )
    return matches[0]["prefix"], layers


def _heads(checkpoint: Checkpoint) -> tuple[int, int]:
    """Number of heads and head size, which no slice changes: attention keeps its scale ``1 / sqrt(head_dim)``."""
    heads = read_number(checkpoint, "num_attention_heads")
    return heads, read_number(checkpoint, "hidden_size") // heads


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    if name not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing from the weights")
    if not checkpoint.tensors[name].shape:
        raise CheckpointError(f"{checkpoint.folder}: tensor {name} is a single number; expected at least one dimension")
    return checkpoint.tensors[name].shape


def _pooling(checkpoint: Checkpoint) -> dict[str, bool]:
    """The sentence-transformers pooling that travels with the folder; empty if there is none we can express."""
    path = checkpoint.folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return {}
    modes = {key for key, on in read_json(path).items() if key.startswith("pooling_mode_") and on is True}
    if modes not in ({"pooling_mode_mean_tokens"}, {"pooling_mode_cls_token"}):
        return {}
    modules = checkpoint.folder / "modules.json"
    normalize = modules.is_file() and b"models.Normalize" in modules.read_bytes()
    return {"mean": "pooling_mode_mean_tokens" in modes, "normalize": normalize}


def _task(checkpoint: Checkpoint) -> str:
    """What follows the model's name in the class that config.json names: ``Model``, ``ForMaskedLM``..."""
    architecture = checkpoint.architecture or "Model"
    task = next((name for name in _TASKS if architecture.endswith(name)), None)
    if task is None:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: architecture {architecture!r:.80} is not supported; the bert family "
            f"reads classes that end in {', '.join(_TASKS)}"
        )
    return task


def _outputs(checkpoint: Checkpoint) -> list[TensorSpec]:
    """What the class that config.json names returns, and the sentence embedding if the folder defines one."""
    task, hidden = _task(checkpoint), read_number(checkpoint, "hidden_size")
    if task != "Model":
        table = next((t for t in _TASKS[task] if t in checkpoint.tensors), _TASKS[task][0])
        dims = ("batch",) if task == "ForSequenceClassification" else ("batch", "sequence")
        return [TensorSpec("logits", "float32", (*dims, _shape(checkpoint, table)[0]))]
    outputs = [TensorSpec("last_hidden_state", "float32", ("batch", "sequence", hidden))]
    if any(name.endswith("pooler.dense.weight") for name in checkpoint.tensors):
        outputs.append(TensorSpec("pooler_output", "float32", ("batch", hidden)))
    if _pooling(checkpoint):
        outputs.append(TensorSpec("sentence_embedding", "float32", ("batch", hidden)))
    return outputs
