"""Integer engines of the real MiniLM against its fp32 engine: time, bytes of weights, and what is lost on texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ...bucket import Bucket
from ...bundle.open_bundle import Bundle, open_bundle
from ...compiler.compile import compile_bundle
from ...examples.encoder.corpus import demo_checkpoint, write_corpus
from ...exporters.source import open_source
from ...exporters.universal import load_universal
from ...profiles.budget import BudgetSpec
from ...profiles.precision import Precision
from ..harness import Row, interleaved, ratio
from ..kept import CACHE
from ..subjects import CORES, eager_call, elsewhere, packed

_BUCKETS = (Bucket(1, 32), Bucket(1, 128), Bucket(8, 128))
# 4 bits are for memory, and must cost no time.
_SPEED: Mapping[Precision, float] = {"int8": 1.3, "int8-dynamic": 1.3, "int4": 1.0}
_ROUNDS = 25


def run() -> list[Row]:
    rows: list[Row] = []
    for precision in _SPEED:
        bundle = open_bundle(_bundle(precision))
        rows += [_speed(bundle, precision, bucket) for bucket in _BUCKETS]
        rows.append(_weight(bundle, precision))
    return [*rows, _against_eager()]


def _bundle(precision: Precision) -> Path:
    """The universal model in fp32 and in ``precision``, calibrated and judged on docstrings of Python."""
    path, texts = CACHE / f"minilm-{precision}.bundle", CACHE / "docstrings.txt"
    if not path.exists():
        if not texts.exists():
            write_corpus(texts)
        profile = replace(elsewhere(), buckets=_BUCKETS, budgets={"full": BudgetSpec()})
        levels = dict.fromkeys(open_source(demo_checkpoint()).spec.kinds, (1.0,))
        compile_bundle(demo_checkpoint(), profile, path, text=texts, levels=levels, precisions=("fp32", precision))
    return path


def _pair(bundle: Bundle) -> tuple[str, str]:
    """The ids of the narrow and of the wide submodel."""
    narrow, wide = sorted(bundle.manifest.submodels, key=lambda entry: entry.weight_bytes)
    return narrow.id, wide.id


def _speed(bundle: Bundle, precision: Precision, bucket: Bucket) -> Row:
    narrow, wide = _pair(bundle)
    with ExitStack() as stack:
        runners = {name: stack.enter_context(packed(bundle.path, name, bucket)) for name in (narrow, wide)}
        calls = {name: (lambda one=one: one.runner.run(one.feeds)) for name, one in runners.items()}
        times = interleaved(calls, _ROUNDS)
    speed = ratio(times, wide, narrow)
    return Row(
        f"MiniLM in {precision} against fp32, {bucket.batch} x {bucket.sequence}",
        f"{speed:.2f}x (best {min(times[narrow]):.2f} against {min(times[wide]):.2f} ms)",
        f">= {_SPEED[precision]:g}x",
        speed >= _SPEED[precision],
        f"median ratio of {_ROUNDS} interleaved rounds, both packed, {CORES} threads",
    )


def _weight(bundle: Bundle, precision: str) -> Row:
    narrow, wide = (bundle.manifest.submodel(name) for name in _pair(bundle))
    share = narrow.weight_bytes / wide.weight_bytes
    quality = narrow.quality
    assert quality is not None, "the bundle was compiled with texts"
    shown = ", ".join(f"{name} {value:.4f}" for name, value in quality.figures.items())
    return Row(
        f"weights of MiniLM in {precision}",
        f"{share:.3f}x ({narrow.weight_bytes / 1e6:.1f} of {wide.weight_bytes / 1e6:.1f} MB); {shown}",
        "<= 0.5x",
        share <= 0.5,
        f"bytes that engines read; agreement with fp32 on {quality.samples} held-out docstrings",
    )


def _against_eager() -> Row:
    bundle, bucket = open_bundle(_bundle("int8-dynamic")), Bucket(1, 128)
    model = load_universal(open_source(demo_checkpoint()))
    with packed(bundle.path, _pair(bundle)[0], bucket) as ours:
        calls = {"eager": eager_call(model.module, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, _ROUNDS)
    speed = ratio(times, "eager", "ours")
    return Row(
        "MiniLM in int8-dynamic against PyTorch eager in fp32, 1 x 128",
        f"{speed:.2f}x (best {min(times['ours']):.2f} against {min(times['eager']):.2f} ms)",
        ">= 2x",
        speed >= 2,
        f"median ratio of {_ROUNDS} interleaved rounds, {CORES} threads each",
    )
