"""The ranking stage: which importance, from which data, remembered for a resumed compile."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..errors import CheckpointError
from ..exporters.ranking import Scores, magnitude_scores, rank, taylor_scores
from ..exporters.universal import UniversalModel
from ..runtime.inputs import InputChecker
from ..runtime.manifest import Ranking
from ..runtime.text import TextEncoder
from .clock import Clock
from .corpus import Corpus
from .staging import Stage
from .store import save_tensors

# Long texts cost time quadratically and change the order little.
_LONGEST = 64
_BATCH = 16


def text_encoder(model: UniversalModel) -> TextEncoder | None:
    """The checkpoint's own tokenizer, or None if the folder has none."""
    signature = model.source.signature
    if signature.text is None:
        return None
    return TextEncoder(model.source.checkpoint.folder / signature.text.file, signature.text, signature.inputs)


def rank_axes(model: UniversalModel, corpus: Corpus | None, stage: Stage, clock: Clock) -> Ranking:
    """Orders the model's axes in place: not at all if it was trained nested, by first-order Taylor importance on the
    calibration texts if there are any, else by weight magnitude.

    Raises CheckpointError if texts are given and the model has no tokenizer, InputError if its tokenizer does not fit.
    """
    if corpus is not None and text_encoder(model) is None:
        raise CheckpointError(
            f"{model.source.checkpoint.folder}: no tokenizer.json, so the text file cannot be read by this model"
        )
    if model.spec.trained_nested:
        return Ranking("none")
    if corpus is None:
        return rank(model, magnitude_scores(model), "magnitude")
    path = stage.once(stage.work / "scores.safetensors", partial(_save_taylor_scores, model, corpus, clock))
    return rank(model, load_file(path), "taylor", corpus.calibration)


def _save_taylor_scores(model: UniversalModel, corpus: Corpus, clock: Clock, path: Path) -> None:
    save_tensors({name: scores.numpy() for name, scores in _taylor_scores(model, corpus, clock).items()}, path)


def _taylor_scores(model: UniversalModel, corpus: Corpus, clock: Clock) -> Scores:
    encoder, checker = text_encoder(model), InputChecker(model.source.signature.inputs)
    assert encoder is not None
    longest = min(_LONGEST, model.source.signature.max_sequence or _LONGEST)
    # Neighbours of like length need little padding.
    texts = sorted(corpus.calibration, key=len)
    batches = []
    for start in range(0, len(texts), _BATCH):
        feeds = encoder.encode(texts[start : start + _BATCH], longest, truncate=True).feeds
        checker.shape_of(feeds)
        batches.append(tuple(torch.from_numpy(feeds[spec.name]) for spec in model.source.signature.inputs))
    return taylor_scores(model, batches, clock.tick)
