"""Requests to a model that generates, and the lines that refuse the others."""

from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError, NestforgeError, SelectionError
from nestforge.runtime.generation.generator import Generator
from nestforge.runtime.generation.options import GenerationRequest
from nestforge.runtime.generation.prompts import Prompts
from nestforge.runtime.generation.sampling import Sampling
from nestforge.runtime.generation.text_stream import Stops
from nestforge.runtime.inputs.text import TextEncoder
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_gpu import HostDevice, host_provider
from support.sealing import edit_manifest

GOLDEN = Path(__file__).parents[3] / "golden"
CHAT = [{"role": "user", "content": "class method"}]


def test_a_prompt_is_a_text_or_its_tokens(model: ElasticModel) -> None:
    text = "class method"
    rows = model.generate([text, "the"], max_tokens=5).rows
    ids = model.generate.tokens(text)
    for same in (text, ids, np.array(ids), [text], [ids], np.array([ids])):
        generated = model.generate(same, max_tokens=5)
        assert len(generated.rows) == 1
        assert (generated.text, generated.rows[0].tokens) == (rows[0].text, rows[0].tokens)


def test_what_is_not_asked_for_is_as_the_model_has_it(model: ElasticModel) -> None:
    assert isinstance(model.generate, Generator)
    own = {"temperature": 0.7, "top_k": 50.0}
    assert GenerationRequest().sampling({}) == Sampling()
    assert GenerationRequest().sampling(own) == Sampling(temperature=0.7, top_k=50)
    with pytest.raises(InputError, match=r"^top_k: expected a whole number"):
        GenerationRequest().sampling({"top_k": float("nan")})
    assert GenerationRequest(temperature=0, seed=3).sampling(own) == Sampling(temperature=0, top_k=50, seed=3)
    assert GenerationRequest(stop=["end", 7]).stops_beside([2]) == Stops(frozenset([2, 7]), ("end",))


@pytest.mark.parametrize(
    ("prompt", "options", "line"),
    [
        ("", {}, "prompt 0: empty; there is nothing to continue"),
        ([], {}, "prompt: empty; there is nothing to continue"),
        ([[5], []], {}, "prompt 1: empty; there is nothing to continue"),
        (None, {}, "generate: expected either a prompt or messages"),
        ("text", {"messages": CHAT}, "generate: expected either a prompt or messages"),
        ("\ud800", {}, "text 0: half of a surrogate pair, which is no character"),
        ([5, 512], {}, "prompt 0: token 1 is 512; expected a whole number from 0 to 511, the vocabulary"),
        ([[5], [-1]], {}, "prompt 1: token 0 is -1; expected a whole number from 0 to 511, the vocabulary"),
        ([[5, 0.5]], {}, "prompt 0: token 1 is 0.5; expected a whole number from 0 to 511, the vocabulary"),
        (np.array(5), {}, "prompt: expected a text, token ids, or a list of them, got 5"),
        (np.zeros((0, 5), int), {}, "prompt: empty; there is nothing to continue"),
        (7, {}, "prompt: expected a text, token ids, or a list of them, got 7"),
        ([5], {"max_token": 3}, "no option 'max_token'; did you mean 'max_tokens'?"),
        ([5], {"max_tokens": 0}, "max_tokens: expected a whole number, 1 or above, got 0"),
        ([5], {"logprobs": 101}, "logprobs: expected a whole number from 0 to 100, got 101"),
        ([5], {"stop": 3.5}, "stop: expected str, int or a list of str or int, got float 3.5"),
        ([5], {"stop": b"end"}, "stop: expected str, int or a list of str or int, got bytes b'end'"),
        ([5], {"stop": [600, 512]}, "stop: token id 512; expected one below 512, the vocabulary of this model"),
        ([5], {"temperature": -1}, "temperature: expected a number, 0 or above, got -1"),
        (
            [5] * 9,
            {"max_tokens": 248},
            "prompt: 9 tokens and `max_tokens=248` are more than the 256 positions of this model; shorten the prompt "
            "or ask for fewer tokens",
        ),
        (
            [5] * 9,
            {"capacity": 8},
            "prompt: 9 tokens and `max_tokens=1` are more than the capacity of 8; shorten the prompt or ask for fewer "
            "tokens",
        ),
        ([5], {"capacity": 257}, "capacity: expected at most 256, the positions of this model, got 257"),
        ([[5]] * 65, {}, "rows: expected at most 64, which the engines take at once, got 65"),
    ],
)
def test_what_does_not_fit_is_refused(model: ElasticModel, prompt: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as raised:
        model.generate(prompt, **options)
    assert str(raised.value) == line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"budget": "fastest"}, "no budget 'fastest' in this bundle"),
        ({"submodel": "ffn7"}, "no submodel 'ffn7' in this bundle"),
        ({"submodel": "S", "budget": "fast"}, "generate with budget, submodel: expected a budget, or a submodel, or"),
        ({"submodel": "S", "deadline_ms": 5}, "generate with submodel, deadline_ms: expected a budget, or a submodel"),
        ({"memory_mb": 1e-3}, "no submodel generates 1 rows with `memory_mb` <= 0.001; the smallest takes "),
        ({"tokens_per_second": 5, "deadline_ms": 5}, "expected at most one of `tokens_per_second` and `deadline_ms`"),
    ],
)
def test_submodels_that_cannot_be_are_refused(model: ElasticModel, options: dict[str, Any], line: str) -> None:
    with pytest.raises(SelectionError) as raised:
        model.generate([5], **options)
    assert str(raised.value).startswith(line)


def test_who_writes_is_asked_as_in_a_call(model: ElasticModel) -> None:
    row = model.generate([5], max_tokens=3).rows[0]
    assert [(run.submodel, run.tokens) for run in row.runs] == [("ffn32", 3)]
    row = model.generate([5], max_tokens=3, submodel="S").rows[0]
    assert [(run.submodel, run.reason) for run in row.runs] == [("ffn8", "submodel S requested")]
    budget = model.bundle.manifest.budgets[0]
    row = model.generate([5], max_tokens=3, budget=budget.name).rows[0]
    assert [run.submodel for run in row.runs] == [budget.submodel]
    # Less than the large one with its cache, more than the small one.
    assert model.bundle.manifest.generation
    needs = {
        engine.submodel: (engine.weight_bytes or 0) + engine.private_bytes + engine.activation_bytes
        for engine in model.bundle.manifest.generation.engines
    }
    limit = (needs["ffn32"] + model.session(capacity=64).bytes - 1) / 1e6
    assert model.generate([5], max_tokens=3, memory_mb=limit).rows[0].runs[0].submodel == "ffn24"


def test_a_promise_lets_several_write(model: ElasticModel) -> None:
    row = model.generate([5], max_tokens=200, tokens_per_second=1e9).rows[0]
    assert [run.submodel for run in row.runs] == ["ffn32", "ffn8"]
    assert row.runs[0].tokens == 1  # the prompt's
    assert sum(run.tokens for run in row.runs) == len(row.tokens)


def test_nothing_that_generates_is_open_before_it_is_asked(llama_bundle: Path) -> None:
    with load(llama_bundle, preload=True, threads=1) as model:
        assert not any(".cached" in engine for engine in model.residencies)
        assert model.generate.open_submodels == ()
        model.generate([5], max_tokens=2, submodel="ffn16")
        assert model.generate.open_submodels == ("ffn16",)


def test_a_bundle_without_such_engines_says_what_to_do() -> None:
    with (
        load(GOLDEN / "bundle-exits") as model,
        pytest.raises(InputError, match=r"no engines that generate; compile"),
    ):
        model.generate("text")


def test_a_model_without_a_template_cannot_chat(llama_bundle: Path, tmp_path: Path) -> None:
    silent = Path(copytree(llama_bundle, tmp_path / "silent"))
    edit_manifest(silent, lambda data: data["generation"].update(chat_template=None))
    line = r"its model has no chat template; write the chat as a prompt"
    with load(silent, threads=1) as model:
        with pytest.raises(InputError, match=line):
            model.generate(messages=[{"role": "user", "content": "hello"}])
        with pytest.raises(InputError, match=line):
            model.generate.require_chats()


def test_mapped_engines_do_not_generate(llama_bundle: Path) -> None:
    with load(llama_bundle, residency="mapped") as model, pytest.raises(InputError, match=r"not mapped; load them so$"):
        model.generate([5])


def test_a_provider_for_gpus_does_not_generate_with_caches_of_any_size(model: ElasticModel) -> None:
    provider = host_provider(HostDevice())
    generate = Generator(model.bundle, lambda: pytest.fail("no tokenizer is needed"), threads=1, provider=provider)
    with pytest.raises(InputError, match=r"for backend tensorrt, whose graphs it takes, or provider cpu$"):
        generate([5])


def test_a_closed_model_generates_no_more(llama_bundle: Path) -> None:
    with load(llama_bundle, threads=1) as model:
        model.generate([5], max_tokens=2)
    with pytest.raises(NestforgeError, match="the model is closed"):
        model.generate([5], max_tokens=2)


def test_a_cache_that_the_host_has_no_memory_for_is_refused_and_not_counted(
    llama_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(llama_bundle, threads=1, memory_mb=50) as model:

        def none(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("nestforge.runtime.generation.session.Cache.empty", none)
            for _ in range(3):
                with pytest.raises(SelectionError, match=r"^a cache of 0.9 MB: this host has no memory for it"):
                    model.session(rows=12)
        assert model.session(rows=12).rows == 12


def test_a_chat_is_rendered_and_encoded_as_it_is(llama_bundle: Path) -> None:
    bundle = open_bundle(llama_bundle)
    manifest = bundle.manifest
    assert manifest.generation
    assert manifest.text
    encoder = TextEncoder(bundle.path / manifest.text.file, manifest.text, manifest.inputs)
    (ids,) = Prompts(bundle, manifest.generation, lambda: encoder).tokens(None, CHAT)
    text = "<|im_start|>user\nclass method<|im_end|>\n<|im_start|>assistant\n"
    assert ids.tolist() == encoder.ids(text, add_special_tokens=False)
