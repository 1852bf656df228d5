"""Manifests whose engines cannot generate are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.check_generation import generation_problems
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.entries.generation_entry import (
    CACHED,
    ENCODER,
    CachedLayer,
    EncoderEntry,
    GenerationEntry,
)
from nestforge.bundle.manifest import FileEntry, Manifest
from nestforge.bundle.open_bundle import open_bundle

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle-ranges"
ENGINE = EngineEntry(
    id="ffn8.cached@b1_64-s1_40",
    submodel="ffn8",
    bucket=Bucket(64, 40, 1, 1),
    backend="onnxruntime",
    file="ffn8.onnx",
    emitted="sliced",
    private_bytes=0,
    flops=1,
    moved_bytes=1,
    activation_bytes=1,
    segment=CACHED,
    weight_bytes=1,
)
ENTRY = GenerationEntry(48, (CachedLayer(2, 8),), 40, (2,), (ENGINE,), begin_id=1, chat_template="chat.jinja")

READER = replace(ENGINE, id="ffn8.encoder@b1-s1_40", segment=ENCODER, bucket=Bucket(1, 40, None, 1))
ENCODERS = EncoderEntry(0, 40, (READER,))


def behind(encoder: EncoderEntry) -> GenerationEntry:
    return replace(ENTRY, encoder=encoder)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    found = open_bundle(GOLDEN).manifest
    return replace(found, files=(*found.files, FileEntry("chat.jinja", 1, "0" * 64)))


def problems(manifest: Manifest, entry: GenerationEntry) -> list[str]:
    return list(generation_problems(replace(manifest, generation=entry)))


def test_a_sound_entry_has_none(manifest: Manifest) -> None:
    assert problems(manifest, ENTRY) == problems(manifest, behind(ENCODERS)) == []
    of_sizes = [replace(ENGINE, id=f"ffn8.cached{size}", backend="tensorrt", capacity=size) for size in (39, 40)]
    short = replace(of_sizes[0], bucket=Bucket(64, 39, 1, 1))
    reader = replace(READER, backend="tensorrt")
    of_plans = replace(behind(replace(ENCODERS, engines=(reader,))), engines=(short, of_sizes[1]))
    assert problems(manifest, of_plans) == [], "one encoder for the engines of all capacities"
    assert list(generation_problems(manifest)) == []


REFUSED = {
    "no layers": (replace(ENTRY, layers=()), "generation: 0 layers; expected 1..4096"),
    "no engines": (replace(ENTRY, engines=()), "generation: expected at least one engine"),
    "end beyond": (replace(ENTRY, end_ids=(48,)), "end_ids [48]; expected numbers below the vocabulary of 48"),
    "begin beyond": (replace(ENTRY, begin_id=50), "begin_id [50]; expected numbers below the vocabulary of 48"),
    "no template": (replace(ENTRY, chat_template="other.jinja"), "file 'other.jinja' is not among the files"),
    "capacity": (
        replace(ENTRY, engines=(replace(ENGINE, capacity=40),)),
        "capacity 40; engines for tensorrt have one, others none",
    ),
    "no capacity": (
        replace(ENTRY, engines=(replace(ENGINE, backend="tensorrt"),)),
        "capacity None; engines for tensorrt have one, others none",
    ),
    "small": (
        replace(ENTRY, engines=(replace(ENGINE, backend="tensorrt", capacity=39),)),
        "capacity 39; expected 40, its new tokens, to 40, the positions",
    ),
    "two of one size": (
        replace(ENTRY, engines=(replace(ENGINE, backend="tensorrt", capacity=40),) * 2),
        "submodel ffn8 has several engines at capacity 40; expected one",
    ),
    "heads": (replace(ENTRY, engines=(replace(ENGINE, cache_heads=(3,)),)), "cache_heads [3]; expected 1 to [2]"),
    "sizes": (replace(ENTRY, engines=(replace(ENGINE, cache_sizes=(9,)),)), "cache_sizes [9]; expected 1 to [8]"),
    "no prompt": (
        replace(ENTRY, engines=(replace(ENGINE, source_heads=(1,)),)),
        "source_heads, of a model without an",
    ),
    "layers of heads": (replace(ENTRY, engines=(replace(ENGINE, cache_heads=(1, 1)),)), "cache_heads [1, 1]; expected"),
    "huge": (replace(ENTRY, positions=2**30), "layer 0 keeps more than 2147483648 numbers"),
    "segment": (replace(ENTRY, engines=(replace(ENGINE, segment=None),)), "engines that generate have 'cached'"),
    "bucket": (
        replace(ENTRY, engines=(replace(ENGINE, bucket=Bucket(1, 40, None, 2)),)),
        "bucket 1x2..40; expected one that begins with 1 row of 1 token",
    ),
    "long": (replace(ENTRY, positions=39), "40 new tokens, more than the 39 positions"),
    "weights": (replace(ENTRY, engines=(replace(ENGINE, weight_bytes=None),)), "without weight_bytes"),
    "many numbers": (replace(ENTRY, layers=(CachedLayer(2**12, 2**9),) * 3), "more than 4194304"),
    "two": (replace(ENTRY, engines=(ENGINE, replace(ENGINE, id="other"))), "submodel ffn8 has several engines"),
    "start beyond": (
        behind(replace(ENCODERS, start_id=48)),
        "start_id 48; expected a number below the vocabulary",
    ),
    "no encoder": (behind(replace(ENCODERS, engines=())), "expected an encoder for each submodel that generates"),
    "encoder's segment": (
        behind(replace(ENCODERS, engines=(replace(READER, segment=CACHED),))),
        "engines that read a prompt have 'encoder'",
    ),
    "encoder's bucket": (
        behind(replace(ENCODERS, engines=(replace(READER, bucket=Bucket(2, 40, None, 1)),))),
        "bucket 2x1..40; expected one row that begins with 1 token",
    ),
    "encoder's backend": (
        behind(replace(ENCODERS, engines=(replace(READER, backend="tensorrt"),))),
        "backend tensorrt; expected that of the engines which read what it makes",
    ),
    "encoder's positions": (behind(replace(ENCODERS, positions=41)), "takes 40 tokens; expected 41"),
    "huge prompts": (behind(replace(ENCODERS, positions=2**30)), "an encoder returns more than 2147483648 numbers"),
    "encoder's weights": (
        behind(replace(ENCODERS, engines=(replace(READER, weight_bytes=None),))),
        "ffn8.encoder@b1-s1_40: an engine that generates without weight_bytes",
    ),
    "vocabulary": (replace(ENTRY, vocabulary=2**26), "logits of 64 rows have more than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(manifest: Manifest, case: str) -> None:
    entry, message = REFUSED[case]
    assert any(message in problem for problem in problems(manifest, entry)), problems(manifest, entry)
