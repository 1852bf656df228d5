"""What tests stand on: the export that they share, and assumptions and tools of those on a GPU."""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.graph import make_template
from nestforge.compiler.graph.template import Template
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import trace
from nestforge.exporters.universal import UniversalModel, load_universal
from support import once
from support.gpu_available import WITHOUT_TF32
from support.tiny_compile import BUCKET, save_tiniest, template_of
from torch.onnx._internal.exporter._core import TorchTensor


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The modules that torch exports from now on; nothing is known yet."""
    made: list[torch.nn.Module] = []

    def exported(module: torch.nn.Module, *rest: object) -> object:
        made.append(module)
        return trace(module, *rest)

    (tmp_path / "traces").mkdir()
    monkeypatch.setattr(once, "folder", tmp_path / "traces")
    monkeypatch.setattr(once, "trace", exported)
    return made


def load(folder: Path, **overrides: object) -> UniversalModel:
    return load_universal(open_source(save_tiniest(folder, **overrides)))


def alike(found: Template, expected: Template) -> bool:
    return (found.proto, found.module_outputs) == (expected.proto, expected.module_outputs)


def test_a_known_graph_is_the_one_that_torch_makes(
    tmp_path: Path, exports: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(2, 8, 1, 1)
    first, other = load(tmp_path / "first"), load(tmp_path / "other")
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.mul_(-2)
    found = [template_of(model, bucket) for model in (first, other)]
    assert exports == [first.module]
    monkeypatch.setattr(make_template, "trace", trace)
    with once.tables_anew():
        assert all(alike(one, template_of(model, bucket)) for one, model in zip(found, (first, other), strict=True))


def test_a_copy_has_the_modules_own_weights(tmp_path: Path, exports: list[torch.nn.Module]) -> None:
    first, other = load(tmp_path / "first"), load(tmp_path / "other")
    for model in (first, other):
        traced = make_template.trace(model.module, model.source.signature, BUCKET, 20)
        own = {parameter.data_ptr() for parameter in model.module.parameters()}
        values = [value.const_value for value in traced.model.graph.initializers.values()]
        assert own <= {tensor.raw.data_ptr() for tensor in values if isinstance(tensor, TorchTensor)}
        for value in list(traced.model.graph.initializers.values()):
            value.name = f"changed.{value.name}"  # as a compile does; the next copy has the names of the trace
    assert exports == [first.module]


def test_what_differs_in_more_than_its_weights_is_another(tmp_path: Path) -> None:
    first, wider = load(tmp_path / "first"), load(tmp_path / "wider", intermediate_size=48)
    inputs, keys = first.source.signature.inputs, set()

    def add(model: UniversalModel, bucket: Bucket = BUCKET, opset: int = 20) -> None:
        keys.add(once._key(model.module, inputs, bucket, opset))

    add(first)
    add(wider)
    add(first, bucket=Bucket(1, 8))
    add(first, opset=21)
    first.module.model.embeddings.position_ids += 1  # a buffer
    add(first)
    first.module.model.config.layer_norm_eps = 1e-3
    add(first)
    assert len(keys) == 6


def test_a_class_of_one_test_alone_is_exported_every_time(tmp_path: Path, exports: list[torch.nn.Module]) -> None:
    class Identity(torch.nn.Identity):
        pass

    model = load(tmp_path / "m")
    model.module.model.encoder.add_module("own", Identity())
    template_of(model)
    template_of(model)
    assert len(exports) == 2


@pytest.mark.filterwarnings(WITHOUT_TF32)
def test_inductor_may_say_that_tf32_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does on every GPU from compute capability 8.0 on, whatever is set, and warnings are errors in tests."""
    import torch
    from torch._inductor.compile_fx import _warn_tf32_disabled

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    torch.set_float32_matmul_precision("highest")
    _warn_tf32_disabled.cache_clear()
    _warn_tf32_disabled()
    _warn_tf32_disabled.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="TensorFloat32 tensor cores"):  # else nothing was let through above
            _warn_tf32_disabled()
    _warn_tf32_disabled.cache_clear()


@pytest.fixture(scope="module")
def module() -> ModuleType:
    path = Path(__file__).parents[1] / "gpu/other_gpus.py"
    spec = importlib.util.spec_from_file_location("other_gpus", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
