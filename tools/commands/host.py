"""``nestforge doctor`` and ``profile``: this host, and its device profile."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

from ... import __version__
from ...errors import BundleError
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import profile_data
from ...profiles.host_load import load_warning
from ...profiles.load_profile import builtin_profiles, dump_profile
from ...profiles.probe_host import HostFacts, measured_profile, probe_host
from ...runtime.engines.runner import opener
from ...tables import Table
from ...whole_file import require_new, write_whole
from ..console import Block, print_json, say, show, working
from ..functions import measure
from ..options import field_options, json_option, overwrite_option, path_option

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
    """This host, and nestforge's back ends on it. A compile package maps to None where it is missing."""

    nestforge: str
    python: str
    host: HostFacts
    backends: tuple[BackendStatus, ...]
    compile_packages: Mapping[str, str | None]
    builds: bool
    profiles: tuple[str, ...]


@click.command("doctor", epilog="\b\nExamples:\n  nestforge doctor\n  nestforge doctor --json")
@json_option
def doctor_command(as_json: bool) -> None:
    """Show the back ends and packages of this host.

    Backends and whether they load, versions, and the cores and memory that this process may use.
    """
    diagnosis = diagnose()
    show(as_json, diagnosis, lambda: _diagnosis_report(diagnosis))


def _diagnosis_report(diagnosis: Diagnosis) -> Iterator[Block]:
    host = diagnosis.host
    yield Table.facts(
        [
            ("nestforge", f"{diagnosis.nestforge}, Python {diagnosis.python}"),
            ("host", f"{host.cpu}, {host.architecture}, {host.system}"),
            ("cores", str(host.cores)),
            ("memory", f"{host.memory_mb:,.0f} MB"),
            ("profiles", ", ".join(diagnosis.profiles)),
        ]
    )
    rows = [[b.name, b.version or "-", "yes" if b.runs else "no", b.remark] for b in diagnosis.backends]
    yield Table(["backend", "version", "runs", "remark"], rows)
    packages = diagnosis.compile_packages
    yield Table(["to compile", "version"], [[name, version or "missing"] for name, version in packages.items()])
    missing = ", ".join(name for name, version in packages.items() if version is None)
    verdict = f"no, {missing} missing: pip install 'nestforge[compile]'" if missing else "yes"
    yield f"compiles here: {verdict}"


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
    """Runs where it loads and finds what it runs on."""
    here = opener(name)
    problem = here.problem()
    if problem is None:
        try:
            return BackendStatus(name, version, True, here.described())
        except (ImportError, OSError) as failure:  # a wheel that does not fit this machine's libraries
            problem = f"does not load: {' '.join(str(failure).split())}"
        except BundleError as failure:
            problem = str(failure)
    return BackendStatus(name, version, False, problem)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@click.command("profile", epilog="\b\nExamples:\n  nestforge profile --output my.yaml\n  nestforge profile --json")
@path_option("--output", "YAML file to write. Default: the YAML is printed.")
@field_options(measure, "force")
@overwrite_option
@json_option
def profile_command(output: Path | None, overwrite: bool, force: bool, as_json: bool) -> None:
    """Measure this host and write its device profile.

    The result is what --profile accepts. Edit the copy: its name, its buckets and above all its budgets are yours
    to choose. Nothing is written where other programs use the processor.
    """
    if output is not None:
        require_new(output, overwrite)
    with working():
        profile = measured_profile(force)
    if (busy := load_warning(profile.rates.others_share)) is not None:
        say(f"warning: {busy} meanwhile: rates are too low", err=True)
    if output is not None:
        text = dump_profile(profile)
        write_whole(output, lambda stream: stream.write(text.encode()), "the profile", new=not overwrite)
        say(f"wrote {output}", err=True)
    if as_json:
        print_json(profile_data(profile))
    elif output is None:
        click.echo(dump_profile(profile), nl=False)
