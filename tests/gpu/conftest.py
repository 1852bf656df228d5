"""Tests that need an NVIDIA GPU: collected everywhere, run by ``make gpu-tests`` where there is one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.runtime.engines.onnxruntime_gpu import session
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider, provider_named
from support.fake_gpu import Gpu, PlayedSession, provider_on
from support.gpu_available import Results, gpu_problem
from support.tiny_compile import board

HERE = Path(__file__).parent
_results = Results()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-results", type=Path, help="Markdown file for the figures of tests/gpu; JSON goes beside it."
    )
    parser.addoption(
        "--gpu-rehearsal", action="store_true", help="Runs tests/gpu on the processor, which plays a GPU, where it can."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == HERE]
    problem = gpu_problem() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        # A test's own time: its fixtures compile models first.
        item.add_marker(pytest.mark.timeout(300, func_only=True))
        rehearsed = config.getoption("--gpu-rehearsal") and item.get_closest_marker("needs_gpu") is None
        if problem and not rehearsed:
            item.add_marker(pytest.mark.skip(reason=problem))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not _results.rows:
        return
    terminalreporter.section("figures")
    for row in _results.rows:
        terminalreporter.line(f"{row['what']}: {row['found']} (wanted: {row['wanted']}; {row['how']})")
    path = config.getoption("--gpu-results", None)
    if path is not None and not config.getoption("--gpu-rehearsal"):
        provider = provider_named("cuda")
        device = provider.take()
        _results.write(path, device)
        device.release()


@pytest.fixture(scope="session")
def results() -> Results:
    """The table that is printed at the end."""
    return _results


@pytest.fixture(scope="session")
def rehearsed(request: pytest.FixtureRequest) -> bool:
    """Whether the processor plays the GPU: models are small then."""
    return bool(request.config.getoption("--gpu-rehearsal"))


@pytest.fixture(scope="session")
def cuda(rehearsed: bool) -> Iterator[Provider]:
    if rehearsed:
        gpu = Gpu()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "GpuSession", type("Session", (PlayedSession,), {"opened": []}))
            yield provider_on(gpu)
        gpu.thread.close()
        return
    provider = provider_named("cuda")
    assert provider is not None
    yield provider


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory, rehearsed: bool) -> Path:
    """An encoder of 4 layers of hidden 1024, FFN 8192, random: 340 MB of weights, nearly all in layers."""
    import torch
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide") / "m"
    shape = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 8192}
    if rehearsed:
        shape |= {"hidden_size": 128, "intermediate_size": 512}
    transformers.BertModel(transformers.BertConfig(vocab_size=1000, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wide(wide_model: Path) -> Bundle:
    """Eight submodels of it at 1x128."""
    profile = board(width_multiple=64, buckets=["1x128"], budgets={"full": {}}, memory_mb=8000)
    eighths = {kind: [number / 8 for number in range(1, 9)] for kind in ("ffn", "heads")}
    return open_bundle(compile_bundle(wide_model, profile, wide_model.with_suffix(".bundle"), levels=eighths))


@pytest.fixture(scope="session")
def leaver_model(tmp_path_factory: pytest.TempPathFactory, rehearsed: bool) -> Path:
    """A multi-exit encoder of 12 layers of hidden 768, FFN 1024, exits after layers 4, 8 and 12; random."""
    from support.cost_eff_models import published, random_weights, save_folder, save_tiny, shapes_of

    folder = tmp_path_factory.mktemp("leaver") / "m"
    if rehearsed:
        return save_tiny(folder, {"max_position_embeddings": 64})
    config, sidecar = published(12, 1024, 128)
    sidecar["exits"]["layers"] = [4, 8, 12]
    # With weights as large as tiny models have, float32 itself is off by more than the gate allows in wide layers.
    weights = {
        name: tensor * (0.1 if tensor.ndim > 1 else 1.0)
        for name, tensor in random_weights(shapes_of(config, sidecar)).items()
    }
    return save_folder(folder, config, sidecar, weights)


@pytest.fixture(scope="session")
def compile_leaver(leaver_model: Path) -> Callable[..., Bundle]:
    """``compile_leaver(**profile)``: its bundle at 1x64, 4x64 and 8x64, of every depth."""
    known: dict[str, Bundle] = {}

    def make(**changes: Any) -> Bundle:
        key = repr(changes)
        if key not in known:
            profile = board(budgets={"full": {}}, memory_mb=8000, **changes)
            path = leaver_model.with_name(f"{len(known)}.bundle")
            buckets = [Bucket(1, 64), Bucket(4, 64), Bucket(8, 64)]
            emit_only = changes.get("backend") == "tensorrt"
            known[key] = open_bundle(
                compile_bundle(
                    leaver_model, profile, path, buckets=buckets, emit_only=emit_only, levels={"depth": [1.0]}
                )
            )
        return known[key]

    return make


@pytest.fixture(scope="session")
def leaver(compile_leaver: Callable[..., Bundle]) -> Bundle:
    return compile_leaver()
