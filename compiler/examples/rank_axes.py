"""The ranking stage: which importance, from which data, remembered for a resumed compile; and ``ranking.safetensors``.

That file says where each step of a ranked model lies in its checkpoint, so that anyone can check a slice: one int32
tensor ``[n]`` per order that was permuted: step ``i`` of the bundle is step ``places[i]`` of the checkpoint. The header
says which parameters have those steps, and where. See docs/bundle-format.md, section 3.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from ...bucket import Bucket
from ...bundle.manifest import RANKING_NAME, Ranking
from ...elastic import ElasticSpec
from ...errors import CheckpointError, InputError
from ...exporters.universal import Places, Scores, UniversalModel, magnitude_scores, rank, taylor_scores
from ...runtime.inputs.arrays import Array, InputChecker
from ..work.clock import Clock
from ..work.staging import Stage
from ..work.tensor_file import write_tensors
from .corpus import MOST_RANKED, ArrayCorpus, Corpus

_BATCH = 16
SLICES = "slices"


def rank_axes(
    model: UniversalModel, corpus: Corpus | ArrayCorpus | None, stage: Stage, clock: Clock, keeps_order: bool = False
) -> Ranking:
    """Orders the model's axes in place: not at all if it was trained nested, ``keeps_order`` or no axis has weights, by
    first-order Taylor importance on the calibration texts or rows if there are any, else by weight magnitude.

    The permutation is written into the bundle.
    Raises CheckpointError if texts are given and the model has no tokenizer, InputError if texts or rows do not fit it.
    """
    if isinstance(corpus, Corpus) and model.source.encoder is None:
        raise CheckpointError(
            f"{model.source.checkpoint.folder}: no tokenizer.json, so the text file cannot be read by this model"
        )
    if keeps_order or model.spec.trained_nested or not model.spec.orders:
        return Ranking("none")
    ranking, places = _ranked(model, corpus, stage, clock)
    moved = permuted(places)
    if not moved:
        return ranking
    stage.once(stage.folder / RANKING_NAME, partial(save_orders, moved, model.spec))
    return replace(ranking, order_file=RANKING_NAME)


def _ranked(
    model: UniversalModel, corpus: Corpus | ArrayCorpus | None, stage: Stage, clock: Clock
) -> tuple[Ranking, Places]:
    if corpus is None:
        return rank(model, magnitude_scores(model), "magnitude")
    write = partial(_save_taylor_scores, model, corpus, clock)
    scores = load_file(stage.once(stage.work / "scores.safetensors", write, "scores"))
    return rank(model, scores, "taylor", *corpus.seen)


def _save_taylor_scores(model: UniversalModel, corpus: Corpus | ArrayCorpus, clock: Clock, path: Path) -> None:
    write_tensors({name: scores.numpy() for name, scores in _taylor_scores(model, corpus, clock).items()}, path)


def _taylor_scores(model: UniversalModel, corpus: Corpus | ArrayCorpus, clock: Clock) -> Scores:
    signature, checker = model.source.signature, InputChecker(model.source.signature.inputs)
    batches = []
    for feeds in _text_batches(model, corpus) if isinstance(corpus, Corpus) else _row_batches(corpus):
        shape = checker.shape_of(feeds)
        if signature.max_sequence is not None and shape.sequence > signature.max_sequence:
            raise InputError(
                f"rows have {shape.sequence} positions, the model takes at most {signature.max_sequence}; cut them"
            )
        if signature.max_sequence is not None and signature.bound is not None:
            feeds = checker.filled(feeds, Bucket(shape.batch, signature.max_sequence))
        batches.append(tuple(torch.from_numpy(feeds[spec.name]) for spec in signature.inputs))
    return taylor_scores(model, batches, clock.tick)


def _text_batches(model: UniversalModel, corpus: Corpus) -> Iterator[Mapping[str, Array]]:
    encoder = model.source.encoder
    assert encoder is not None
    signature = model.source.signature
    longest = min(MOST_RANKED, signature.max_sequence or MOST_RANKED)
    if signature.bound is not None and signature.max_sequence is not None:
        longest = signature.max_sequence  # what a text is cut to saves nothing: all are filled up
    # Neighbours of like length need little padding.
    texts = sorted(corpus.calibration, key=len)
    for start in range(0, len(texts), _BATCH):
        yield encoder.encode(texts[start : start + _BATCH], longest, truncate=True).feeds


def _row_batches(corpus: ArrayCorpus) -> Iterator[Mapping[str, Array]]:
    data = corpus.calibration
    for start in range(0, data.size, _BATCH):
        yield data.take(range(start, min(start + _BATCH, data.size))).feeds


def permuted(places: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The orders that moved a step, as the file holds them; what it leaves out is as in the checkpoint."""
    arrays = {name: order.numpy().astype(np.int32) for name, order in places.items()}
    return {name: order for name, order in arrays.items() if (order != np.arange(len(order))).any()}


def save_orders(moved: Mapping[str, np.ndarray], spec: ElasticSpec, path: Path) -> None:
    """Writes ``moved``, and in the header, as JSON by parameter, every dimension that lies in one of these orders: its
    ``dim`` as the checkpoint has it, the ``order``, and how many elements a step has (``unit``)."""
    slices: dict[str, list[dict[str, int | str]]] = {}
    for order in spec.orders:
        for cut in (*order.slices, *order.followers) if order.name in moved else ():
            slices.setdefault(cut.parameter, []).append({"dim": cut.dim, "order": order.name, "unit": cut.unit})
    # One entry: safetensors writes several in an order of its own.
    write_tensors(moved, path, {SLICES: json.dumps(slices, sort_keys=True)})
