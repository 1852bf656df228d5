"""KV-cache engines, compiled for TensorRT: graphs in its operators, proven in ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nestforge
import onnx
import pytest
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.tensorrt.graphs import unsupported
from nestforge.errors import ParityError
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm

WHOLE, NARROW = "ffn32-heads4", "ffn16-heads3"


def compiled(folder: Path, capacities: Sequence[int] = (16, 600, 1000), **options: Any) -> Bundle:
    device = board(backend="tensorrt", capacities=list(capacities), budgets={"full": {}}, buckets=["1x8"])
    output = folder.with_name("bundle")
    return nestforge.open_bundle(nestforge.compile(folder, device, output, generate=True, emit_only=True, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 600}
    return save_tiny_matlm(tmp_path_factory.mktemp("matlm") / "m", nested_heads=True, **sizes)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    levels = {"ffn": (1.0,), "heads": (1.0,)}
    # More than a run's tokens both, so that they differ in capacity alone.
    return compiled(folder, (520, 600, 1000), submodels=[NARROW], levels=levels, include="budgets")


def test_every_submodel_has_an_engine_of_each_capacity_and_its_receipt(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    found = {engine.id: (engine.capacity, engine.kind.cache_heads) for engine in entry.engines}
    assert found == {
        f"{NARROW}.cached520@b1_64-s1_512": (520, (3,)),
        f"{NARROW}.cached600@b1_64-s1_512": (600, (3,)),
        f"{WHOLE}.cached520@b1_64-s1_512": (520, None),
        f"{WHOLE}.cached600@b1_64-s1_512": (600, None),
    }, "no model has 1000 positions here"
    for engine in entry.engines:
        assert engine.parity.cases[:2] == ("whole", "in pieces")
        assert ("longer than a run" in engine.parity.cases) == ("cached600" in engine.id and engine.submodel == WHOLE)
    assert any("are for TensorRT 10.15 or later" in note for note in bundle.manifest.notes)


def test_the_parser_takes_every_graph(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    for engine in entry.engines:
        model = onnx.load(bundle.file(engine.file), load_external_data=False)
        assert unsupported(model, "10.15") == []
        kinds = {node.op_type for node in model.graph.node}
        assert "TensorScatter" in kinds
        assert {entry.domain for entry in model.opset_import} == {""}
        heads = 4 if engine.kind.cache_heads is None else 3
        caches = [value for value in (*model.graph.input, *model.graph.output) if "_key_" in value.name]
        shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]] for value in caches]
        assert shapes == [[heads, engine.capacity, 8]] * 2


def test_verify_runs_them_again(bundle: Bundle, folder: Path) -> None:
    report = nestforge.verify(bundle.path, folder)
    assert report
    assert [verdict.engine for verdict in report.engines][-1] == f"{WHOLE}.cached600@b1_64-s1_512"


def test_a_mask_that_hides_a_token_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nestforge.compiler.tensorrt import scatter_caches

    real = scatter_caches._mask

    def narrower(edit: Any, last: str, tokens: str, _window: int, capacity: int) -> str:
        return real(edit, last, tokens, 9, capacity)

    monkeypatch.setattr(scatter_caches, "_mask", narrower)
    model = save_tiny_matlm(tmp_path / "m", num_hidden_layers=1, intermediate_size=32)
    with pytest.raises(ParityError, match=r"cached16@b1_64-s1_16: .*first to diverge: layers.0"):
        compiled(model, include="budgets")
    assert not (tmp_path / "bundle").exists()


def test_a_bias_by_distance_is_of_every_place(tmp_path: Path) -> None:
    model = save_tiny_matlm(tmp_path / "m", num_hidden_layers=1, intermediate_size=32, position="relative_bias")
    bundle = compiled(model, include="budgets")
    entry = bundle.manifest.generation
    assert [engine.capacity for engine in entry.engines] == [16, 48]
    for engine in entry.engines:
        graph = onnx.load(bundle.file(engine.file), load_external_data=False)
        assert unsupported(graph, "10.15") == []
