"""EXPORT, opened as what it is: the kinds beside ONNX files, and the table of all of them, ``KINDS``.

OpenVINO's IR on the processor, TensorRT's plans on a GPU, embeddings servers by their URL, bundles of ours.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib import error, request

import numpy as np

from ..bundle.manifest import MANIFEST_NAME
from ..bundle.open_bundle import Bundle, open_bundle
from ..bundle.roles import embedding_of
from ..errors import InputError, NestforgeError
from ..exporters.sentence_transformers.library import asked, cut_outputs
from ..optional import needed
from ..outside import library_errors, said_by
from ..outside_file import read_file
from ..profiles.precision import Precision
from ..runtime.description import SubmodelInfo
from ..runtime.inputs.arrays import Array, Arrays
from ..runtime.load import load
from ..runtime.model import ElasticModel
from .export import Export, Port, Value, module_in
from .onnx_export import OnnxExport

# Left to itself OpenVINO computes in bf16 where the processor has that.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
_KINDS = {"f32": "float32", "f16": "float16", "i64": "int64", "i32": "int32", "boolean": "bool"}
_HELD: Mapping[str, Precision] = {
    "u4": "int4",
    "i4": "int4",
    "i8": "int8",
    "u8": "int8",
    "f16": "fp16",
    "bf16": "bf16",
}
_NO_VALUES = {"Parameter", "Result", "Constant"}
_MOST_PLAN_BYTES = 2**36
_SECONDS, _MOST_BYTES = 60, 2**26  # of an answer of a server
TEXTS, PROMPT_NAME = "texts", "prompt_name"


class OpenVinoExport(Export):
    """An OpenVINO IR, an XML file with its weights beside it."""

    kind = "OpenVINO IR"

    def __init__(self, path: Path, library: Path | None = None) -> None:
        self.label = str(path)
        self._openvino = needed("openvino", f"{path}", "openvino", "install nestforge[openvino]")
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise InputError(f"{path}: its weights {weights.name} are missing; expected them beside the file")
        self._core = self._openvino.Core()
        with library_errors(lambda said: InputError(f"{path}: OpenVINO does not read it ({said})")):
            if library is not None:
                self._core.add_extension(str(library))
            self._model = self._core.read_model(path)
        self.files = (path, weights)
        self.inputs = tuple(self._port(port) for port in self._model.inputs)
        self.outputs = tuple(self._port(port) for port in self._model.outputs)
        kinds = {op.get_element_type().get_type_name() for op in self._constants()}
        self.precision = next((name for kind, name in _HELD.items() if kind in kinds), "fp32")
        self._compiled: Any = None

    def _constants(self) -> list[Any]:
        return [op for op in self._model.get_ops() if op.get_type_name() == "Constant" and len(op.shape) > 1]

    def _port(self, port: Any) -> Port:
        shape = port.get_partial_shape()
        sizes = (f"?{place}" if dim.is_dynamic else dim.get_length() for place, dim in enumerate(shape))
        dims = tuple(sizes) if shape.rank.is_static else None
        return Port(port.get_any_name(), _KINDS.get(port.get_element_type().get_type_name(), "float32"), dims)

    def run(self, feeds: Arrays) -> dict[str, Array]:
        with library_errors(InputError):
            self._compiled = self._compiled or self._core.compile_model(self._model, "CPU", _EXACT)
            found = self._compiled(dict(feeds))
            return {port.name: found[place] for place, port in enumerate(self.outputs)}

    def values(self, feeds: Arrays, sizes: Collection[int]) -> Iterator[Value]:
        model = self._model.clone()
        made = [op for op in model.get_ordered_ops() if op.get_type_name() not in _NO_VALUES]
        floats = [op for op in made if op.get_output_element_type(0).get_type_name() in ("f32", "f16")]
        with library_errors(InputError):
            model.add_results([self._openvino.opset13.result(op.output(0)) for op in floats])
            found = self._core.compile_model(model, "CPU", _EXACT)(dict(feeds))
        for place, op in enumerate(floats, len(self.outputs)):
            if found[place].size in sizes:
                name = op.get_friendly_name()
                yield Value(name, name, op.get_type_name(), module_in(name), found[place].copy())

    def weights(self, size: int) -> Iterator[Array]:
        return (op.get_data().astype(np.float32) for op in self._constants() if size == math.prod(op.shape))


class PlanExport(Export):
    """A TensorRT plan, for the GPU and the release that it was built for. Its file does not say what it computes in: it
    is judged as what its inputs and outputs are, or by what the user accepts."""

    kind = "TensorRT plan"

    def __init__(self, path: Path, library: Path | None = None) -> None:
        self.label, self.files = str(path), (path,)
        if library is not None:
            raise InputError(f"{path}: `library` is for ONNX files and OpenVINO IR; a plan holds its plugins")
        for module in ("tensorrt", "cuda.bindings.runtime"):
            needed(module, f"{path}", module.partition(".")[0], "install nestforge[tensorrt] on a machine with a GPU")
        from ..runtime.device import cuda_memory
        from ..runtime.engines.tensorrt import engine
        from ..runtime.engines.tensorrt.layout import DTYPES

        self._memory, self._engine = cuda_memory, engine
        kinds = {there: ours for ours, there in DTYPES.items()}
        with self._said():
            cuda_memory.use_device(0)
            self._plan = engine.open_engine(
                str(path), read_file(path, _MOST_PLAN_BYTES, InputError), False, engine.Log()
            )
            tensors = engine.tensors_of(self._plan)
            self._context = engine.open_context(str(path), self._plan)
        for tensor in tensors:
            if tensor.dtype not in kinds:
                raise InputError(f"{path}: {tensor.name} is of {tensor.dtype}; expected one of {', '.join(kinds)}")
        ports = [
            (t.is_input, Port(t.name, kinds[t.dtype], tuple(n if n >= 0 else f"?{at}" for at, n in enumerate(t.shape))))
            for t in tensors
        ]
        self.inputs = tuple(port for is_input, port in ports if is_input)
        self.outputs = tuple(port for is_input, port in ports if not is_input)
        self.precision = "fp16" if any(port.dtype == "float16" for _, port in ports) else "fp32"

    def _said(self) -> Any:
        """Whatever the runtime raises is one line about this file."""
        return library_errors(lambda said: InputError(said if said.startswith(self.label) else f"{self.label}: {said}"))

    def run(self, feeds: Arrays) -> dict[str, Array]:
        memory, context = self._memory, self._context
        with self._said(), ExitStack() as undo:
            memory.use_device(0)
            stream = memory.Stream()
            undo.callback(stream.close)
            self._engine.set_shapes(self.label, context, {name: array.shape for name, array in feeds.items()})
            found = {port.name: np.empty(context.get_tensor_shape(port.name), port.dtype) for port in self.outputs}
            places = {}
            for name, array in {**feeds, **found}.items():
                places[name] = memory.allocate(array.nbytes)
                undo.callback(memory.free, places[name])
            self._engine.set_addresses(self.label, context, places)
            for name, array in feeds.items():
                stream.to_device(places[name], array)
            if not context.execute_async_v3(stream.handle):
                raise NestforgeError(f"{self.label}: TensorRT refused to run")
            for name, array in found.items():
                stream.to_host(array, places[name])
            stream.wait()
        return found

    def close(self) -> None:
        self._context = self._plan = None


class ServerExport(Export):
    """A server that embeds texts: OpenAI's ``/v1/embeddings``, or ``/embed`` of text-embeddings-inference."""

    kind = "embeddings server"
    inputs = (Port(TEXTS, "str", ("batch",)),)
    outputs = (Port("sentence_embedding", "float32"),)

    def __init__(self, url: str) -> None:
        self.label = url
        self._is_openai = not url.rstrip("/").endswith("/embed")

    def run(self, feeds: Arrays) -> dict[str, Array]:
        texts = [str(text) for text in feeds[TEXTS]]
        body: Mapping[str, object] = {"input": texts, "model": "default"} if self._is_openai else {"inputs": texts}
        post = request.Request(self.label, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
        try:
            with request.urlopen(post, timeout=_SECONDS) as answer:  # noqa: S310  (http or https, see open_exports)
                data = json.loads(answer.read(_MOST_BYTES))
            rows = [row["embedding"] for row in data["data"]] if self._is_openai else data
            found = np.array(rows, np.float32)
        except error.HTTPError as failure:
            raise InputError(f"{self.label}: answers {failure.code} {failure.reason}") from failure
        except (OSError, ValueError, KeyError, TypeError) as failure:
            raise InputError(f"{self.label}: does not answer with embeddings ({said_by(failure)})") from failure
        if found.ndim != 2 or len(found) != len(texts):
            raise InputError(f"{self.label}: answers shape {list(found.shape)} to {len(texts)} texts")
        return {"sentence_embedding": found}

    def require_width(self, answered: Arrays, expected: Arrays) -> None:
        """Raises InputError for embeddings of another model."""
        (got,), wanted = answered.values(), expected.get("sentence_embedding")
        if wanted is None:
            raise InputError(
                f"{self.label}: the model has no sentence embedding; give its sentence-transformers folder"
            )
        if got.shape[-1] != wanted.shape[-1]:
            raise InputError(
                f"{self.label}: answers with {got.shape[-1]} numbers a text; the model gives {wanted.shape[-1]}"
            )


class BundleExport(Export):
    """One submodel of a bundle, asked through the runtime."""

    kind = "bundle"

    def __init__(self, bundle: Bundle, opened: ElasticModel, info: SubmodelInfo, is_last: bool) -> None:
        self.label, self.folder = f"{bundle.path}, {info.labels[0] if info.labels else info.id}", bundle.path
        self.precision = info.precision
        self._opened, self._id, self._is_last = opened, info.id, is_last
        self.submodel = None if bundle.manifest.spec.parse(info.id).is_universal else info.id
        self.inputs = tuple(Port(spec.name, spec.dtype, spec.dims) for spec in opened.inputs)
        self.outputs = tuple(Port(spec.name, spec.dtype, spec.dims) for spec in opened.outputs)
        buckets = [engine.bucket for engine in bundle.manifest.engines if engine.submodel == info.id]
        longest = max(buckets, key=lambda bucket: (bucket.sequence, bucket.batch))
        self.largest = (longest.batch, longest.sequence)
        self.files = tuple(sorted(file for file in bundle.path.iterdir() if file.is_file()))

    def run(self, feeds: Arrays) -> dict[str, Array]:
        return dict(self._opened(dict(feeds), submodel=self._id).outputs)

    def close(self) -> None:
        if self._is_last:
            self._opened.close()


class BundleTexts(BundleExport):
    """A submodel of a bundle that has the model's widths, given texts: tokens, prompts and where texts are cut are the
    bundle's own. The embedding is also cut to each of its dimensions. ``depth`` are its layers, None for all."""

    kind = "bundle, texts"

    def __init__(self, bundle: Bundle, opened: ElasticModel, info: SubmodelInfo) -> None:
        super().__init__(bundle, opened, info, is_last=False)
        self.label = f"{self.label}, texts"
        self.inputs = (Port(TEXTS, "str", ("batch",)), Port(PROMPT_NAME, "str", ("batch",)))
        depth = bundle.manifest.submodel(info.id).depth
        self.embeddings = cut_outputs(bundle.manifest, depth)
        self.depth = None if self.submodel is None else depth
        self.outputs = (Port(self.embeddings[0].name, "float32"),)

    def run(self, feeds: Arrays) -> dict[str, Array]:
        texts, named = [str(text) for text in feeds[TEXTS]], feeds[PROMPT_NAME][0]
        ask = partial(self._opened, texts, submodel=self._id, truncate=True, prompt_name=named)
        return asked(ask, self.embeddings)


def bundle_exports(path: Path) -> list[Export]:
    """Every submodel that may answer here, the largest first; before them, where it makes an embedding of texts, those
    of the model's widths with texts."""
    bundle, opened = open_bundle(path), load(path)
    infos, manifest = opened.submodels, bundle.manifest
    texts = manifest.text is not None and manifest.text.embedding is not None and embedding_of(manifest) is not None
    whole = [info for info in infos if texts and manifest.spec.parse(info.id).has_all_widths]
    found = [BundleTexts(bundle, opened, info) for info in whole]
    return [*found, *(BundleExport(bundle, opened, info, info is infos[-1]) for info in infos)]


def _graphs(folder: Path) -> list[Path]:
    """The graphs of a folder of optimum or transformers.exporters; those of `onnx/` where there are none above."""
    found = sorted(folder.glob("*.onnx")) or sorted((folder / "onnx").glob("*.onnx"))
    return found or sorted(folder.glob("*.xml"))


Opened = Callable[[Path, Path | None], list[Export]]
# By what a path is; the first that holds opens it.
KINDS: Sequence[tuple[str, Callable[[Path], bool], Opened]] = (
    ("a bundle", lambda path: (path / MANIFEST_NAME).is_file(), lambda path, _: bundle_exports(path)),
    (
        "a folder with ONNX or OpenVINO graphs",
        lambda path: bool(_graphs(path)),
        lambda path, library: [export for graph in _graphs(path) for export in open_exports(graph, library)],
    ),
    ("an OpenVINO IR (.xml)", lambda path: path.suffix == ".xml", lambda *given: [OpenVinoExport(*given)]),
    (
        "a TensorRT plan (.plan, .engine)",
        lambda path: path.suffix in (".plan", ".engine", ".trt"),
        lambda *given: [PlanExport(*given)],
    ),
    ("an ONNX file", lambda path: path.suffix == ".onnx", lambda *given: [OnnxExport(*given)]),
)


def open_exports(export: str | Path, library: Path | None = None) -> list[Export]:
    """The graphs of ``export``. Raises InputError, one line, for what is none or cannot be opened."""
    if str(export).startswith(("http://", "https://")):
        return [ServerExport(str(export))]
    path = Path(export)
    kinds = " or ".join(kind for kind, _, _ in KINDS)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; expected {kinds}, or the URL of a server")
    for _, is_one, opened in KINDS:
        if is_one(path):
            return opened(path, library)
    raise InputError(f"{path}: expected {kinds}")
