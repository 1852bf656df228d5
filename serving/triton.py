"""The model that Triton's Python backend runs: a bundle with its dispatcher, budgets as parameters of a request.

``nestforge export --format triton`` writes a repository whose ``model.py`` is this class. Arrays go in and out by the
backend's interface to numpy where that is of the numpy that runs here, else by DLPack, which has no texts.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleIncompatibleError, InputError, NestforgeError
from ..outside_file import parse_json
from ..runtime.exits.policy import read_exits
from ..runtime.inputs.arrays import Array
from ..runtime.load import load
from ..strict import nearest
from .served import HEADERS, stated

# The bundle, in the folder of a version.
BUNDLE_FOLDER = "bundle"
# Input of texts, and outputs beside the bundle's own: which submodel answered and why, and the layer after which each
# row left, -1 where no segments ran.
TEXT, SUBMODEL, REASON, EXIT = "text", "nestforge_submodel", "nestforge_reason", "nestforge_exit"
_OTHERS = ("dimensions", "exits", "truncate", "prompt_name")


class TritonPythonModel:
    """See Triton's Python backend: initialised once in each process, then executed for requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the bundle with all engines, on as many threads as the configuration's parameter ``threads`` says.

        Raises BundleIncompatibleError for a configuration with texts where these do not pass, which would end the
        process later.
        """
        self._triton: Any = import_module("triton_python_backend_utils")
        self._by_numpy = _reads_this_numpy(self._triton.Tensor)
        config = parse_json(args["model_config"])
        texts = [one["name"] for one in (*config["input"], *config["output"]) if one["data_type"] == "TYPE_STRING"]
        if texts and not self._by_numpy:
            raise BundleIncompatibleError(
                f"model {config['name']}: this release of Triton passes no texts to numpy {np.__version__}; run it with"
                f" numpy below 2, or take {', '.join(texts)} out of config.pbtxt"
            )
        threads = config["parameters"].get("threads", {}).get("string_value")
        folder = Path(args["model_repository"]) / args["model_version"] / BUNDLE_FOLDER
        self._model = load(folder, threads=None if threads is None else int(threads), preload=True)
        self._names = [spec.name for spec in self._model.bundle.manifest.inputs]

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response for each request; what it has wrong is its error, in one line."""
        responses = []
        for request in requests:
            try:
                outputs = self._outputs(request)
                responses.append(self._triton.InferenceResponse(output_tensors=outputs))
            except NestforgeError as failure:
                responses.append(self._triton.InferenceResponse(error=self._triton.TritonError(str(failure))))
        return responses

    def finalize(self) -> None:
        self._model.close()

    def _outputs(self, request: Any) -> list[Any]:
        answer = self._model(self._inputs(request), **options_of(parse_json(request.parameters() or "{}")))
        wanted, arrays = set(request.requested_output_names()), dict(answer.outputs)
        if answer.exits is not None:
            arrays[EXIT] = answer.exits.layer
        elif EXIT in wanted:  # the whole engine answered
            rows = len(next(iter(arrays.values())))
            arrays[EXIT] = np.full(rows, -1, np.int64)
        tensor = self._triton.Tensor
        make = tensor if self._by_numpy else tensor.from_dlpack
        found = [make(name, np.ascontiguousarray(array)) for name, array in arrays.items() if name in wanted]
        said = {SUBMODEL: answer.submodel, REASON: answer.reason}
        return found + [make(name, np.array([text.encode()], object)) for name, text in said.items() if name in wanted]

    def _inputs(self, request: Any) -> dict[str, Array] | list[str]:
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        if TEXT not in tensors or TEXT in self._names:
            return {
                name: tensor.as_numpy() if self._by_numpy else np.from_dlpack(tensor)
                for name, tensor in tensors.items()
            }
        if len(tensors) > 1:
            raise InputError(f"inputs {', '.join(sorted(tensors))}: expected {TEXT} alone, or arrays")
        try:
            return [text.decode() for text in tensors[TEXT].as_numpy().ravel().tolist()]
        except UnicodeDecodeError as failure:
            raise InputError(f"input {TEXT}: expected UTF-8, got {failure.object[:80]!r}") from None


def _reads_this_numpy(tensor: Any) -> bool:
    """Whether the backend was built for this numpy: releases built for numpy 1 return zeros to numpy 2. With numpy 1
    nothing is tried, since what DLPack leaves behind there ends the process."""
    tried = np.arange(1, 4)
    return np.lib.NumpyVersion(np.__version__) < "2.0.0" or np.array_equal(
        tensor.from_dlpack("tried", tried).as_numpy(), tried
    )


def options_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call of the model, of a request's parameters: numbers may be written as text, since not every client
    and release sends fractions. Raises InputError for what is none, or is unknown."""
    known = (*HEADERS, *_OTHERS)
    for name in parameters:
        if name not in known:
            raise InputError(f"no parameter {name!r:.80}{nearest(name[:80], known)}")
    texts = {HEADERS[name]: value for name, value in parameters.items() if name in HEADERS and isinstance(value, str)}
    rest = {name: value for name, value in parameters.items() if not isinstance(value, str)}
    found = stated(texts, rest) | {name: parameters[name] for name in _OTHERS if name in parameters}
    if isinstance(found.get("exits"), str):
        found["exits"] = read_exits(found["exits"])
    return found
