"""Names the first module at which an engine leaves the PyTorch submodel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

from ..elastic import Submodel
from ..exporters.universal import PREFIX
from .parity import Arrays, Tolerance, within
from .precision.twin import twin
from .store import Store
from .template import Template, emit

NOWHERE = "no module alone breaks the rule; rounding grows over the whole depth"


def first_divergence(
    template: Template,
    store: Store,
    submodel: Submodel,
    module: torch.nn.Module,
    feeds: Mapping[str, np.ndarray],
    limit: Tolerance,
    folder: Path,
    run: Callable[[Arrays], object],
) -> str:
    """``encoder.layer.3.output.dense (max abs 0.31)``: the first module, in graph order, whose output breaks the rule.

    ``module`` is the narrowed reference, of which ``run`` makes a pass on ``feeds`` (``reference.pass_of``); the graph
    is emitted again with every module's value as an output. ``folder`` holds the weight store. NOWHERE if none does.
    """
    expected = _module_values(module, feeds, run)
    found = _graph_values(template, store, submodel, feeds, folder)
    for name, value in found.items():
        if name in expected and expected[name].size == value.size:
            reference = expected[name].reshape(value.shape)
            if not within(reference, value, limit):
                difference = float(np.abs(reference - value).max())
                return f"{name} (max abs {difference:.3g})"
    return NOWHERE


def _module_values(
    module: torch.nn.Module, feeds: Mapping[str, np.ndarray], run: Callable[[Arrays], object]
) -> dict[str, np.ndarray]:
    """The first output of every submodule."""
    values: dict[str, np.ndarray] = {}

    def keep(name: str, output: object) -> None:
        first = next(iter(output.values()), None) if isinstance(output, Mapping) else output
        first = first[0] if isinstance(first, (tuple, list)) and first else first
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            values[name] = first.detach().numpy().copy()

    hooks = [
        part.register_forward_hook(lambda _m, _i, output, name=name: keep(name.removeprefix(PREFIX), output))
        for name, part in module.named_modules()
        if name
    ]
    try:
        run(feeds)
    finally:
        for hook in hooks:
            hook.remove()
    return values


def _graph_values(
    template: Template, store: Store, submodel: Submodel, feeds: Mapping[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """The value of every module that the graph still has, in the order in which the graph computes them."""
    graph = emit(template, store, submodel)
    if template.precision == "bf16":
        graph = twin(graph)
    model = onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(graph))
    known = (*model.graph.value_info, *model.graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in known}
    modules: dict[str, list[str]] = {}
    for module, value in template.module_outputs.items():
        modules.setdefault(value, []).append(module)
    wanted = [
        name
        for node in model.graph.node
        for name in node.output
        if name in modules and kinds.get(name) in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    ]
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, kinds[name], None) for name in wanted)
    path = folder / "divergence.onnx"
    path.write_bytes(model.SerializeToString())
    try:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        arrays = session.run(wanted, dict(feeds))
    finally:
        path.unlink()
    # Where several modules return the same value, the innermost (longest) name says most.
    return {max(modules[name], key=len): array for name, array in zip(wanted, arrays, strict=True)}
