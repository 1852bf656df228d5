"""What the classes of BERT-like models have behind the encoder, and what they return (no torch here).

Sizes go by name: ``hidden``, ``embedding`` (of a token before the layers), ``vocabulary``, ``classes``, or a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ....bundle.entries.tensor_spec import Role

Size = Literal["hidden", "embedding", "vocabulary", "classes"] | int
Dims = tuple[Literal["batch", "sequence"] | Size, ...]
_TOKEN_DIMS: Dims = ("batch", "sequence")
_ROW_DIMS: Dims = ("batch",)


@dataclass(frozen=True)
class Dense:
    """A linear layer of a head, from ``inputs`` to ``outputs``, at every position or once a row."""

    inputs: Size
    outputs: Size
    at: Literal["token", "row"] = "token"


@dataclass(frozen=True)
class Output:
    """One output. A role is stated where its shape does not tell it (bundle/roles.py)."""

    name: str
    dims: Dims
    role: Role | None = None


@dataclass(frozen=True)
class Head:
    """``layers`` and ``norms`` by module name. ``pooled``: the head reads the encoder's pooler.

    ``vocabulary`` is the module of the matrix back to the vocabulary, whose weight is the token embedding where
    ``tie_word_embeddings`` says so, and ``bias`` the parameter that is then its bias. ``follows``: of a decoder, the
    logits are those of the next token. ``choices``: the class takes ``[batch, choices, sequence]``, and a row is one
    choice. ``classes`` is the only number of classes that the class can have.
    """

    outputs: tuple[Output, ...]
    layers: Mapping[str, Dense] = field(default_factory=dict)
    norms: Mapping[str, Size] = field(default_factory=dict)
    pooled: bool = False
    vocabulary: str | None = None
    bias: str | None = None
    follows: bool = False
    choices: bool = False
    classes: int | None = None


TOKEN_CLASSIFICATION = Head((Output("logits", (*_TOKEN_DIMS, "classes")),), {"classifier": Dense("hidden", "classes")})
# Where an answer starts and where it ends: one score of each for every position.
QUESTION_ANSWERING = Head(
    (Output("start_logits", _TOKEN_DIMS), Output("end_logits", _TOKEN_DIMS)),
    {"qa_outputs": Dense("hidden", "classes")},
    classes=2,
)

_CLASS_LOGITS = Output("logits", (*_ROW_DIMS, "classes"))
# One linear layer on what the pooler makes of [CLS], or two on [CLS] itself.
POOLED_CLASSIFICATION = Head((_CLASS_LOGITS,), {"classifier": Dense("hidden", "classes", "row")}, pooled=True)
DENSE_CLASSIFICATION = Head(
    (_CLASS_LOGITS,),
    {"classifier.dense": Dense("hidden", "hidden", "row"), "classifier.out_proj": Dense("hidden", "classes", "row")},
)

_CHOICE_LOGIT = Output("logits", (*_ROW_DIMS, 1))
POOLED_CHOICE = Head((_CHOICE_LOGIT,), {"classifier": Dense("hidden", 1, "row")}, pooled=True, choices=True)
SUMMARY_CHOICE = Head(
    (_CHOICE_LOGIT,),
    {"sequence_summary.summary": Dense("hidden", "hidden", "row"), "classifier": Dense("hidden", 1, "row")},
    choices=True,
)

BERT_TOKENS = Head(
    (Output("logits", (*_TOKEN_DIMS, "vocabulary")),),
    {"cls.predictions.transform.dense": Dense("hidden", "hidden")},
    {"cls.predictions.transform.LayerNorm": "hidden"},
    vocabulary="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
ROBERTA_TOKENS = replace(
    BERT_TOKENS,
    layers={"lm_head.dense": Dense("hidden", "hidden")},
    norms={"lm_head.layer_norm": "hidden"},
    vocabulary="lm_head.decoder",
    bias="lm_head.bias",
)
ELECTRA_TOKENS = replace(
    BERT_TOKENS,
    layers={"generator_predictions.dense": Dense("hidden", "embedding")},
    norms={"generator_predictions.LayerNorm": "embedding"},
    vocabulary="generator_lm_head",
    bias="generator_lm_head.bias",
)

_NEXT_SENTENCE_LAYERS = {"cls.seq_relationship": Dense("hidden", 2, "row")}
NEXT_SENTENCE = Head((Output("logits", (*_ROW_DIMS, 2)),), _NEXT_SENTENCE_LAYERS, pooled=True)
PRE_TRAINING = replace(
    BERT_TOKENS,
    outputs=(
        Output("prediction_logits", (*_TOKEN_DIMS, "vocabulary"), role="tokens"),
        Output("seq_relationship_logits", (*_ROW_DIMS, 2)),
    ),
    layers={**BERT_TOKENS.layers, **_NEXT_SENTENCE_LAYERS},
    pooled=True,
)
# Of each token, how likely another model put it there.
REPLACED_TOKENS = Head(
    (Output("logits", _TOKEN_DIMS),),
    {
        "discriminator_predictions.dense": Dense("hidden", "hidden"),
        "discriminator_predictions.dense_prediction": Dense("hidden", 1),
    },
)
