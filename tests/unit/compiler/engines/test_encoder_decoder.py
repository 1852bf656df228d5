"""Engines of encoder-decoders that generate, compiled: a family's, and of classes that no family names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
import transformers
from nestforge.bundle.entries.generation_entry import GenerationEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
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
from nestforge.runtime.load import load
from safetensors.torch import load_file, save_file
from support.generating import compile_t5, t5_folder
from support.tiny_compile import board
from support.tiny_models import edit_config, save_t5


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
    assert (entry.encoder.start_id, entry.encoder.positions, entry.positions, len(entry.layers)) == (0, 4096, 4096, 2)
    for engine in entry.engines:
        assert engine.id == f"{engine.submodel}.cached@b1_64-s1_512"
        encoder = entry.encoder_of(engine)
        assert encoder.id == f"{engine.submodel}.encoder@b1-s1_4096"
        for one in (engine, encoder):
            assert one.emitted == "sliced"
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
        assert "; without the rounding of activations, " in engine.parity.rule


SIZES: dict[str, Any] = {"d_model": 32, "vocab_size": 96, "max_position_embeddings": 64, "eos_token_id": None}
for _side in ("encoder", "decoder"):
    SIZES |= {f"{_side}_layers": 1, f"{_side}_ffn_dim": 32, f"{_side}_attention_heads": 4}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    # The first and the last token are stated; positions are a table that counts from 2.
    "bart": ("BartForConditionalGeneration", {"forced_bos_token_id": 7, "forced_eos_token_id": 2}),
    # Begins with the token of padding; positions are sines in a table.
    "marian": (
        "MarianMTModel",
        {"pad_token_id": 95, "decoder_start_token_id": 95, "forced_eos_token_id": None, "decoder_vocab_size": 96},
    ),
    # States no token that a decoder begins with.
    "mbart": ("MBartForConditionalGeneration", {"bos_token_id": 4}),
    # Distances are biases of each layer; the head has a matrix of its own, which transformers would tie.
    "umt5": (
        "UMT5ForConditionalGeneration",
        {"num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0},
    ),
    # Positions count tokens behind that of padding, which the decoder begins with here.
    "m2m_100": ("M2M100ForConditionalGeneration", {"pad_token_id": 1, "decoder_start_token_id": 1}),
}
TOKENS = 12
PROMPTS = [[5], [9, 31, 64, 17, 80, 12, 44], [*range(20, 37)]]


def save(folder: Path, model_type: str) -> Path:
    """A random model, with small embeddings of tokens so that texts vary, whose steps keep their order."""
    import transformers

    name, settings = CLASSES[model_type]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings}))
    if model_type == "umt5":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.config.tie_word_embeddings = False
    for place, parameter in model.named_parameters():
        if "norm" not in place and parameter.requires_grad:
            size = 1.0 if "positions" in place or "bias.weight" in place else 0.3 if "layer" in place else 0.03
            parameter.data = size * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return edit_config(folder, nested=True)


def written_by_transformers(folder: Path, model_type: str) -> list[tuple[int, ...]]:
    import transformers

    module: Any = getattr(transformers, CLASSES[model_type][0]).from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}
        found.append(tuple(module.generate(ids, **given)[0, 1:].tolist()))
    return found


@pytest.mark.parametrize("model_type", ["bart", "marian", "m2m_100", "umt5"])
def test_text_is_that_of_transformers_whole_and_cut(tmp_path: Path, model_type: str) -> None:
    folder, half = save(tmp_path / "m", model_type), save(tmp_path / "half", model_type)
    source = open_source(folder)
    assert source.family.name == "general"
    small = "ffn16-heads2-heads_b2"  # of the decoder's attention to the prompt too
    options = {"submodels": [small], "include": "budgets", "generate": True}
    profile = board(buckets=["1x8"], budgets={"full": {}})
    model = load(compile_bundle(model=folder, output=tmp_path / "b", profile=profile, **options))
    # Without the second half of the neurons and heads of every layer, transformers' own class adds zeros for them.
    weights = load_file(half / "model.safetensors")
    for cut in source.spec.slices:
        kept = weights[cut.parameter].shape[cut.dim] // 2
        weights[cut.parameter].narrow(cut.dim, kept, kept).zero_()
    save_file(weights, half / "model.safetensors", {"format": "pt"})
    written = {}
    (whole,) = (each.id for each in model.submodels if each.id != small)
    for of, submodel in ((half, small), (folder, whole)):
        expected = written[submodel] = written_by_transformers(of, model_type)
        assert len(set(expected)) == 3
        assert len({token for text in expected for token in text}) > 2
        assert max(len(set(text)) for text in expected) > 1
        rows = model.generate(PROMPTS, max_tokens=TOKENS, submodel=submodel).rows
        assert [row.tokens for row in rows] == expected
        for prompt, text in zip(PROMPTS, expected, strict=True):
            assert model.generate(prompt, max_tokens=TOKENS, submodel=submodel).rows[0].tokens == text
    assert written[small] != written[whole]
    encoder = model.bundle.manifest.generation.encoder
    stated = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
    config = json.loads((folder / "generation_config.json").read_text())
    assert [encoder.start_id, encoder.first_id, encoder.last_id] == [config.get(name) for name in stated]


def test_a_decoder_begins_as_texts_do_where_its_folder_states_nothing_else(tmp_path: Path) -> None:
    cached = open_source(save(tmp_path / "m", "mbart")).architecture.cached
    assert cached.problem is None
    assert cached.encoder.start == 4


def test_why_an_encoder_decoder_cannot_generate(tmp_path: Path) -> None:
    folder = edit_config(save(tmp_path / "bart", "bart"), decoder_start_token_id=None, bos_token_id=None)
    (folder / "generation_config.json").unlink()
    expected = "decoder_start_token_id: expected a token of the vocabulary, 0..95, with which"
    assert expected in (open_source(folder).architecture.cached.problem or "")
