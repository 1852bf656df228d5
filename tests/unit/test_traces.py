"""What tests stand on: the export that they share, and assumptions and tools of those on a GPU."""

import importlib.util
import struct
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
        return trace(module, *rest)  # type: ignore[arg-type]

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


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0, 64, len(payload))
    return (head.ljust(28, b"\1") + struct.pack("<I", arch)).ljust(64, b"\1") + payload


def library(*containers: list[bytes]) -> bytearray:
    """An ELF file with the sections .nv_fatbin and its names."""
    body = b"".join(
        b"\x50\xed\x55\xba\x01\x00" + struct.pack("<HQ", 16, sum(map(len, entries))) + b"".join(entries) + bytes(8)
        for entries in containers
    )
    names = b"\0.nv_fatbin\0.names\0"
    begin = 64
    table = begin + len(body) + len(names)
    sections = [(0, 0, 0), (1, begin, len(body)), (12, begin + len(body), len(names))]
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 40, table)
    struct.pack_into("<HH", header, 60, len(sections), 2)
    rows = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0) for name, at, size in sections)
    return bytearray(header + body + names + rows)


def test_code_of_one_architecture_and_what_is_no_code_stay(module: ModuleType) -> None:
    wanted, other, ptx = b"W" * 80, b"O" * 160, b"P" * 24
    data = library([entry(2, 80, other), entry(2, 90, wanted)], [entry(1, 75, ptx), entry(2, 75, other)])
    before = bytes(data)
    assert module.zero_other_gpus(data, 90) == (len(wanted) + len(ptx), 2 * len(other))
    assert len(data) == len(before)
    assert bytes(data) == before.replace(other, bytes(len(other)))


def test_another_layout_is_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="no machine code for sm_90"):
        module.zero_other_gpus(library([entry(2, 80, b"O" * 16)]), 90)
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        module.zero_other_gpus(bytearray(b"MZ" + bytes(100)), 90)
