"""Text of an encoder-decoder against transformers' own, alone and in rows, and what a request may ask of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.engines.memory import MemoryCap
from nestforge.runtime.generation.admitted import AdmittedEngines, longer_prompt_bytes
from nestforge.runtime.generation.row import Run
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.generating import generated_by_transformers, t5_folder

PROMPTS = ["Returns the file that a subprocess has opened.", "a", "path " * 30, "threads"]
TOKENS = 40
SMALL = "ffn8x1_24x1_16x1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5_folder(tmp_path_factory) / "t5"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5_folder(tmp_path_factory) / "t5.bundle"


@pytest.fixture
def model(bundle: Path) -> Iterator[ElasticModel]:
    with load(bundle, threads=1) as opened:
        yield opened


def test_greedy_is_what_transformers_generates(model: ElasticModel, folder: Path) -> None:
    prompt = model.generate.tokens(PROMPTS[0])
    answer = model.generate(PROMPTS[0], max_tokens=128)
    (row,) = answer.rows
    assert list(row.tokens) == generated_by_transformers(folder, prompt, 128)
    assert len(row.tokens) > 100
    assert (row.prompt_tokens, row.reused_tokens) == (len(prompt), 0)
    assert row.runs == (Run("ffn32", len(row.tokens), "no limit given: the largest submodel"),)
    assert model.generate(prompt, max_tokens=128).rows[0].tokens == row.tokens
    assert answer.text


def test_rows_behind_prompts_of_different_length_are_what_each_is_alone(model: ElasticModel, folder: Path) -> None:
    """Rows that end leave, and those that continue keep their own prompt."""
    alone = [generated_by_transformers(folder, model.generate.tokens(prompt), TOKENS) for prompt in PROMPTS]
    stops = [alone[0][4], alone[2][9]]
    together = model.generate(PROMPTS, max_tokens=TOKENS, stop=stops)
    for row, whole in zip(together.rows, alone, strict=True):
        end = next((place for place, token in enumerate(whole) if token in stops), len(whole) - 1)
        assert list(row.tokens) == whole[: end + 1]
    assert len({len(row.tokens) for row in together.rows}) > 2


def test_equal_prompts_are_rows_of_their_own(model: ElasticModel) -> None:
    rows = model.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], max_tokens=8).rows
    assert rows[0].tokens == rows[2].tokens != rows[1].tokens
    assert [row.reused_tokens for row in rows] == [0, 0, 0]


def test_text_that_several_submodels_write(model: ElasticModel) -> None:
    """The smaller one continues behind the prompt as the larger one read it."""
    row = model.generate(PROMPTS[0], max_tokens=TOKENS, tokens_per_second=1e9).rows[0]
    assert [run.submodel for run in row.runs] == ["ffn32", SMALL]
    small = model.generate(PROMPTS[0], max_tokens=TOKENS, submodel=SMALL).rows[0]
    assert [run.submodel for run in small.runs] == [SMALL]
    fast = model.generate(PROMPTS[0], max_tokens=TOKENS, deadline_ms=1e-3).rows[0]
    assert fast.tokens == small.tokens
    assert "the promise is not kept" in fast.runs[0].reason


@pytest.mark.parametrize("draft", [SMALL, "n-gram"])
def test_drafted_text_is_the_same(model: ElasticModel, draft: str) -> None:
    plain = model.generate(PROMPTS[0], max_tokens=TOKENS).rows[0]
    drafted = model.generate(PROMPTS[0], max_tokens=TOKENS, draft=draft).rows[0]
    assert drafted.tokens == plain.tokens
    assert sum(each.drafted for each in drafted.drafts) > 0


def test_what_is_refused(model: ElasticModel) -> None:
    with pytest.raises(InputError, match=r"^session: this model reads a prompt whole, with an encoder, so that"):
        model.session()
    with pytest.raises(InputError, match=r"^prompt 1: 4097 tokens, the encoder takes 4096; shorten it$"):
        model.generate([[5], [5] * 4097])
    with pytest.raises(InputError, match=r"`max_tokens=5000` are more than the 4096 positions of this model"):
        model.generate([5], max_tokens=5000)
    with pytest.raises(InputError, match=r"its model has no chat template"):
        model.generate(messages=[{"role": "user", "content": "a"}])


def test_a_memory_cap_counts_encoder_and_decoder(bundle: Path) -> None:
    entry = open_bundle(bundle).manifest.generation
    small = [engine for engine in entry.every_engine if engine.submodel != "ffn32"]
    for_decoder, for_both = small[0].activation_bytes, sum(engine.activation_bytes for engine in small)
    assert for_decoder < for_both
    with load(bundle, memory_mb=1.9 * for_both / 1e6, threads=1) as model:
        row = model.generate([5], max_tokens=3).rows[0]
        assert len({run.submodel for run in row.runs}) == 1
        assert row.runs[0].reason.endswith("that the memory cap admits, 1 left out")
    with (
        load(bundle, threads=1) as model,
        pytest.raises(SelectionError, match=r"no submodel generates 1 rows with `memory_mb` <= 1; the smallest takes"),
    ):
        model.generate([5], memory_mb=1, max_tokens=3)


def test_a_memory_cap_admits_a_decoder_with_its_encoder(bundle: Path) -> None:
    """Under every cap one pair writes, or the line says what the smallest takes."""
    manifest = open_bundle(bundle).manifest
    pairs = {name: [e for e in manifest.generation.every_engine if e.submodel == name] for name in ("ffn32", SMALL)}
    takes = {
        name: sum((e.weight_bytes or 0) + e.private_bytes + e.activation_bytes for e in pair) / 1e6
        for name, pair in pairs.items()
    }

    def written(cap: float) -> str:
        # Engines of whole inputs are not open, and a cap that they do not fit is another matter.
        with load(bundle, threads=1) as model:
            model.generate._engines = AdmittedEngines(model.bundle, 1, "auto", None, (), MemoryCap(model.bundle, cap))
            return model.generate([5], max_tokens=3).rows[0].runs[0].submodel

    small, large = takes[SMALL], takes["ffn32"]
    assert [written(cap) for cap in ((small + large) / 2, large + 0.1, 2.5 * large)] == [SMALL, "ffn32", "ffn32"]
    pair = rf"{SMALL}\.cached@\S+ with {SMALL}\.encoder@\S+"
    line = rf"^memory_mb=\S+, \S+ MB left beside .*: no engine fits; the smallest, {pair} takes .*; raise the cap$"
    with pytest.raises(SelectionError, match=line):
        written(0.97 * small)


def test_activations_of_a_long_prompt_count_under_the_cap(bundle: Path) -> None:
    entry = open_bundle(bundle).manifest.generation
    most = max(engine.activation_bytes for engine in entry.encoder.engines)
    assert [longer_prompt_bytes(entry, tokens) for tokens in (3, 512, 1024, 4096)] == [0, 0, 3 * most, 63 * most]
    with load(bundle, memory_mb=20 * most / 1e6, threads=1) as model:
        assert model.generate([5] * 1024, max_tokens=3).rows[0].tokens
        line = r"^memory_mb=\S+: (a cache and buffers|activations for a prompt of 4096 tokens) of \S+ MB"
        with pytest.raises(SelectionError, match=line):
            model.generate([5] * 4096, max_tokens=3)
        assert model.generate([5] * 1024, max_tokens=3).rows[0].tokens
