"""``nestforge export --format ortpackage``: submodels as a package that ONNX Runtime itself opens, a component each.

ONNX Runtime chooses within a component, by execution provider; which component answers its caller says. Each has one
variant, for the processor, whose file is that of ``--format onnx``. Python's interface to ONNX Runtime has no packages
yet, its library's has (``OrtModelPackageApi``): by that each component is chosen and opened as users will.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime

from ...argument_types import checked
from ...bucket import Bucket
from ...bundle.files import to_json
from ...bundle.open_bundle import open_bundle
from ...errors import BundleIncompatibleError, ParityError
from ...progress import Progress, silent
from ...whole_file import exporting, put_in_place, require_new
from .onnx_file import OnnxExport, export_onnx

_MANIFEST, _MODEL, _VARIANT = "manifest.json", "model.onnx", "cpu"
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
    """The package's folder, and its ``components``: what was written of each, by its submodel's id."""

    package: str
    components: Mapping[str, OnnxExport]


@checked
def export_ort_package(
    bundle: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    submodel: str | None = None,
    bucket: Bucket | None = None,
    task: str | None = None,
    progress: Progress = silent,
) -> PackageExport:
    """Writes the new folder ``output`` with a component for ``submodel``, or for each (None), at ``bucket`` (its only
    one), once ONNX Runtime was seen to open every one of them from it.

    Raises as ``export_onnx`` does, and BundleIncompatibleError where this release of ONNX Runtime knows no packages.
    """
    path, manifest = Path(output).absolute(), open_bundle(bundle).manifest
    require_new(path)
    _library()
    entries = manifest.largest_first if submodel is None else [manifest.submodel(submodel)]
    components = {}
    with exporting(path) as folder:
        package = folder / path.name
        for entry in entries:
            place = package / entry.id / _VARIANT
            place.mkdir(parents=True)
            components[entry.id] = export_onnx(
                bundle, place / _MODEL, submodel=entry.id, bucket=bucket, task=task, progress=progress
            )
        (package / _MANIFEST).write_bytes(to_json(_manifest(components)))
        _require_opens(package, components)
        put_in_place(package, path, None)
    return PackageExport(str(path), components)


def _manifest(components: Mapping[str, OnnxExport]) -> dict[str, Any]:
    def variant(name: str) -> dict[str, Any]:
        return {
            "variant_directory": f"{name}/{_VARIANT}",
            "ep": "CPUExecutionProvider",
            "executor_info": {"ort": {"model_file": _MODEL}},
        }

    each = {name: {"variants": {_VARIANT: variant(name)}} for name in components}
    return {"schema_version": "1.0", "components": each}


class _Table:
    """A table of C functions of ONNX Runtime; ``api`` is the one that says what went wrong."""

    def __init__(self, address: int, api: _Table | None = None) -> None:
        self._places, self._api = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p)), api or self

    def address(self, place: int) -> int | None:
        """What a function without arguments returns, None for a null pointer."""
        found: int | None = self._function(place)()
        return found

    def made(self, place: int, *given: Any) -> ctypes.c_void_p:
        """What a function puts behind its last argument. Raises ParityError with what the library says."""
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


def _require_opens(package: Path, components: Mapping[str, OnnxExport]) -> None:
    """Raises ParityError unless ONNX Runtime chooses the written variant of each component, and opens it."""
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
        for name in components:
            component = held(packages, _SELECT, _RELEASE_COMPONENT, context, name.encode(), options)
            chosen = Path(os.fsdecode(ctypes.string_at(packages.made(_FOLDER, component))))
            if not chosen.samefile(package / name / _VARIANT):
                raise ParityError(f"component {name}: onnxruntime {onnxruntime.__version__} chose {chosen.name}")
            session = packages.made(_SESSION, env, component, None)
            api.released(_RELEASE_SESSION, session)
