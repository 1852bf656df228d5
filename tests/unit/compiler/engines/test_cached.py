"""KV-cache engines, compiled: what they answer, what refuses them, and what the gate finds."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import psutil
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.entries.generation_entry import GenerationEntry
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.engines import cached as cached_module
from nestforge.compiler.engines.cached import judge_generating
from nestforge.compiler.engines.cached_gate import judge_cached
from nestforge.compiler.engines.engine_references import EngineReferences
from nestforge.compiler.parity import references as references_module
from nestforge.compiler.parity.cached_cases import Batch, cached_batches, run_batches
from nestforge.compiler.parity.cases import Case, few
from nestforge.compiler.parity.judge import Replayed
from nestforge.compiler.parity.reference import Reference, replayed
from nestforge.compiler.parity.references import References
from nestforge.errors import CheckpointError, InputError, ParityError
from nestforge.exporters.modules.attention import cached_attention
from nestforge.exporters.parts import CachedSpec
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.engines.residency import Residency
from nestforge.runtime.engines.runner import Runner, runner_for
from nestforge.runtime.generation.cache import Cache, SlidingWindow
from nestforge.runtime.generation.cached_engine import CachedEngine
from safetensors import safe_open
from support.gated_decoders import save_decoder
from support.tiny_matlm import save_tiny_matlm

Found = list[dict[str, np.ndarray]]


def parts(bundle: Bundle, submodel: str = "ffn32") -> tuple[GenerationEntry, EngineEntry, Runner]:
    entry = bundle.manifest.generation
    engine = next(engine for engine in entry.engines if engine.submodel == submodel)
    return entry, engine, runner_for(bundle, engine, "packed", threads=1)


def test_every_submodel_has_an_engine_and_its_receipt(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    assert [engine.submodel for engine in entry.engines] == [submodel.id for submodel in bundle.manifest.submodels]
    assert {"ffn8x1_24x1", "ffn32"} <= {engine.submodel for engine in entry.engines}
    assert (entry.vocabulary, entry.positions, len(entry.layers)) == (48, 2**20, 2)
    for engine in entry.engines:
        assert engine.id == f"{engine.submodel}.cached@b1_64-s1_512"
        assert engine.emitted == "sliced"
        assert engine.parity.cases[:2] == ("whole", "in pieces")
        assert ("longer than a run" in engine.parity.cases) == (engine.submodel == "ffn32")
        assert [output.name for output in engine.parity.outputs][:3] == ["logits", "key_0", "value_0"]
    assert not any(engine.segment for engine in bundle.manifest.engines), "other engines are as they were"


def test_norms_and_positions_are_single_operators(bundle: Bundle) -> None:
    _, engine, _ = parts(bundle)
    graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["SimplifiedLayerNormalization"] + kinds["SkipSimplifiedLayerNormalization"] == 9, "4 a layer, 1 behind"
    assert kinds["RotaryEmbedding"] == 2 * kinds["GroupQueryAttention"] == 4
    assert not kinds.keys() & {"Neg", "ReduceMean", "Reciprocal"}


def test_verify_runs_them_again(bundle: Bundle, folder: Path) -> None:
    report = nestforge.verify(bundle.path, folder)
    assert report
    assert [verdict.engine for verdict in report.engines][-1] == "ffn32.cached@b1_64-s1_512"


def test_an_engine_continues_a_text_as_transformers_does(bundle: Bundle, folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = np.random.default_rng(5).integers(0, 48, 20)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    entry, engine, runner = parts(bundle)
    with runner:
        cached = CachedEngine(runner, engine, entry, Cache.empty(entry.layers, rows=1, capacity=32))
        behind = [cached.extend(0, ids[:9], 0, [3, 8])]
        behind += [cached.step([ids[at]], [at]).copy() for at in (9, 10)]
        behind += [cached.extend(0, ids[11:], 11, [])]
        last = cached.step([ids[19]], [19])
    np.testing.assert_allclose(np.concatenate(behind), expected[[3, 8, 9, 10]], atol=2e-5)
    np.testing.assert_allclose(last, expected[[19]], atol=2e-5)


def test_a_step_takes_no_memory_for_the_capacity(bundle: Bundle) -> None:
    entry, engine, runner = parts(bundle)
    with runner:
        cache = Cache.empty(entry.layers, rows=1, capacity=2**20)
        cached = CachedEngine(runner, engine, entry, cache)
        cached.extend(0, [1, 2, 3], 0, [])
        before = psutil.Process().memory_info().rss
        for position in range(3, 10):
            cached.step([5], [position])
        grown = psutil.Process().memory_info().rss - before
    assert cache.bytes > 2**27
    assert grown < cache.bytes / 16, "neither read nor copied as far as nothing is written"
    assert cache.tensors[0][0, :, 9].any()
    assert not cache.tensors[0][0, :, 10:100].any()


def test_what_an_engine_has_no_room_for_is_refused(bundle: Bundle) -> None:
    entry, engine, runner = parts(bundle)
    with runner:
        with pytest.raises(InputError, match="65 rows at once; expected at most 64"):
            CachedEngine(runner, engine, entry, Cache.empty(entry.layers, rows=65, capacity=4))
        cached = CachedEngine(runner, engine, entry, Cache.empty(entry.layers, rows=2, capacity=4))
        with pytest.raises(InputError, match="5 tokens, the cache has room for 4"):
            cached.extend(1, [1, 2, 3], 2, [2])
        with pytest.raises(InputError, match="5 tokens, the cache has room for 4"):
            cached.step([1, 1], [0, 4])


def answered(bundle: Bundle, references: References) -> tuple[CachedSpec, EngineEntry, list[Batch], Found]:
    form = references.universal.source.cached
    entry, engine, runner = parts(bundle)
    batches = cached_batches(form.entry, long=False)
    with runner:
        found = [dict(arrays) for arrays in run_batches(runner, engine, entry, batches)]
    return form, engine, batches, found


def swapped(found: Found) -> None:
    found[2]["logits"][0, [20, 21]] = found[2]["logits"][0, [21, 20]]


def stretched(found: Found) -> None:
    found[1]["key_1"] *= 1.001


def misplaced(found: Found) -> None:
    found[4]["value_0"] = np.roll(found[4]["value_0"], 1, axis=2)


@pytest.mark.parametrize("fault", [swapped, stretched, misplaced])
def test_the_gate_finds(bundle: Bundle, references: References, fault: Callable[[Found], None]) -> None:
    form, engine, batches, found = answered(bundle, references)
    assert judge_cached(references, form, engine, batches, found).broken is None
    fault(found)
    assert judge_cached(references, form, engine, batches, found).broken is not None


def test_texts_are_passed_once_and_a_compile_verifies_what_it_wrote_on_a_few(
    bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[list[str]] = []

    def counted(reference: Reference, cases: Sequence[Case], **options: Any) -> Replayed:
        passed.append([case.name for case in cases])
        return replayed(reference, cases, **options)

    monkeypatch.setattr(references_module, "replayed", counted)
    of_model = References(load_universal(replace(open_source(folder), generates=True)), {})
    references = EngineReferences(of_model)
    _, engine, _ = parts(bundle)
    (every,) = judge_generating(bundle, references, engine)
    (some,) = judge_generating(bundle, references.on(few), engine)
    names, fewer = ([case.name for case in judged.cases] for judged in (every, some))
    assert fewer == ["row 0 of 3", "row 1 of 3", "row 2 of 3"]
    assert passed == [names]
    assert every.verdict.broken is some.verdict.broken is None
    _, other, _ = parts(bundle, "ffn8x1_24x1")
    list(judge_generating(bundle, references, other))
    assert passed[1:] == [names[:-1]], "another submodel has its own pass"


def test_a_large_model_is_asked_short_texts_its_narrower_widths_two_kinds_and_what_is_written_as_the_gate_ran_it(
    bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(bundle: Bundle, engine: EngineEntry, residency: Residency, *rest: Any) -> Runner:
        opened.append(residency)
        return runner_for(bundle, engine, residency, *rest)

    monkeypatch.setattr("nestforge.exporters.source.LARGE", 0)
    monkeypatch.setattr(cached_module, "runner_for", counted)
    of_model = References(load_universal(replace(open_source(folder), generates=True)), {}, looks=True)
    references = EngineReferences(of_model, tmp_path)
    engines = [parts(bundle, name)[1] for name in ("ffn32", "ffn8x1_24x1")]
    whole, narrower = (judged for engine in engines for judged in judge_generating(bundle, references, engine))
    tokens = {case.name: case.feeds["input_ids"].shape[1] for case in whole.cases}
    assert (tokens.pop("longer than a run"), tokens.pop("longer than the window")) == (521, 27)
    assert tokens == {"whole": 16, "in pieces": 16, "token by token": 16} | {
        f"row {number} of 3": size for number, size in enumerate((16, 7, 5))
    }
    assert [(case.name, case.tokens) for case in narrower.cases] == [
        ("in pieces", 12),
        *((f"row {number} of 3", size) for number, size in enumerate((12, 5, 4))),
    ]
    assert {"whole", "in pieces", "row 0 of 3"} <= whole.verdict.in_float32
    assert "row 2 of 3" not in whole.verdict.in_float32, "the smallest is in float64"
    (again,) = judge_generating(bundle, references.on(few), engines[1])
    assert [case.name for case in again.cases] == ["row 2 of 3"]
    assert not any(judged.verdict.broken for judged in (whole, narrower, again))
    assert opened == ["packed", "packed", "shared"]


def test_the_gate_finds_a_window_that_loses_a_token(
    bundle: Bundle, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: SlidingWindow, position: int) -> int:
        return max(0, position - self.seen + 2)

    monkeypatch.setattr(SlidingWindow, "_first_seen", late)
    form, engine, batches, found = answered(bundle, references)
    verdict = judge_cached(references, form, engine, batches, found)
    assert {"in pieces", "token by token", "row 0 of 3"} <= verdict.broken_cases
    assert "whole" not in verdict.broken_cases


def compiled(folder: Path, **options: Any) -> Path:
    output = folder.parent / f"{folder.name}.bundle"
    common = {"measure": False, "include": "budgets", "buckets": [Bucket(1, 8)], "generate": True}
    return nestforge.compile(folder, "raspberry-pi-5", output, **{**common, **options})


def test_attention_of_another_scale_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nestforge.exporters.hugging_face import generating

    def wrong(query: Any, new: Any, past: Any, places: Any, scale: float, *rest: Any) -> Any:
        return cached_attention(query, new, past, places, 1.02 * scale, *rest)

    monkeypatch.setattr(generating, "cached_attention", wrong)
    folder = save_decoder(tmp_path / "llama", num_hidden_layers=1, head_dim=8, max_position_embeddings=38)
    with pytest.raises(ParityError, match=r"cached@b1_64-s1_38: .*first to diverge: model.layers.0.self_attn"):
        compiled(folder)
    assert not (tmp_path / "llama.bundle").exists()


def test_a_window_of_one_token_more_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is longer than the texts that every submodel gets."""
    from nestforge.exporters.hugging_face import generating

    def wrong(*given: Any) -> Any:
        *others, window, bias = given
        return cached_attention(*others, window + 1, bias)

    monkeypatch.setattr(generating, "cached_attention", wrong)
    short = {"num_hidden_layers": 1, "head_dim": 8, "sliding_window": 60, "max_position_embeddings": 90}
    folder = save_decoder(tmp_path / "mistral", "mistral", **short)
    with pytest.raises(ParityError, match=r"case longer than the window: .*first to diverge: model.layers.0.self_attn"):
        compiled(folder)


def test_integers_are_proven_with_and_without_the_rounding_of_activations(tmp_path: Path) -> None:
    folder = save_tiny_matlm(tmp_path / "matlm", num_hidden_layers=1)
    entry = nestforge.open_bundle(compiled(folder, precisions=["int4"])).manifest.generation
    for engine in entry.engines:
        assert engine.precision == "int4"
        assert "; without the rounding of activations, " in engine.parity.rule


def test_a_table_that_is_the_head_too_has_four_bits_in_both_places(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 38}
    folder = save_decoder(tmp_path / "gemma", "gemma", **sizes)
    bundle = nestforge.open_bundle(compiled(folder, precisions=["int4"]))  # proven to be those numbers in both
    _, engine, _ = parts(bundle)
    graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
    table = {tensor.name: list(tensor.dims) for tensor in graph.initializer if "embed_tokens" in tensor.name}
    assert table == {"model.embed_tokens.weight.int4": [48, 1, 16], "model.embed_tokens.weight.int4-scale": [48, 1]}
    kinds = Counter(node.op_type for node in graph.node)
    assert (kinds["MatMulNBits"], kinds["MatMulIntegerToFloat"], kinds["QGemm"]) == (5, 1, 0)
    assert not kinds.keys() & {"Flatten", "RotaryEmbedding", "Cos", "Range"}, "attention turns, by a table"


def test_weights_are_as_they_were_where_no_submodel_is_narrower(tmp_path: Path) -> None:
    """Products whose inputs would shrink have 4 bits then, and nothing is ranked."""
    folder = save_tiny_matlm(tmp_path / "matlm", num_hidden_layers=1)
    path = compiled(folder, precisions=["int4"], levels={"ffn": (1.0,)})
    bundle = nestforge.open_bundle(path)
    assert bundle.manifest.provenance.options.whole_along == ("layers.0.ffn",)
    assert bundle.manifest.ranking.method == "none"
    with safe_open(bundle.file("weights.safetensors"), framework="np") as file:
        names = set(file.keys())
    assert "layers.0.ffn.down.weight.int4" in names
    assert not any(".T" in name for name in names)
    verified = nestforge.verify(path, against=folder)
    assert verified.engines
    assert verified


def test_rows_stay_whole_from_product_to_product(bundle: Bundle) -> None:
    _, engine, _ = parts(bundle)
    nodes = onnx.load(bundle.file(engine.file), load_external_data=False).graph.node
    kinds = Counter(node.op_type for node in nodes)
    assert kinds["FusedMatMul"] > 0
    assert (kinds["Flatten"], kinds["Gemm"]) == (2, 0), "of cosines and sines"


def test_activations_are_those_of_the_longest_run_without_its_logits(bundle: Bundle) -> None:
    _, engine, _ = parts(bundle)
    hidden, ffn, heads, head_dim, tokens = 16, 32, 4, 8, 512
    product = 4 * tokens * max(hidden + ffn, hidden + heads * head_dim)
    scores = 4 * (2 * tokens * heads * head_dim + heads * tokens**2)
    assert engine.activation_bytes == 8 * product + scores


def test_a_bundle_says_how_its_folder_generates(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    assert (entry.end_ids, entry.sampling) == ((2, 5), {"temperature": 0.5, "top_k": 50})
    assert entry.chat_template is not None
    assert bundle.file(entry.chat_template).read_text().startswith("{{ bos_token }}")
    assert entry.special_tokens == {"bos_token": "<s>"}
    assert "generation does not follow num_beams, which the model's folder states" in bundle.manifest.notes
    (beyond,) = [note for note in bundle.manifest.notes if "eos_token_id" in note]
    assert beyond.startswith("the model's folder states eos_token_id 50256, beyond its vocabulary of ")


def test_verify_compares_how_the_folder_generates(bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / folder.name)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    with pytest.raises(CheckpointError, match="its settings of generation are not those of"):
        nestforge.verify(bundle.path, other)
    shutil.copy(folder / "generation_config.json", other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match="its settings of generation are not those of"):
        nestforge.verify(bundle.path, other)
