"""Text of encoder-decoders from plans of TensorRT, on tests/support/fake_tensorrt.py: no plan is really run. What the
encoder's plan makes of prompts stays in memory that plays a GPU's; what is written is what the processor writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import BundleIncompatibleError, InputError, SelectionError
from nestforge.runtime.generation.cache_memory import session_bytes
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.generating import (
    NARROW_PAIR,
    SMALL,
    WHOLE_PAIR,
    compile_plans,
    compile_t5,
    opened_plans,
    require_same,
    source_folder,
    t5_folder,
)
from support.tiny_models import save_t5

# Tokens of a prompt, the longest beyond any step's.
SHORT, LONG, FULL = [5, 7], list(range(20, 29)), list(range(40, 70))
TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticModel]:
    with load(t5_folder(tmp_path_factory) / "t5.bundle", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def pair_processor(folder: Path) -> Iterator[ElasticModel]:
    with load(folder / "pair" / "processor", threads=1) as model:
        yield model


@pytest.fixture
def plans(folder: Path) -> Iterator[tuple[ElasticModel, World]]:
    with opened_plans(folder / "t5") as found:
        yield found


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("submodel", ["ffn32", SMALL])
def test_the_same_tokens_as_on_the_processor(
    folder: Path, processor: ElasticModel, submodel: str, captures: bool
) -> None:
    with opened_plans(folder / "t5", captures=captures) as (model, world):
        for prompt in (LONG, FULL, [SHORT, FULL, LONG]):
            asked: dict[str, Any] = {"prompt": prompt, "submodel": submodel, "max_tokens": TOKENS, "logprobs": 0}
            require_same(model.generate(**asked), processor.generate(**asked))
    assert ("graph" in world.calls) == captures


def test_rows_that_end_leave_and_the_others_keep_their_prompts(
    plans: tuple[ElasticModel, World], processor: ElasticModel
) -> None:
    model, _ = plans
    prompts = [LONG, SHORT, FULL, LONG[:1]]
    alone = [processor.generate(prompt, max_tokens=TOKENS).rows[0].tokens for prompt in prompts]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": TOKENS, "stop": [alone[0][4], alone[2][9]], "logprobs": 0}
    found = model.generate(**asked)
    require_same(found, processor.generate(**asked))
    assert len({len(row.tokens) for row in found.rows}) > 2


def test_nothing_but_tokens_and_logits_crosses(plans: tuple[ElasticModel, World]) -> None:
    model, world = plans
    keys = 4 * 3 * 8 * len(FULL)
    model.generate(FULL, max_tokens=TOKENS)
    logits = 4 * model.bundle.manifest.generation.vocabulary
    assert max(world.crossed) == logits < keys


def test_prompts_stay_where_they_are_when_a_text_moves(plans: tuple[ElasticModel, World]) -> None:
    model, world = plans
    with model.generate.stream(FULL, max_tokens=TOKENS) as pieces:
        for _ in range(15):
            next(pieces)
        read, before = [call for call in world.calls if call.startswith("copy")], world.calls.count("open")
        assert read == ["copy 24", "copy 3"] * 2, "keys and values of the prompt, of two layers, into the row"
        assert before == 2, "the encoder's plan and that of the smallest capacity"
        list(pieces)
    moved = [call for call in world.calls if call.startswith("copy")][len(read) :]
    assert moved == ["copy 3"] * 4, "keys and values of the text"
    assert world.calls.count("open") == 3


def test_several_submodels_write_behind_what_the_larger_one_read(
    plans: tuple[ElasticModel, World], processor: ElasticModel
) -> None:
    model, _ = plans
    found, known = (one.generate(LONG, max_tokens=TOKENS, tokens_per_second=1e9).rows[0] for one in (model, processor))
    assert [run.submodel for run in found.runs] == [run.submodel for run in known.runs] == ["ffn32", SMALL]
    assert found.tokens == known.tokens


@pytest.mark.parametrize("draft", [SMALL, "n-gram"])
def test_drafted_text_is_the_same(plans: tuple[ElasticModel, World], processor: ElasticModel, draft: str) -> None:
    drafted = plans[0].generate(FULL, max_tokens=TOKENS, draft=draft, drafted=4).rows[0]
    assert drafted.tokens == processor.generate(FULL, max_tokens=TOKENS).rows[0].tokens


@pytest.mark.parametrize("submodel", [WHOLE_PAIR, NARROW_PAIR])
def test_fewer_heads_of_texts_and_of_prompts(folder: Path, pair_processor: ElasticModel, submodel: str) -> None:
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
    with opened_plans(folder / "pair") as (model, _):
        for prompt in (prompts[0], prompts):
            asked: dict[str, Any] = {
                "prompt": prompt,
                "submodel": submodel,
                "max_tokens": 20,
                "logprobs": 0,
                "stop": [],
            }
            require_same(model.generate(**asked), pair_processor.generate(**asked))


def test_a_submodel_of_fewer_heads_continues_and_drafts(folder: Path, pair_processor: ElasticModel) -> None:
    prompt = [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    asks: list[dict[str, Any]] = [{"tokens_per_second": 1e9}, {"submodel": WHOLE_PAIR, "draft": NARROW_PAIR}]
    with opened_plans(folder / "pair") as (model, _):
        for asked in asks:
            found, known = (one.generate(prompt, max_tokens=20, stop=[], **asked) for one in (model, pair_processor))
            assert found.rows[0].tokens == known.rows[0].tokens
            assert {run.submodel for run in found.rows[0].runs} == {run.submodel for run in known.rows[0].runs}


def test_the_first_form_of_t5(tmp_path: Path) -> None:
    """Sampled: its likeliest token is the one that it was given."""
    levels: dict[str, Any] = {"ffn": (1.0,)}
    model = save_t5(tmp_path / "m", d_model=32, d_ff=64, num_decoder_layers=1)
    compile_t5(model, tmp_path / "processor", submodels=[], levels=levels)
    compile_plans(model, tmp_path, [], "1x16", levels)
    asked: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": 0, "temperature": 1.0, "seed": 3, "stop": []}
    with opened_plans(tmp_path) as (plans, _), load(tmp_path / "processor", threads=1) as processor:
        found, known = (model.generate([LONG, FULL, SHORT], **asked) for model in (plans, processor))
    require_same(found, known)
    assert all(len(set(row.tokens)) > 10 for row in found.rows)


def test_an_interruption_while_a_text_moves_leaves_nothing(
    plans: tuple[ElasticModel, World], processor: ElasticModel, interrupt_once: Any
) -> None:
    model, world = plans
    model.generate(FULL, max_tokens=TOKENS)  # opens the plans of both capacities
    taken, known = set(world.allocated), processor.generate(FULL, max_tokens=TOKENS).rows[0].tokens
    # Tokens were copied, and what was moved from is about to go.
    interrupt_once(world, lambda calls: calls[-4:] == ["copy 3"] * 4)
    with pytest.raises(KeyboardInterrupt):
        model.generate(FULL, max_tokens=TOKENS)
    assert set(world.allocated) == taken
    assert model.generate(FULL, max_tokens=TOKENS).rows[0].tokens == known


@pytest.mark.parametrize("at", ["run", "copy 24"])
def test_an_interruption_while_a_prompt_is_read_leaves_nothing(
    plans: tuple[ElasticModel, World], interrupt_once: Any, at: str
) -> None:
    model, world = plans
    known = model.generate(LONG, max_tokens=3).rows[0].tokens
    taken = set(world.allocated)
    world.calls.clear()
    interrupt_once(world, lambda calls: at in calls)
    with pytest.raises(KeyboardInterrupt):
        model.generate(LONG, max_tokens=3)
    assert set(world.allocated) == taken
    assert model.generate(LONG, max_tokens=3).rows[0].tokens == known


def test_memory_of_a_prompt_grows_with_the_longest_and_its_run_is_never_captured(
    plans: tuple[ElasticModel, World],
) -> None:
    model, world = plans
    sizes = []
    for tokens in (3, 512, 3, 600, 700, 600):
        model.generate([5] * tokens, max_tokens=1)
        sizes.append(max(len(memory) for memory in world.allocated.values() if not isinstance(memory, str)))
    assert sizes == [64 * most**2 for most in (512, 512, 512, 600, 700, 700)]
    assert "graph" not in world.calls


def test_what_prompts_take_is_counted(plans: tuple[ElasticModel, World]) -> None:
    """For each row, and for the one that is read beside them."""
    model, _ = plans
    entry = model.bundle.manifest.generation
    assert entry is not None
    of_a_token = 2 * 2 * 4 * 3 * 8
    assert session_bytes(entry, 3, 16, 30) - session_bytes(entry, 3, 16) == (3 + 1) * 30 * of_a_token
    with pytest.raises(
        SelectionError, match=r"no submodel generates 40 rows with `memory_mb` <= 1; the smallest takes"
    ):
        model.generate([[5] * 60] * 40, memory_mb=1, max_tokens=2)


def test_too_little_memory_is_one_line_and_a_shorter_prompt_is_read(
    plans: tuple[ElasticModel, World], processor: ElasticModel
) -> None:
    model, world = plans
    asked: dict[str, Any] = {"max_tokens": 9, "logprobs": 0}
    model.generate(SHORT, **asked)
    for free, tokens in ((40_000, 700), (64 * 512**2, 600)):  # for its keys, and for the encoder's activations
        world.free = free
        with pytest.raises(BundleIncompatibleError, match=r"^CUDA: allocating \d+ bytes: out of memory; close other"):
            model.generate([5] * tokens, **asked)
        world.free = 64 * 512**2
        require_same(model.generate(LONG, **asked), processor.generate(LONG, **asked))


def test_what_does_not_fit_is_refused_in_one_line(plans: tuple[ElasticModel, World], folder: Path) -> None:
    model, _ = plans
    with pytest.raises(InputError, match="`max_tokens=50` are more than the 40 tokens of its largest cache"):
        model.generate(SHORT, max_tokens=50)
