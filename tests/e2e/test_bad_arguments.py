"""Arguments of a compile that do not fit the model: one clear line that says where and what, and nothing written."""

import resource
from pathlib import Path
from typing import Any

import pytest
import yaml
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines import templates as templates_module
from nestforge.errors import (
    BuildError,
    BundleCorruptError,
    CheckpointError,
    ExportError,
    InputError,
    NestforgeError,
    OutputError,
    PlanError,
    ProfileError,
)
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.device_profile import profile_data
from support.processes import needs_root, nobody
from support.refusals import Case, Damage, arguments, device
from support.tiny_compile import board, template_of


@pytest.fixture(scope="module")
def templates(model: Path) -> dict[Bucket, Any]:
    """Traces are not what is wrong here, so they are made once."""
    universal = load_universal(open_source(model))
    return {bucket: template_of(universal, bucket) for bucket in (Bucket(2, 8), Bucket(1, 1))}


ARGUMENTS: dict[str, tuple[Damage, str]] = {
    "bucket too long": (arguments(buckets=[Bucket(1, 41)]), r"bucket b1-s41: .* takes at most 40 tokens"),
    "bucket too short for text": (
        arguments(buckets=[Bucket(1, 1)]),
        r"text: the tokenizer adds 2 tokens to each, and the largest bucket takes 1; compile with a larger bucket",
    ),
    "unknown include": (arguments(include="everything"), r"include: expected 'budgets' or .*, got str 'everything'$"),
    "damaged tokenizer": (
        lambda c: (c.model / "tokenizer.json").write_text('{"version":\n'),
        r"model/tokenizer.json: not a tokenizer file",
    ),
    "text file too small": (lambda c: c.text(b"one\ntwo\n"), r"text.txt: 2 different texts; .* 200, one per line$"),
}
# All others are PlanError.
ARGUMENTS_ERRORS: dict[str, type[NestforgeError]] = {
    "bucket too long": ExportError,
    "bucket too short for text": InputError,
    "unknown include": InputError,
    "damaged tokenizer": BundleCorruptError,
    "text file too small": CheckpointError,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(case: Case, templates: dict[Bucket, Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(templates_module, "traced_template", lambda _u, _m, _i, bucket, *_: templates[bucket])
    case.refused_by(ARGUMENTS[name], ARGUMENTS_ERRORS.get(name, PlanError))


def test_a_folder_that_is_not_ours_in_the_place_of_the_stage(case: Case) -> None:
    mine = case.output.with_name("out.partial")
    mine.mkdir()
    (mine / "thesis").touch()
    assert "out.partial: not a folder that a compile left" in str(case.refused())
    assert (mine / "thesis").exists()


def test_an_output_below_a_file(case: Case) -> None:
    (case.output.parent / "file").touch()
    case.output = case.output.parent / "file" / "out"
    with pytest.raises(OutputError, match=r"out: cannot be written \(Not a directory\)$"):
        compile_bundle(case.model, case.profile, case.output)


@needs_root
def test_a_folder_that_cannot_be_written(case: Case) -> None:
    with nobody(case.model, case.model / "1_Pooling", case.output.parent):
        refusal = case.refused()
    assert str(refusal) == f"{case.output}: cannot be written (Permission denied)"


@pytest.mark.parametrize("limit", [100, 4_000, 20_000])
def test_a_disk_that_takes_no_more(
    case: Case, templates: dict[Bucket, Any], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The system refuses to write beyond ``limit`` bytes of a file: the key, a graph, the weight store, in turn."""
    monkeypatch.setattr(templates_module, "traced_template", lambda _u, _m, _i, bucket, *_: templates[bucket])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        refusal = case.refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refusal) == f"{case.output}: cannot be written (File too large)"


PROFILES: dict[str, tuple[Damage, str]] = {
    "absurd hexadecimal number": (
        device(yaml.safe_dump(profile_data(board())).replace("cores: 1", f"cores: 0x{'f' * 5000}")),
        r"cores: expected a number below 2\^63, got int",
    ),
    "a backend that is not here": (
        device(backend="tensorrt"),
        r"profile board: plans for TensorRT cannot be built here: .* `emit_only=True` and run `nestforge build`",
    ),
    "graphs alone for a backend that runs them": (
        arguments(emit_only=True),
        r"`emit_only`: profile board is for onnxruntime, which runs graphs as they are; leave it out",
    ),
    "measured on this host for another backend": (
        device(backend="tensorrt", host="0123456789abcdef"),
        r"device.yaml: host: a compile measures on the processor alone, backend is tensorrt",
    ),
    "an opset that TensorRT's parser may not take": (
        lambda c: (c.yaml(backend="tensorrt", opset=21), c.arguments.update(emit_only=True)),
        r"engine \S+: TensorRT 10 cannot build its graph: opset 21: expected 9 to 20$",
    ),
}
# All others are ProfileError.
PROFILES_ERRORS: dict[str, type[NestforgeError]] = {
    "a backend that is not here": BuildError,
    "graphs alone for a backend that runs them": BuildError,
    "an opset that TensorRT's parser may not take": BuildError,
}


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(case: Case, name: str) -> None:
    case.refused_by(PROFILES[name], PROFILES_ERRORS.get(name, ProfileError))
