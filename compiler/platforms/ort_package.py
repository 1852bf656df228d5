"""``nestforge export --format ortpackage``: submodels as a package that ONNX Runtime itself opens, a component each.

ONNX Runtime chooses within a component, by execution provider; which component answers its caller says. A component
has a variant for each bundle, called as the bundle's profile, whose file is compared as that of ``--format onnx``;
weights lie in one folder for all variants of a weight store. Python's interface to ONNX Runtime has no packages yet,
its library's has (``OrtModelPackageApi``): by that each variant is opened as users will.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime

from ...argument_types import checked
from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.files import to_json
from ...bundle.open_bundle import Bundle
from ...errors import BundleIncompatibleError, InputError, ParityError
from ...profiles.backends import BACKENDS, ONNXRUNTIME
from ...progress import Progress, silent
from ...runtime.load import verify_bytes
from ...whole_file import exporting, put_in_place, require_new
from ..graph.precision.proof_graphs import proof_bundle
from ..work.staging import link
from .onnx_file import OnnxExport, chosen_engine, write_compared

_MANIFEST, _MODEL, _HERE = "manifest.json", "model.onnx", ONNXRUNTIME.provider
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_WEIGHTS = "session.model_external_initializers_file_folder_path"
_API, _LOG_FATAL_ONLY = 31, 4
# Places in the tables of functions: those of OrtApi, which only ever grows, and of OrtModelPackageApi.
_ERROR_MESSAGE, _CREATE_ENV, _CREATE_SESSION_OPTIONS, _PACKAGES = 2, 3, 10, 427
_RELEASE_ENV, _RELEASE_STATUS, _RELEASE_SESSION, _RELEASE_SESSION_OPTIONS = 92, 93, 95, 100
_OPTIONS, _RELEASE_OPTIONS, _CONTEXT, _RELEASE_CONTEXT, _SELECT, _RELEASE_COMPONENT, _FOLDER, _SESSION = (
    *(0, 1, 2, 3),
    *(11, 12, 14, 15),
)


@dataclass(frozen=True)
class PackageExport:
    """The package's folder of so many ``bytes``, and its ``components`` by submodel's id: what was written for each
    profile."""

    package: str
    bytes: int
    components: Mapping[str, Mapping[str, OnnxExport]]


class _Variant(NamedTuple):
    """A submodel as one bundle has it, called as the bundle's profile."""

    component: str
    name: str
    bundle: Bundle
    engine: EngineEntry

    @property
    def directory(self) -> str:
        return f"{self.component}/{self.name}"

    @property
    def provider(self) -> str:
        return BACKENDS[self.engine.backend].provider

    @property
    def asset(self) -> str:
        """The hash of a folder with the weight store's files, as packages have it."""
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in self.bundle.manifest.weight_files)
        return hashlib.sha256(lines.encode()).hexdigest()

    def stated(self, provider: str) -> dict[str, Any]:
        options = {_WEIGHTS: f"sha256:{self.asset}"}
        executor = {"ort": {"model_file": _MODEL, "session_options": options}}
        return {"variant_directory": self.directory, "ep": provider, "executor_info": executor}


@checked
def export_ort_package(
    bundles: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    submodel: str | None = None,
    bucket: Bucket | None = None,
    task: str | None = None,
    progress: Progress = silent,
) -> PackageExport:
    """Writes the new folder ``output`` with a component for ``submodel``, or for each (None), at ``bucket`` (its only
    one), in a variant for each of ``bundles`` that has it: one model, compiled for devices that ONNX Runtime tells
    apart. ONNX Runtime was then seen to open every one of them on the processor.

    Raises as ``export_onnx`` does, InputError for bundles that are no such, and BundleIncompatibleError where this
    release of ONNX Runtime knows no packages.
    """
    path = Path(output).absolute()
    require_new(path)
    _library()
    progress("hashes", 0, 1)
    variants = _variants([verify_bytes(bundle).bundle for bundle in bundles], submodel, bucket)
    components: dict[str, dict[str, OnnxExport]] = {}
    with exporting(path) as folder:
        package = folder / path.name
        for one in variants:
            written = _write(package, one, task, progress)
            final = path / Path(written.files[0]).relative_to(package)
            components.setdefault(one.component, {})[one.name] = replace(written, files=(str(final),))
        _require_each_opens(package, variants)
        size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
        put_in_place(package, path, None)
    return PackageExport(str(path), size, components)


def _variants(bundles: Sequence[Bundle], submodel: str | None, bucket: Bucket | None) -> list[_Variant]:
    """Raises InputError for bundles of several models, for a profile's name that is none of a folder, and for two
    variants of one provider or of one name."""
    found: list[_Variant] = []
    for bundle in bundles:
        manifest = bundle.manifest
        name = str(manifest.provenance.profile["name"])
        if not _NAME.fullmatch(name):
            raise InputError(f"{bundle.path}: profile {name!r:.80} names a folder; expected letters, digits and ._-")
        for entry in manifest.largest_first if submodel is None else [manifest.submodel(submodel)]:
            found.append(_Variant(entry.id, name, bundle, chosen_engine(bundle, entry.id, bucket)))
    for other, one in combinations(found, 2):
        where, than = one.bundle.path, other.bundle.path
        if one.bundle.manifest.provenance.source != other.bundle.manifest.provenance.source:
            raise InputError(f"{where}: is of another model than {than}; export them apart")
        if one.component == other.component and one.provider == other.provider:
            raise InputError(
                f"{where}: is for {one.provider}, as {than} is; ONNX Runtime chooses by provider alone, so export them "
                "apart"
            )
        if one.directory == other.directory:
            raise InputError(f"{where}: its profile is called {one.name}, as that of {than}; export them apart")
    return found


def _write(package: Path, one: _Variant, task: str | None, progress: Progress) -> OnnxExport:
    """Writes a variant, and its weights where no other has them. Raises as ``export_onnx`` does."""
    place, asset = package / one.directory, package / "shared_assets" / f"sha256-{one.asset}"
    place.mkdir(parents=True)
    asset.mkdir(parents=True, exist_ok=True)
    names = one.bundle.manifest.weight_names
    for name in names:
        if not (asset / name).exists():
            link(one.bundle.file(name), asset / name)
        link(asset / name, place / name)  # while the file is compared
    with proof_bundle(one.bundle) as here:
        written = write_compared(one.bundle, here, one.engine, task, place / _MODEL, None, progress)
    for name in names:
        (place / name).unlink()
    return written


def _require_each_opens(package: Path, variants: Sequence[_Variant]) -> None:
    """Writes the manifest. Raises ParityError unless ONNX Runtime opens every variant, those for other providers than
    this host's as if they were for its processor, and then chooses those for the processor among all."""
    here = [one for one in variants if one.provider == _HERE]
    for one in variants:
        if one.provider != _HERE:
            _write_manifest(package, [one], _HERE)
            _require_opens(package, [one])
    _write_manifest(package, variants)
    _require_opens(package, here)


def _write_manifest(package: Path, variants: Sequence[_Variant], provider: str | None = None) -> None:
    components: dict[str, Any] = {}
    for one in variants:
        component = components.setdefault(one.component, {"variants": {}})
        component["variants"][one.name] = one.stated(provider or one.provider)
    (package / _MANIFEST).write_bytes(to_json({"schema_version": "1.0", "components": components}))


class _Table:
    """A table of C functions of ONNX Runtime; ``api`` is the one that says what went wrong."""

    def __init__(self, address: int, api: _Table | None = None) -> None:
        self._places, self._api = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p)), api or self

    def address(self, place: int) -> int | None:
        """Value of a function without arguments, None for a null pointer."""
        return self._function(place)()

    def made(self, place: int, *given: Any) -> ctypes.c_void_p:
        """Value that a function puts behind its last argument. Raises ParityError with what the library says."""
        found = ctypes.c_void_p()
        if status := self._function(place)(*given, ctypes.byref(found)):
            said = ctypes.string_at(self._api._function(_ERROR_MESSAGE)(ctypes.c_void_p(status))).decode(
                errors="replace"
            )
            self._api.released(_RELEASE_STATUS, ctypes.c_void_p(status))
            raise ParityError(
                f"onnxruntime {onnxruntime.__version__} does not open what was written: {' '.join(said.split())}"
            )
        return found

    def released(self, place: int, what: ctypes.c_void_p) -> None:
        self._function(place)(what)

    def _function(self, place: int) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_void_p)(self._places[place])


@cache
def _library() -> tuple[_Table, _Table]:
    """ONNX Runtime's functions, and those for packages. Raises BundleIncompatibleError where it has none."""
    for path in Path(onnxruntime.__file__).parent.glob("capi/*onnxruntime.*"):
        try:
            get = ctypes.CDLL(str(path)).OrtGetApiBase
        except (OSError, AttributeError):
            continue  # no library, or none that has the tables
        get.restype = ctypes.POINTER(ctypes.c_void_p)
        # NULL where the release knows no such version of the table.
        if base := ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(get()[0])(_API):
            api = _Table(base)
            if packages := api.address(_PACKAGES):
                return api, _Table(packages, api)
    raise BundleIncompatibleError(
        f"onnxruntime {onnxruntime.__version__} opens no packages, so none can be proven; install 1.31 or later"
    )


def _require_opens(package: Path, variants: Sequence[_Variant]) -> None:
    """Raises ParityError unless ONNX Runtime chooses these variants, of their components, and opens each."""
    api, packages = _library()
    with ExitStack() as stack:

        def held(table: _Table, place: int, release: int, *given: Any) -> ctypes.c_void_p:
            found = table.made(place, *given)
            stack.callback(table.released, release, found)
            return found

        env = held(api, _CREATE_ENV, _RELEASE_ENV, ctypes.c_int(_LOG_FATAL_ONLY), b"nestforge")
        session_options = held(api, _CREATE_SESSION_OPTIONS, _RELEASE_SESSION_OPTIONS)
        options = held(packages, _OPTIONS, _RELEASE_OPTIONS, env, session_options)
        context = held(packages, _CONTEXT, _RELEASE_CONTEXT, os.fsencode(package))
        for one in variants:
            component = held(packages, _SELECT, _RELEASE_COMPONENT, context, one.component.encode(), options)
            chosen = Path(os.fsdecode(ctypes.string_at(packages.made(_FOLDER, component))))
            if not chosen.samefile(package / one.directory):
                raise ParityError(
                    f"component {one.component}: onnxruntime {onnxruntime.__version__} chose {chosen.name}"
                )
            session = packages.made(_SESSION, env, component, None)
            api.released(_RELEASE_SESSION, session)
