"""Device profiles that make no sense: one clear line that says where and what, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import yaml
from nestforge.errors import BuildError, NestforgeError, PlanError, ProfileError
from nestforge.profiles.device_profile import profile_data
from support.refused_compile import Case
from support.tiny_compile import board

PROFILES: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "unknown name": (
        lambda c: setattr(c, "profile", "raspbery-pi-5"),
        ProfileError,
        r"'raspbery-pi-5': neither a file nor a built-in profile; did you mean 'raspberry-pi-5'",
    ),
    "a folder": (lambda c: setattr(c, "profile", c.inputs), ProfileError, r"neither a file nor a built-in profile"),
    "no YAML": (lambda c: c.yaml("a: [1"), ProfileError, r"device.yaml: not a readable YAML file \(line \d, column \d"),
    "no mapping": (lambda c: c.yaml("- 1"), ProfileError, r"device.yaml: expected a mapping, got a list"),
    "empty": (lambda c: c.yaml(""), ProfileError, r"device.yaml: expected a mapping, got nothing"),
    "unknown key": (
        lambda c: c.yaml(memmory_mb=5),
        ProfileError,
        r"unknown key 'memmory_mb'; did you mean 'memory_mb'\?",
    ),
    "missing key": (lambda c: c.yaml(cores=...), ProfileError, r"device.yaml: missing key 'cores'"),
    "wrong type": (lambda c: c.yaml(cores="four"), ProfileError, r"cores: expected a whole number, got str 'four'"),
    "width multiple that is a float": (
        lambda c: c.yaml(width_multiple=8.0),
        ProfileError,
        r"width_multiple: got 8.0; expected one of 16, 64, 8|width_multiple: got 8.0; did you mean '8'",
    ),
    "opset that is a float": (lambda c: c.yaml(opset=20.0), ProfileError, r"opset: got 20.0; "),
    "absurd number": (
        lambda c: c.yaml(memory_mb=10**400),
        ProfileError,
        r"memory_mb: expected a number below 2\^63, got int of 1329 bits",
    ),
    "absurd hexadecimal number": (
        lambda c: c.yaml(yaml.safe_dump(profile_data(board())).replace("cores: 1", f"cores: 0x{'f' * 5000}")),
        ProfileError,
        r"cores: expected a number below 2\^63, got int of 20000 bits",
    ),
    "no buckets": (lambda c: c.yaml(buckets=[]), ProfileError, r"buckets: expected a list such as \[1x32, 1x128\]"),
    "broken bucket": (
        lambda c: c.yaml(buckets=["1x0"]),
        ProfileError,
        r"buckets: bucket '1x0': expected BATCHxSEQUENCE",
    ),
    "no budgets": (lambda c: c.yaml(budgets={}), ProfileError, r"budgets: expected at least one"),
    "broken share": (
        lambda c: c.yaml(budgets={"half": {"flops": "half"}}),
        ProfileError,
        r'budgets.half: flops: expected a positive number, such as 94.4M, or a share such as "50 %", got \'half\'',
    ),
    "a backend that is not here": (
        lambda c: c.yaml(backend="tensorrt"),
        BuildError,
        r"profile board: plans for TensorRT cannot be built here: tensorrt is not .* compile with `emit_only=True`",
    ),
    "graphs alone for a backend that runs them": (
        lambda c: c.arguments.update(emit_only=True),
        BuildError,
        r"`emit_only`: profile board is for onnxruntime, which runs graphs as they are; leave it out",
    ),
    "measured on this host for another backend": (
        lambda c: c.yaml(backend="tensorrt", host="0123456789abcdef"),
        ProfileError,
        r"device.yaml: host: a compile measures on ONNX Runtime alone, backend is tensorrt",
    ),
    "an opset that TensorRT's parser may not take": (
        lambda c: (c.yaml(backend="tensorrt", opset=21), c.arguments.update(emit_only=True)),
        BuildError,
        r"engine \S+: TensorRT 10 cannot build its graph: opset 21: expected 9 to 20",
    ),
    "impossible budget": (
        lambda c: c.yaml(budgets={"full": {}, "watch": {"parameters": 10}}),
        PlanError,
        r"budget 'watch': not even the smallest submodel \S+ fits: parameters .* exceeds 10 by .*; raise",
    ),
    "device too small": (
        lambda c: c.yaml(memory_mb=0.001),
        PlanError,
        r"budget 'full': not even the smallest submodel \S+ fits: memory of board .* exceeds 0.00 MB",
    ),
    "levels of an unknown kind": (
        lambda c: c.yaml(levels={"rank": [0.5, 1.0]}),
        PlanError,
        r"levels: this model has no axis kind 'rank'; expected one of ffn, heads",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), PROFILES.values(), ids=PROFILES)
def test_profiles(case: Case, damage: Callable[[Case], object], error: type[NestforgeError], message: str) -> None:
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)
