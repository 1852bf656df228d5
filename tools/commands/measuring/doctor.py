"""``nestforge doctor``: what this host can build and run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata

import click

from .... import __version__
from ....errors import BundleError
from ....profiles.load_profile import builtin_profiles
from ....profiles.probe_host import HostFacts, probe_host
from ....runtime.engines.runner import BACKENDS
from ....runtime.engines.tensorrt.available import tensorrt_problem
from ...console import print_facts, print_json, print_table, say
from ...options import json_option

# Distributions of the extra `compile`: what building takes on top of the backend.
_COMPILE = ("torch", "transformers", "safetensors", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this host. ``version`` is None where it is not installed; ``remark`` says what it offers."""

    name: str
    version: str | None
    runs: bool
    remark: str


@dataclass(frozen=True)
class Diagnosis:
    """What this host is and what nestforge can do on it. A compile package maps to None where it is missing."""

    nestforge: str
    python: str
    host: HostFacts
    backends: tuple[BackendStatus, ...]
    compile_packages: Mapping[str, str | None]
    builds: bool
    profiles: tuple[str, ...]


@click.command(epilog="\b\nExamples:\n  nestforge doctor\n  nestforge doctor --json")
@json_option
def command(as_json: bool) -> None:
    """Show what this host can build and run.

    Backends and whether they load, versions, and the cores and memory that this process may use.
    """
    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis)
        return
    host = diagnosis.host
    missing = [name for name, version in diagnosis.compile_packages.items() if version is None]
    print_facts(
        [
            ("nestforge", f"{diagnosis.nestforge}, Python {diagnosis.python}"),
            ("host", f"{host.cpu}, {host.architecture}, {host.system}"),
            ("cores", str(host.cores)),
            ("memory", f"{host.memory_mb:,.0f} MB"),
            ("profiles", ", ".join(diagnosis.profiles)),
        ]
    )
    click.echo()
    rows = [[b.name, b.version or "-", "yes" if b.runs else "no", b.remark] for b in diagnosis.backends]
    print_table(["backend", "version", "runs", "remark"], rows)
    click.echo()
    rows = [[name, version or "missing"] for name, version in diagnosis.compile_packages.items()]
    print_table(["to compile", "version"], rows)
    verdict = f"no, {', '.join(missing)} missing: pip install 'nestforge[compile]'" if missing else "yes"
    say(f"\ncompiles here: {verdict}")


def diagnose() -> Diagnosis:
    """Looks at the installed packages and imports each backend to see that it loads; imports no torch."""
    host = probe_host()
    packages = {name: _version(name) for name in _COMPILE}
    return Diagnosis(
        nestforge=__version__,
        python=platform.python_version(),
        host=host,
        backends=tuple(_backend_status(name, host.backends.get(name)) for name in BACKENDS),
        compile_packages=packages,
        builds=None not in packages.values(),
        profiles=builtin_profiles(),
    )


def _backend_status(name: str, version: str | None) -> BackendStatus:
    if name == "tensorrt":
        return _tensorrt_status(version)
    if version is None:
        return BackendStatus(name, None, False, "pip install 'nestforge[cpu]'")
    try:
        module = import_module(name)
    except (ImportError, OSError) as failure:  # a wheel that does not fit this machine's libraries
        return BackendStatus(name, version, False, f"does not load: {' '.join(str(failure).split())}")
    return BackendStatus(name, version, True, ", ".join(module.get_available_providers()))


def _tensorrt_status(version: str | None) -> BackendStatus:
    """Runs where it loads and finds a GPU."""
    problem = tensorrt_problem()
    if problem is None:
        from ....runtime.engines.tensorrt.engine import this_gpu

        try:
            return BackendStatus("tensorrt", version, True, str(this_gpu()))
        except BundleError as failure:
            problem = str(failure)
    return BackendStatus("tensorrt", version, False, problem)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
