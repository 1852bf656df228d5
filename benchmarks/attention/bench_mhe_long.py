"""Long texts of an encoder with mhe_mul attention: one operator that never writes scores, over plain products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...exporters.families.mhe.architecture.config import MheEncoderConfig
from ...exporters.families.mhe.architecture.forms import ATTENTION
from ...exporters.families.mhe.architecture.presets import PRESETS
from ...exporters.families.mhe.model.answering import Answering
from ...exporters.families.mhe.model.encoder import MheEncoder
from ...exporters.families.mhe.model.lower import lower
from ...runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, open_session, session_options
from ..blocks import block_engine
from ..harness import Row, interleaved, ratio
from ..kept import CACHE
from ..subjects import CORES

_FOLDER, _LAYERS = CACHE / "mhe-long", 2
_TOKENS = ("batch", "sequence")
# Tokens to rounds, and to how much faster the operator is than plain products.
_ROUNDS = {128: 15, 512: 9, 2048: 5}
_BARS = {128: 0.97, 512: 1.0, 2048: 1.1}


def run() -> list[Row]:
    preset = PRESETS["mhe-mul-encoder-base"]
    assert isinstance(preset, MheEncoderConfig)
    config = replace(
        preset, num_hidden_layers=_LAYERS, vocab_size=1000, max_position_embeddings=max(_ROUNDS), head="none"
    )
    torch.manual_seed(0)
    model = Answering(MheEncoder(config).eval().requires_grad_(False))
    return [_row(model, tokens) for tokens in _ROUNDS]


def _row(model: Answering, tokens: int) -> Row:
    ids, mask = np.random.default_rng(0).integers(0, 1000, (1, tokens)), np.ones((1, tokens), np.int64)
    mask[0, tokens - tokens // 8 :] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    calls = {form: _call(model, form, tokens, feeds) for form in ("normal", "one_head")}
    seen = tokens - tokens // 8
    np.testing.assert_allclose(calls["normal"]()[:, :seen], calls["one_head"]()[:, :seen], atol=1e-4)
    times = interleaved(calls, _ROUNDS[tokens], runs=3, warmup=1)
    speed = ratio(times, "normal", "one_head")
    return Row(
        f"mhe_mul encoder, 1 x {tokens}, one_head over normal",
        f"{speed:.2f}x (best {min(times['one_head']):.1f} against {min(times['normal']):.1f} ms)",
        f">= {_BARS[tokens]}x",
        speed >= _BARS[tokens],
        f"{_LAYERS} whole layers of base shape, an eighth of the keys hidden; median ratio of {_ROUNDS[tokens]} "
        f"interleaved rounds, packed, {CORES} threads",
    )


class _Interface:
    """Of an encoder without a head."""

    inputs = (TensorSpec("input_ids", "int64", _TOKENS), TensorSpec("attention_mask", "int64", _TOKENS))
    outputs = (TensorSpec("y", "float32", (*_TOKENS, 768)),)


def _call(model: Answering, form: str, tokens: int, feeds: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    lowered = lower(model, {ATTENTION: form})
    path = block_engine(lowered, _Interface(), Bucket(1, tokens), _FOLDER / f"{form}-{tokens}")
    session = open_session(path.absolute(), session_options(CORES, OPTIMIZATION_LEVEL, packed=True))
    return partial(_first, session.run, feeds)


def _first(answers: Callable[..., list[np.ndarray]], feeds: dict[str, np.ndarray]) -> np.ndarray:
    return answers(None, feeds)[0]
