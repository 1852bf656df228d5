"""Values inside of a model and inside of a graph, by which the first module is found where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from ...exporters.torch_internals import tree_flatten, tree_unflatten

_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)")
Seen = Callable[[str, str, torch.Tensor], torch.Tensor | None]


@contextmanager
def watched(module: torch.nn.Module, seen: Seen) -> Iterator[None]:
    """Within it ``seen`` is given the first float tensor that goes ``in`` and that comes ``out`` of every submodule,
    by its path, and may return another in its place."""

    def shown(path: str, side: str, value: Any) -> Any:
        leaves, form = tree_flatten(value)
        floats = (n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        place = next(floats, None)
        if place is None or (other := seen(path, side, leaves[place])) is None:
            return None
        return tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], form)

    with ExitStack() as undo:
        for path, part in module.named_modules():
            if path:
                before = lambda _m, args, named, path=path: shown(path, "in", (args, named))  # noqa: E731
                undo.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                undo.callback(part.register_forward_hook(lambda _m, _i, out, path=path: shown(path, "out", out)).remove)
        yield


def open_graph(graph: onnx.ModelProto, folder: Path, library: Path | None = None) -> onnxruntime.InferenceSession:
    """ONNX Runtime on the processor, whose weights stay in the files of ``folder`` where they lie; ``library`` has
    operators of its own."""
    return _opened(graph, folder, library, onnxruntime.SessionOptions())


def open_values(
    graph: onnx.ModelProto, names: list[str], folder: Path, library: Path | None = None
) -> tuple[onnxruntime.InferenceSession, list[str]]:
    """The same computing ``graph`` as it is written, no value fused away, and those of its values ``names`` that are
    floats, which the session returns."""
    shown = onnx.ModelProto()
    shown.CopyFrom(graph)
    del shown.graph.output[:]
    for name in names:
        shown.graph.output.add(name=name)  # its type is inferred, behind any operator
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = _opened(shown, folder, library, options)
    return session, [value.name for value in session.get_outputs() if value.type in _FLOATS]


def _opened(graph: onnx.ModelProto, folder: Path, library: Path | None, options: Any) -> onnxruntime.InferenceSession:
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.add_session_config_entry("session.disable_prepacking", "1")  # which copies weights
    if library is not None:
        options.register_custom_ops_library(str(library))
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=providers, enable_fallback=0)
