"""BERT encoders and the models that share BERT's module layout, with their heads.

Axes per layer: ``ffn`` (rows of ``intermediate.dense``, columns of ``output.dense``) and ``heads`` (blocks of
``head_dim`` rows of query, key and value, the same columns of ``attention.output.dense``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...elastic import Submodel
from ...workload import Op, elementwise, linear, lookup, post_norm_layer
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import MOST_LAYERS, read_classes, read_number, read_pad, refuse_unhonoured
from ..family import Family
from ..hugging_face.describe import describe
from ..hugging_face.interface import (
    QUESTION,
    TOKEN_CLASSES,
    Dense,
    Head,
    Loading,
    Size,
    TextModel,
    attention_problems,
    read_head,
    single_choices,
)
from ..hugging_face.tensors import Parameters, held_tensors

_UNUSED_TENSOR = re.compile(r"(?:.+\.)?(?:pooler\.dense\.(?:weight|bias)|embeddings\.(?:position_ids|token_type_ids))")

# One linear layer on what the pooler makes of [CLS], or two on [CLS] itself.
_POOLED_CLASSES = Head({"logits": ("classes",)}, {"classifier": Dense("hidden", "classes", "row")}, pooled=True)
_DENSE_CLASSES = Head(
    {"logits": ("classes",)},
    {"classifier.dense": Dense("hidden", "hidden", "row"), "classifier.out_proj": Dense("hidden", "classes", "row")},
)
_POOLED_CHOICE = Head({"logits": (1,)}, {"classifier": Dense("hidden", 1, "row")}, pooled=True, choices=True)
_SUMMARY_CHOICE = Head(
    {"logits": (1,)},
    {"sequence_summary.summary": Dense("hidden", "hidden", "row"), "classifier": Dense("hidden", 1, "row")},
    choices=True,
)


def _tokens(dense: str, norm: str, vocabulary: str, bias: str, size: Size = "hidden") -> Head:
    """A token for every position: a layer to ``size``, a norm and the matrix back to the vocabulary."""
    layers = {dense: Dense("hidden", size)}
    return Head({"logits": ("sequence", "vocabulary")}, layers, {norm: size}, vocabulary=vocabulary, bias=bias)


_BERT = "cls.predictions"
_BERT_TOKENS = _tokens(f"{_BERT}.transform.dense", f"{_BERT}.transform.LayerNorm", f"{_BERT}.decoder", f"{_BERT}.bias")
_ROBERTA_TOKENS = _tokens("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
_GENERATOR = "generator_predictions"
_ELECTRA_TOKENS = _tokens(
    f"{_GENERATOR}.dense", f"{_GENERATOR}.LayerNorm", "generator_lm_head", "generator_lm_head.bias", "embedding"
)
_NEXT_SENTENCE = Head({"logits": (2,)}, {"cls.seq_relationship": Dense("hidden", 2, "row")}, pooled=True)
_PRE_TRAINING = replace(
    _BERT_TOKENS,
    outputs={"prediction_logits": ("sequence", "vocabulary"), "seq_relationship_logits": (2,)},
    roles={"prediction_logits": "tokens"},
    layers={**_BERT_TOKENS.layers, **_NEXT_SENTENCE.layers},
    pooled=True,
)
# The likelihood of each token that another model put it there.
_REPLACED_TOKENS = Head(
    {"logits": ("sequence",)},
    {
        "discriminator_predictions.dense": Dense("hidden", "hidden"),
        "discriminator_predictions.dense_prediction": Dense("hidden", 1),
    },
)


@dataclass(frozen=True)
class Layout:
    """One model type. ``prefix`` stands before the encoder's names in a class with a head.

    ``classes`` are those read, with their heads; the first is the base model. ``pad`` is the class's default.
    ``reserves``: positions are numbered from ``pad_token_id + 1``, so that many entries of their table are never
    reached. ``projects``: tokens have a size of their own, ``embedding_size``.
    """

    prefix: str
    classes: Mapping[str, Head | None]
    pad: int = 0
    reserves: bool = False
    projects: bool = False


def _layout(prefix: str, stem: str, sequence: Head, choice: Head, tokens: Head, **more: Head) -> Layout:
    """The classes that every model type has, and ``more`` by the ends of their names."""
    heads = {
        "ForSequenceClassification": sequence,
        "ForTokenClassification": TOKEN_CLASSES,
        "ForQuestionAnswering": QUESTION,
        "ForMultipleChoice": choice,
        "ForMaskedLM": tokens,
        "LMHeadModel" if stem == "Bert" else "ForCausalLM": replace(tokens, follows=True),
        **more,
    }
    return Layout(
        prefix, {f"{stem}Model": None} | {stem + end: replace(head, prefix=prefix) for end, head in heads.items()}
    )


def _roberta(stem: str) -> Layout:
    layout = _layout("roberta", stem, _DENSE_CLASSES, _POOLED_CHOICE, _ROBERTA_TOKENS)
    return replace(layout, pad=1, reserves=True)


_ELECTRA = _layout(
    "electra", "Electra", _DENSE_CLASSES, _SUMMARY_CHOICE, _ELECTRA_TOKENS, ForPreTraining=_REPLACED_TOKENS
)
LAYOUTS: dict[str, Layout] = {
    "bert": _layout(
        *("bert", "Bert", _POOLED_CLASSES, _POOLED_CHOICE, _BERT_TOKENS),
        ForNextSentencePrediction=_NEXT_SENTENCE,
        ForPreTraining=_PRE_TRAINING,
    ),
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "camembert": _roberta("Camembert"),
    "electra": replace(_ELECTRA, projects=True),
}


@dataclass(frozen=True, kw_only=True)
class BertModel(TextModel):
    """Settings that determine the graph. The table of positions has ``reserved`` more than texts have tokens; no slice
    changes ``head_dim``: attention keeps its scale ``1 / sqrt(head_dim)``."""

    layout: Layout
    types: int
    reserved: int
    pooler: bool

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the module."""
        found, at, hidden = Parameters(), self.prefix, self.hidden
        tables = {"word": self.vocabulary, "position": self.positions + self.reserved, "token_type": self.types}
        for name, rows in tables.items():
            found.add(f"{at}embeddings.{name}_embeddings.weight", rows, self.embedding)
        found.norm(f"{at}embeddings.LayerNorm", self.embedding)
        if self.embedding != hidden:
            found.linear(f"{at}embeddings_project", self.embedding, hidden)
        for number, width in enumerate(self.widths):
            layer, attention = f"{at}encoder.layer.{number}", f"{at}encoder.layer.{number}.attention"
            ffn = found.axis(f"layers.{number}.ffn", width)
            heads = found.axis(f"layers.{number}.heads", self.heads)
            for part in ("query", "key", "value"):
                found.linear(f"{attention}.self.{part}", hidden, hidden, rows=heads, unit=self.head_dim)
            found.linear(f"{attention}.output.dense", hidden, hidden, columns=heads, unit=self.head_dim)
            found.norm(f"{attention}.output.LayerNorm", hidden)
            found.linear(f"{layer}.intermediate.dense", hidden, width, rows=ffn)
            found.linear(f"{layer}.output.dense", width, hidden, columns=ffn)
            found.norm(f"{layer}.output.LayerNorm", hidden)
        if self.pooler:
            found.linear(f"{at}pooler.dense", hidden, hidden)
        if self.head is not None:
            self.head.add_to(found, self.size, self.tied)
        return found

    def names_in_files(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The tensors of a folder by their parameters, as ``held_tensors`` finds them."""
        unused = self.unused(self.layout.classes.values(), _UNUSED_TENSOR)
        return held_tensors(checkpoint, self.parameters.shapes, self.layout.prefix, unused)


def read_bert(checkpoint: Checkpoint) -> BertModel:
    """The model in ``checkpoint``, as its class reads config.json.

    Raises CheckpointError for what config.json lacks or gets wrong, and for what is not honoured.
    """
    refuse_unhonoured(checkpoint)
    config, layout = checkpoint.config, LAYOUTS[checkpoint.config["model_type"]]
    head = read_head(checkpoint, layout.classes)
    hidden, heads = read_number(checkpoint, "hidden_size"), read_number(checkpoint, "num_attention_heads")
    if hidden % heads:
        raise checkpoint.misfit(f"num_attention_heads: {hidden} features cannot be split into {heads} heads")
    layers = read_number(checkpoint, "num_hidden_layers", at_most=MOST_LAYERS)
    vocabulary = read_number(checkpoint, "vocab_size")
    pad = read_pad(checkpoint, vocabulary, layout.pad)
    if pad is None and layout.reserves:
        raise checkpoint.misfit("pad_token_id: expected a token, after which positions are numbered, got null")
    reserved = pad + 1 if pad is not None and layout.reserves else 0
    if head is not None and any(name.startswith("sequence_summary.") for name in head.layers):
        _refuse_other_summaries(checkpoint)
    # A base model has a pooler where the weights do: files made from another class's have none.
    has_pooler = any(name.endswith("pooler.dense.weight") for name in checkpoint.tensors)
    return BertModel(
        layout=layout,
        head=head,
        vocabulary=vocabulary,
        embedding=read_number(checkpoint, "embedding_size", default=128) if layout.projects else hidden,
        hidden=hidden,
        heads=heads,
        head_dim=hidden // heads,
        widths=(read_number(checkpoint, "intermediate_size"),) * layers,
        types=read_number(checkpoint, "type_vocab_size", default=2, at_least=0),
        positions=read_number(checkpoint, "max_position_embeddings", at_least=reserved + 1) - reserved,
        reserved=reserved,
        pad=pad or 0,
        classes=read_classes(checkpoint),
        pooler=has_pooler if head is None else head.pooled,
        causal=config.get("is_decoder") is True,
        tied=config.get("tie_word_embeddings", True) is not False,
    )


def _refuse_other_summaries(checkpoint: Checkpoint) -> None:
    stated = {"summary_type": "first", "summary_use_proj": True, "summary_proj_to_labels": False}
    for key, only in stated.items():
        if (value := checkpoint.config.get(key, only)) != only:
            raise checkpoint.misfit(f"{key}: expected {only!r} for {checkpoint.architecture}, got {value!r:.80}")


def read(checkpoint: Checkpoint) -> Architecture:
    """The encoder in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    model = read_bert(checkpoint)
    names = model.names_in_files(checkpoint)
    signature = model.signature(checkpoint, "first_token" if model.causal else "token", model.types)
    if model.head is None and model.pooler:
        pooled = TensorSpec("pooler_output", "float32", ("batch", model.hidden))
        signature = replace(signature, outputs=(*signature.outputs, pooled))
    choices = model.head is not None and model.head.choices
    loading = Loading(without_pooler=not model.pooler, given=single_choices if choices else None)
    workload = partial(_workload, model)
    found = describe(checkpoint, model.parameters, names, signature, workload, loading, model.hidden)
    return replace(found, variant_problems=attention_problems(model.heads, model.heads))


FAMILY = Family("bert", tuple(LAYOUTS), read)


def _workload(model: BertModel, submodel: Submodel, bucket: Bucket) -> list[Op]:
    hidden, t = model.hidden, bucket.tokens
    ops = [
        lookup("embeddings", 3 * t * model.embedding),
        elementwise("embeddings.norm", t * model.embedding, passes=4),
    ]
    if model.embedding != hidden:
        ops.append(linear("embeddings.project", t, model.embedding, hidden))
    for layer in range(len(model.widths)):
        at = f"layers.{layer}"
        ops += post_norm_layer(at, bucket, hidden, submodel[f"{at}.heads"], model.head_dim, submodel[f"{at}.ffn"])
    if model.pooler:
        ops.append(linear("pooler", bucket.batch, hidden, hidden))
    return [*ops, *model.head_ops(bucket)]
