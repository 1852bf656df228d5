"""``nestforge export --format triton``: a model repository whose Python backend runs the bundle's dispatcher.

One model for the whole bundle: its submodels share weights only within one process, and which one answers follows from
the request. The bundle lies in the version's folder, linked where the file system can. Needs neither Triton nor onnx.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...argument_types import checked
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.manifest import Manifest
from ...errors import InputError
from ...progress import Progress, silent
from ...runtime.load import verify_bytes
from ...serving.triton import BUNDLE_FOLDER, EXIT, REASON, SUBMODEL, TEXT
from ...whole_file import exporting, put_in_place, require_new
from ..work.staging import link

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = "1"
_TYPES = {"float32": "FP32", "float16": "FP16"}
_MODEL = '''"""Written by nestforge export. The Python that Triton's backend runs must be able to import nestforge."""

from nestforge.serving.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class TritonExport:
    """The repository's folder, and the ``model`` in it."""

    repository: str
    model: str


@checked
def export_triton(
    bundle: str | os.PathLike[str], output: str | os.PathLike[str], progress: Progress = silent
) -> TritonExport:
    """Writes a model repository into the new folder ``output``, with one model that has the name of the bundle's
    folder, without ``.bundle``.

    Raises a BundleError, whose every byte is checked where it came to lie; InputError for a name that is none of a
    model's, OutputError.
    """
    path = Path(output).absolute()
    require_new(path)
    opened = verify_bytes(bundle).bundle
    name = opened.path.name.removesuffix(".bundle")
    if not _NAME.fullmatch(name):
        raise InputError(f"bundle {name!r:.80}: a model's name is its folder's, of letters, digits and ._-; rename it")
    with exporting(path) as folder:
        repository = folder / path.name
        there = repository / name / _VERSION / BUNDLE_FOLDER
        there.mkdir(parents=True)
        files = [file for file in sorted(opened.path.iterdir()) if file.is_file() and not file.name.startswith(".")]
        for number, file in enumerate(files):
            progress("files", number, len(files))
            link(file, there / file.name)
        (there.parent / "model.py").write_text(_MODEL)
        (repository / name / "config.pbtxt").write_text(_config(name, opened.manifest))
        verify_bytes(there)
        put_in_place(repository, path, None)
    return TritonExport(str(path), name)


def _config(name: str, manifest: Manifest) -> str:
    """The model's configuration, a tensor a line: every input is optional where texts may come instead."""
    takes_texts = manifest.text is not None and TEXT not in {spec.name for spec in manifest.inputs}
    inputs = [_tensor(spec, takes_texts) for spec in manifest.inputs]
    outputs = [_tensor(spec) for spec in manifest.outputs]
    if takes_texts:
        inputs.append(f'{{ name: "{TEXT}" data_type: TYPE_STRING dims: [ -1 ] optional: true }}')
    outputs += [f'{{ name: "{said}" data_type: TYPE_STRING dims: [ 1 ] }}' for said in (SUBMODEL, REASON)]
    if manifest.exits is not None:
        outputs.append(_tensor(TensorSpec(EXIT, "int64", ("batch",))))
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "python"',
            "max_batch_size: 0",
            *(f"input {one}" for one in inputs),
            *(f"output {one}" for one in outputs),
            "instance_group { kind: KIND_CPU count: 1 }",
            "",
        ]
    )


def _tensor(spec: TensorSpec, optional: bool = False) -> str:
    dims = ", ".join(str(dim if isinstance(dim, int) else -1) for dim in spec.dims)
    kind = _TYPES.get(spec.dtype, spec.dtype.upper())
    return f'{{ name: "{spec.name}" data_type: TYPE_{kind} dims: [ {dims} ]{" optional: true" if optional else ""} }}'
