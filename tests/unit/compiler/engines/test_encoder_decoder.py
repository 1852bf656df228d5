"""Engines of an encoder-decoder that generate, compiled: the encoder, its decoder, and what the gate finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
import transformers
from nestforge.bundle.entries.generation_entry import GenerationEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.engines.cached_gate import judge_cached
from nestforge.compiler.parity.cached_cases import cached_batches, prompts_of, read_prompts, run_batches
from nestforge.compiler.parity.references import References
from nestforge.errors import ParityError
from nestforge.exporters.hugging_face import distances, generating
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.generation.cache import Cache, Source, read_source
from nestforge.runtime.generation.cached_engine import CachedEngine
from support.generating import compile_t5, t5_folder
from support.tiny_models import save_t5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5_folder(tmp_path_factory) / "t5"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(t5_folder(tmp_path_factory) / "t5.bundle")


def entry_of(bundle: Bundle) -> GenerationEntry:
    entry = bundle.manifest.generation
    assert entry is not None
    return entry


def test_every_submodel_has_an_encoder_and_a_decoder(bundle: Bundle) -> None:
    entry = entry_of(bundle)
    assert entry.encoder is not None
    assert (entry.encoder.start_id, entry.encoder.positions, entry.positions, len(entry.layers)) == (0, 4096, 4096, 2)
    for engine in entry.engines:
        assert engine.id == f"{engine.submodel}.cached@b1_64-s1_512"
        encoder = entry.encoder_of(engine)
        assert encoder is not None
        assert encoder.id == f"{engine.submodel}.encoder@b1-s1_4096"
        for one in (engine, encoder):
            assert one.emitted == "sliced"
            assert one.parity is not None
            assert ("longer than a run" in one.parity.cases) == (one.submodel == "ffn32")
        assert [output.name for output in encoder.parity.outputs][:2] == ["source_key_0", "source_value_0"]
    assert bundle.manifest.every_engine[-4:] == (*entry.engines, *entry.encoder.engines)


def test_verify_runs_both_again(bundle: Bundle, folder: Path) -> None:
    report = nestforge.verify(bundle.path, folder)
    assert report
    assert [one.engine for one in report.engines][-2:] == ["ffn32.encoder@b1-s1_4096", "ffn32.cached@b1_64-s1_512"]


def test_rows_behind_prompts_of_different_length_are_what_transformers_answers(bundle: Bundle, folder: Path) -> None:
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    rng, entry = np.random.default_rng(5), entry_of(bundle)
    prompts = [rng.integers(3, 512, length) for length in (9, 30, 1)]
    texts = rng.integers(3, 512, (3, 12))
    with torch.no_grad():
        expected = [
            model(input_ids=torch.from_numpy(prompt)[None], decoder_input_ids=torch.from_numpy(text)[None]).logits[0]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    engine = next(one for one in entry.engines if one.submodel == "ffn32")
    encoder, source = entry.encoder_of(engine), Source.empty(entry, 3, 40)
    assert encoder is not None
    with runner_for(bundle, encoder, "packed", threads=1) as runner:
        for row, prompt in enumerate(prompts):
            source.put(row, read_source(runner, entry, prompt))
    with runner_for(bundle, engine, "packed", threads=1) as runner:
        cached = CachedEngine(runner, engine, entry, Cache.empty(entry.layers, 3, 16, source))
        for row, starts in enumerate((4, 2, 7)):
            found = cached.extend(row, texts[row, :starts], 0, range(starts))
            np.testing.assert_allclose(found, expected[row][:starts].numpy(), atol=1e-4)
        for ahead in range(4):
            places = [4 + ahead, 2 + ahead, 7 + ahead]
            found = cached.step(texts[range(3), places], places)
            np.testing.assert_allclose(found, [e[p].numpy() for e, p in zip(expected, places, strict=True)], atol=1e-4)


def test_the_gate_finds_a_row_that_reads_another_prompt(bundle: Bundle, folder: Path) -> None:
    references = References(load_universal(replace(open_source(folder), generates=True)), {})
    form, entry = references.universal.source.cached, entry_of(bundle)
    assert form is not None
    engine = next(one for one in entry.engines if one.submodel == "ffn32")
    encoder, batches = entry.encoder_of(engine), cached_batches(form.entry, long=False)
    assert encoder is not None
    assert len({case.feeds["input_ids"].shape for case in prompts_of(batches)}) == 6
    with runner_for(bundle, encoder, "packed", threads=1) as runner:
        read = read_prompts(runner, entry, batches)
    with runner_for(bundle, engine, "packed", threads=1) as runner:
        right = run_batches(runner, engine, entry, batches, read)
        read["row 1 of 3"] = read["row 2 of 3"]
        wrong = run_batches(runner, engine, entry, batches, read)
    assert judge_cached(references, form, engine, batches, right).broken is None
    assert judge_cached(references, form, engine, batches, wrong).broken is not None


@pytest.mark.usefixtures("blatant")
def test_room_behind_a_prompt_that_is_read_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "hidden_beyond", lambda lengths, _most: 0.0 * lengths[:, None, None, None])
    with pytest.raises(ParityError, match=r"cached@b1_64-s1_512: .*no module in one run over the text"):
        compile_t5(save_t5(tmp_path / "t5", d_ff=16, text=False, num_decoder_layers=1), tmp_path / "b", submodels=[])


@pytest.mark.usefixtures("blatant")
def test_distances_that_are_off_by_one_stop_the_compile_at_their_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = distances.tokens_so_far
    monkeypatch.setattr(distances, "tokens_so_far", lambda places: seen(places) - 1)
    with pytest.raises(ParityError, match=r"first to diverge: decoder.block.0.layer.0.SelfAttention.rel"):
        compile_t5(save_t5(tmp_path / "t5", d_ff=24, text=False, num_decoder_layers=1), tmp_path / "b", submodels=[])


def test_integers_are_proven_with_and_without_the_rounding_of_activations(tmp_path: Path) -> None:
    folder = save_t5(tmp_path / "t5", d_model=32, d_ff=64, num_decoder_layers=1)
    path = compile_t5(folder, tmp_path / "b", submodels=["ffn32"], precisions=["int4"])
    for engine in entry_of(open_bundle(path)).every_engine:
        assert engine.precision == "int4"
        assert engine.parity is not None
        assert "; without the rounding of activations, " in engine.parity.rule
