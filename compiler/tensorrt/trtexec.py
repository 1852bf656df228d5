"""The command of NVIDIA's ``trtexec`` that builds the plan which ``nestforge build`` would build.

For devices where TensorRT comes without its Python package. Options are those of 10.3 up to 11.1, read in the sources
of both; in 11 ``--stronglyTyped`` changes nothing, since every network is.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ...bundle.device_files.plan_index import PLAN_SUFFIX
from ...bundle.manifest import Manifest
from ...bundle.shape_profile import shape_profiles
from ...errors import BuildError
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import HardwareCompatibility, TensorRTOptions
from ...strict import structure

_COMPATIBILITY_OPTIONS: dict[HardwareCompatibility, str] = {
    "none": "none",
    "same_compute_capability": "sameComputeCapability",
    "ampere_plus": "ampere+",
}

_SHAPE_OPTIONS = ("minShapes", "optShapes", "maxShapes")


def profile_options(manifest: Manifest) -> TensorRTOptions:
    """TensorRT settings in the compile's profile, or the defaults. Raises BuildError."""
    data = manifest.provenance.profile.get("tensorrt") or {}
    return structure(TensorRTOptions, data, "manifest.json: provenance: profile: tensorrt", BuildError)


def build_commands(manifest: Manifest) -> dict[str, str]:
    """The command for each graph of an engine for TensorRT, by file; none for other engines."""
    options = profile_options(manifest)
    commands: dict[str, str] = {}
    for engine in sorted(manifest.every_engine, key=lambda engine: engine.file):
        if not BACKENDS[engine.backend].runs_graphs:
            inputs, _ = manifest.interface_of(engine)
            shapes = [profile.written(inputs) for profile in shape_profiles(manifest, engine)]
            commands[engine.file] = trtexec_command(engine.file, options, shapes)
    return commands


def trtexec_command(graph: str, options: TensorRTOptions, shapes: Sequence[Sequence[str]] = ()) -> str:
    """The command for a shell, to be run in the bundle's folder, where ``graph`` lies. It knows no time limit.

    ``shapes`` are those of ``ShapeProfile.written``, of each profile.
    A plan with stripped weights answers zeros until it is given them, and ``trtexec`` does not say so.
    """
    stem = graph.removesuffix(".onnx")
    words = [
        "trtexec",
        f"--onnx={graph}",
        f"--saveEngine={stem}{PLAN_SUFFIX}",
        "--stronglyTyped",
        f"--builderOptimizationLevel={options.optimization_level}",
        "--profilingVerbosity=detailed",
        "--timingCacheFile=tensorrt.timing",
        "--skipInference",
    ]
    for number, listed in enumerate(shapes):
        words += [f"--profile={number}"] if len(shapes) > 1 else []
        words += (f"--{option}={each}" for option, each in zip(_SHAPE_OPTIONS, listed, strict=False))
    if options.workspace_mb is not None:
        words.append(f"--memPoolSize=workspace:{options.workspace_mb * 10**6 // 2**20}")  # MiB there
    if not options.tf32:
        words.append("--noTF32")
    if options.strip_weights:
        words.append("--stripWeights")
    if options.version_compatible:
        words.append("--versionCompatible")
    if options.hardware_compatibility != "none":
        words.append(f"--hardwareCompatibilityLevel={_COMPATIBILITY_OPTIONS[options.hardware_compatibility]}")
    return shlex.join(words)
