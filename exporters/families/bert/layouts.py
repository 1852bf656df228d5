"""The model types that share BERT's layout: their classes with their heads, and what config.json may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .heads import (
    BERT_TOKENS,
    DENSE_CLASSIFICATION,
    ELECTRA_TOKENS,
    NEXT_SENTENCE,
    POOLED_CHOICE,
    POOLED_CLASSIFICATION,
    PRE_TRAINING,
    QUESTION_ANSWERING,
    REPLACED_TOKENS,
    ROBERTA_TOKENS,
    SUMMARY_CHOICE,
    TOKEN_CLASSIFICATION,
    Head,
)


@dataclass(frozen=True)
class Layout:
    """One model type. ``prefix`` stands before the encoder's names in a class with a head.

    ``classes`` are those read, with their heads; the first is the base model. ``pad`` is the class's default.
    ``reserves``: positions are numbered from ``pad_token_id + 1``, so that many entries of their table are never
    reached. ``projects``: tokens have a size of their own, ``embedding_size``. ``has_pooler``: the base model may.
    """

    prefix: str
    classes: Mapping[str, Head | None]
    pad: int = 0
    reserves: bool = False
    projects: bool = False
    has_pooler: bool = True


def _roberta(stem: str) -> Layout:
    return Layout(
        "roberta",
        {
            f"{stem}Model": None,
            f"{stem}ForSequenceClassification": DENSE_CLASSIFICATION,
            f"{stem}ForTokenClassification": TOKEN_CLASSIFICATION,
            f"{stem}ForQuestionAnswering": QUESTION_ANSWERING,
            f"{stem}ForMultipleChoice": POOLED_CHOICE,
            f"{stem}ForMaskedLM": ROBERTA_TOKENS,
            f"{stem}ForCausalLM": replace(ROBERTA_TOKENS, follows=True),
        },
        pad=1,
        reserves=True,
    )


LAYOUTS: dict[str, Layout] = {
    "bert": Layout(
        "bert",
        {
            "BertModel": None,
            "BertForSequenceClassification": POOLED_CLASSIFICATION,
            "BertForTokenClassification": TOKEN_CLASSIFICATION,
            "BertForQuestionAnswering": QUESTION_ANSWERING,
            "BertForMultipleChoice": POOLED_CHOICE,
            "BertForMaskedLM": BERT_TOKENS,
            "BertLMHeadModel": replace(BERT_TOKENS, follows=True),
            "BertForNextSentencePrediction": NEXT_SENTENCE,
            "BertForPreTraining": PRE_TRAINING,
        },
    ),
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "camembert": _roberta("Camembert"),
    "electra": Layout(
        "electra",
        {
            "ElectraModel": None,
            "ElectraForSequenceClassification": DENSE_CLASSIFICATION,
            "ElectraForTokenClassification": TOKEN_CLASSIFICATION,
            "ElectraForQuestionAnswering": QUESTION_ANSWERING,
            "ElectraForMultipleChoice": SUMMARY_CHOICE,
            "ElectraForMaskedLM": ELECTRA_TOKENS,
            "ElectraForCausalLM": replace(ELECTRA_TOKENS, follows=True),
            "ElectraForPreTraining": REPLACED_TOKENS,
        },
        projects=True,
        has_pooler=False,
    ),
}
