from __future__ import annotations

from pathlib import Path

from nestforge.bucket import Bucket
from nestforge.compiler.job import plan
from nestforge.compiler.model_view import view_model
from nestforge.exporters.source import open_source
from nestforge.profiles.compile_request import CompileRequest
from nestforge.runtime.summary import CacheSize
from nestforge.workload import macs
from support.gated_decoders import save_decoder
from support.tiny_compile import board


def test_levels_are_those_that_a_plan_counts(tiny_folder: Path) -> None:
    levels, device = {"ffn": (0.5, 1.0)}, board(budgets={"full": {}})
    view = view_model(CompileRequest(tiny_folder, device, levels=levels, buckets=[Bucket(2, 8)]))
    made = plan(tiny_folder, device, levels=levels, buckets=[Bucket(2, 8)])
    source = open_source(tiny_folder)
    candidates = {candidate.id: candidate for candidate in made.candidates}
    assert [level.submodel for level in view.levels] == ["ffn32-heads4", "ffn64-heads4"]
    for level in view.levels:
        planned, submodel = candidates[level.submodel], source.spec.parse(level.submodel)
        assert (level.parameters, level.weight_bytes) == (planned.parameters, planned.weight_bytes)
        assert (level.non_embedding, level.ffn) == (planned.non_embedding_parameters, planned.ffn_parameters)
        assert level.flops == {"b2-s8": planned.costs[0].flops}
        assert level.macs == {"b2-s8": macs(source.workload(submodel, Bucket(2, 8)))}
    assert (view.kind, view.folder, view.profile, view.variants) == ("model", str(tiny_folder), "board", ())
    assert (view.axes, view.width_multiple, view.precisions) == (source.spec.axes, 8, ("fp32",))


def test_the_bytes_of_a_cache_are_those_that_its_engines_take(tmp_path: Path, tiny_folder: Path) -> None:
    sizes = {"head_dim": 8, "max_position_embeddings": 4096, "sliding_window": 512}
    folder, token = save_decoder(tmp_path / "m", "gemma2", **sizes), 4 * 2 * 2 * 8

    def seen(**changes: object) -> tuple[CacheSize, ...]:
        return view_model(CompileRequest(folder, board(**changes), buckets=[Bucket(1, 8)])).cache

    behind_a_window = (CacheSize(2048, token * (1024 + 2048)), CacheSize(4096, token * (1024 + 4096)))
    assert seen() == behind_a_window
    whole = (CacheSize(64, token * 2 * 64), CacheSize(4096, token * 2 * 4096))
    assert seen(backend="tensorrt", capacities=[64, 5000]) == whole
    assert view_model(CompileRequest(tiny_folder, board())).cache == (), "no language model"
