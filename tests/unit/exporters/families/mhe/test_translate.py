"""Translation models through the whole compiler: both sides sliced, every role in a form of its own, and generating."""

from pathlib import Path
from typing import Any

import nestforge
import onnx
import pytest
import torch
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.tensorrt.graphs import accepted
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import ParityError
from nestforge.exporters.families.mhe import attention as folds
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from support.tiny_compile import board
from support.tiny_mhe import save_tiny_pair

WHOLE, NARROW = "ffn48-heads4-cross_heads4", "ffn48-heads3-cross_heads2"
# Each role in another form than engines that generate have there.
FORMS = {"encoder_attention": "literal", "decoder_attention": "expanded", "cross_attention": "expanded_queries"}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
# Two logits nearer than this are a tie (decision 0028).
TIE = 1e-4


def compile_pair(folder: Path, submodels: list[str], **changes: Any) -> Bundle:
    """The bundle ``b`` beside the model ``m``."""
    device = board(**{"budgets": {"full": {}}, "buckets": ["2x8"], **changes})
    levels = {"ffn": (1.0,), "heads": (1.0,), "cross_heads": (1.0,)}
    options: dict[str, Any] = {"submodels": submodels, "levels": levels, "measure": False}
    return open_bundle(nestforge.compile(folder / "m", device, folder / "b", generate=True, **options))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_pair(folder / "m", attention="mhe_mul", nested=True)
    return compile_pair(folder, [NARROW], variants=FORMS)


def test_every_engine_is_a_slice_in_its_form(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    assert {engine.submodel for engine in bundle.manifest.engines} == {WHOLE, NARROW}
    for engine in bundle.manifest.engines:
        assert (engine.variants, engine.emitted) == (FORMS, "sliced")
        accepted(engine.file, bundle.file(engine.file).read_bytes())  # by TensorRT's parser
    assert len(entry.every_engine) == 4
    for engine in entry.every_engine:
        assert (engine.emitted, engine.parity is None) == ("sliced", False)
        assert engine.private_bytes < 1000, "no table of heads outside the store"


def test_heads_share_one_cache_and_one_reading_of_the_prompt(bundle: Bundle) -> None:
    """``2 d`` numbers for each token, layer and text (section 6.8), and no product with the prompt's weights later."""
    entry = bundle.manifest.generation
    assert [(layer.heads, layer.size) for layer in entry.layers] == [(1, 8)]
    for engine in entry.engines:
        graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
        read = {tensor.name.partition("cross_attention.")[2] for tensor in graph.initializer}
        assert not read & {"key.weight", "value.weight", "folded.key", "embedding.key"}
    for engine in entry.encoder.engines:
        graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
        shapes = {output.name: [dim.dim_value for dim in output.type.tensor_type.shape.dim] for output in graph.output}
        assert {name: shape[1] for name, shape in shapes.items()} == {"source_key_0": 1, "source_value_0": 1}


def test_text_is_what_the_model_writes(bundle: Bundle) -> None:
    """Greedily, against passes of the module over both texts: each token is the likeliest, or tied with it."""
    model = load_model(bundle.path.with_name("m"))
    with nestforge.load(bundle.path) as served:
        rows = served.generate(PROMPTS, max_tokens=12, submodel=WHOLE, stop=[]).rows
        alone = served.generate(PROMPTS[2], max_tokens=12, submodel=WHOLE, stop=[]).rows[0]
    assert rows[2].tokens == alone.tokens
    assert len({token for row in rows for token in row.tokens}) > 5, "texts that repeat themselves would prove little"
    for prompt, row in zip(PROMPTS, rows, strict=True):
        read, written = torch.tensor([prompt]), torch.tensor([[1, *row.tokens]])
        logits = model(read, torch.ones_like(read), written)[0, :-1]
        chosen = logits[range(12), list(row.tokens)]
        assert (logits.amax(-1) - chosen).max() < TIE


def test_fewer_heads_of_either_attention_draft_on_the_same_cache(bundle: Bundle) -> None:
    with nestforge.load(bundle.path) as served:
        plain = served.generate(PROMPTS[0], max_tokens=9, submodel=WHOLE, stop=[]).rows[0]
        drafted = served.generate(PROMPTS[0], max_tokens=9, submodel=WHOLE, stop=[], draft=NARROW, drafted=3).rows[0]
        fast = served.generate(PROMPTS[0], max_tokens=9, stop=[], tokens_per_second=1e9).rows[0]
    assert drafted.tokens == plain.tokens
    assert [(each.draft, each.drafted > 0) for each in drafted.drafts] == [(NARROW, True)]
    assert [run.submodel for run in fast.runs] == [WHOLE, NARROW]


def test_verify_runs_all_of_it_again(bundle: Bundle) -> None:
    assert verify_bundle(bundle.path, against=bundle.path.with_name("m"))


def test_a_wrong_fold_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's engine is held against the encoder as it is written, not against its own form."""
    factors = folds._factors
    monkeypatch.setattr(folds, "_factors", lambda attention, role: factors(attention, role) * 1.001)
    save_tiny_pair(tmp_path / "m")
    variants = dict.fromkeys(FORMS, "literal")
    with pytest.raises(ParityError, match=rf"^engine {WHOLE}\.encoder@\S+: .*first to diverge: encoder\.layers\.0"):
        compile_pair(tmp_path, [], variants=variants)
    assert not (tmp_path / "b").exists()


def test_integers_are_proven_in_their_form_and_as_written(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"attention": "mhe_add", "num_attention_heads": 3, "head_dim": 16, "intermediate_size": 64}
    save_tiny_pair(tmp_path / "m", **shape)
    entry = compile_pair(tmp_path, [], precision=["int8-dynamic"]).manifest.generation
    for engine in entry.every_engine:
        assert (engine.precision, engine.emitted) == ("int8-dynamic", "sliced")
        assert "; without the rounding of activations, " in engine.parity.rule


@pytest.mark.parametrize(("kind", "heads"), [("mha", 4), ("sha", 1)])
def test_kinds_without_head_embeddings(tmp_path: Path, kind: str, heads: int) -> None:
    """Where heads keep keys of their own, the decoder's stay as many as there are."""
    model, narrow = save_tiny_pair(tmp_path / "m", attention=kind), "ffn48-heads3" if kind == "mha" else "ffn24"
    levels = dict.fromkeys(open_source(model).spec.kinds, (1.0,))
    device = board(budgets={"full": {}}, buckets=["1x8"])
    options: dict[str, Any] = {"submodels": [narrow], "levels": levels, "measure": False, "generate": True}
    entry = open_bundle(nestforge.compile(model, device, tmp_path / "b", **options)).manifest.generation
    assert [layer.heads for layer in entry.layers] == [heads]
    assert len(entry.every_engine) == 4
    assert {engine.emitted for engine in entry.every_engine} == {"sliced"}
