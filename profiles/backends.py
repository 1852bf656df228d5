"""The table of back ends: what each takes, builds and needs, in one entry.

The module of the runtime that an entry names (``Opener`` in runtime/engines/runner.py) runs engines, and one of the
compiler finishes graphs: neither is imported before it is requested, and a device has no compiler.
Which precisions a back end runs is stated by those (precision.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

BackendName = Literal["onnxruntime", "tensorrt", "openvino"]
# Kinds of engine beside whole ones: segments of a model with exits, those that generate, those that take tasks.
EngineKind = Literal["segments", "generation", "tasks"]


@dataclass(frozen=True)
class Backend:
    """One back end.

    ``title`` is its name in sentences, ``module`` what Python imports, from one of ``distributions``, and ``extra``
    nestforge's that installs it. ``provider`` is what ONNX Runtime calls it. ``opener`` is the module of the runtime
    that opens its engines, and ``finisher`` that of the compiler whose ``accepted`` brings a graph into its operators.
    ``kinds`` are its engines beside whole ones. ``runs_graphs``: it opens a graph as it is, on the processor, so that
    engines are proven and measured where they are compiled; of any other a plan is built on the device, and ONNX
    Runtime proves the graph. ``judged_by_itself``: the gate judges its own answers, not ONNX Runtime's to the same
    graph, which alone has values inside to look at. ``own_operators``: its graphs have operators and layouts of ONNX
    Runtime's kernels for processors. ``widens_half``: half-precision numbers are computed with in float32.
    ``shares_weights``: engines can read the weight store in place. ``fixed_caches``: caches of engines that generate
    have one capacity. ``caches_integers``: such engines may have integer products. ``takes_computed_counts``: how many
    tokens an encoder selects may follow from a prompt's length. ``static_segments``: segments hand on memory of one
    shape. ``generation_note`` is said where engines generate."""

    name: BackendName
    title: str
    module: str
    distributions: tuple[str, ...]
    extra: str
    opener: str
    kinds: frozenset[EngineKind]
    provider: str
    finisher: str | None = None
    runs_graphs: bool = True
    judged_by_itself: bool = False
    own_operators: bool = False
    widens_half: bool = False
    shares_weights: bool = False
    fixed_caches: bool = False
    caches_integers: bool = False
    takes_computed_counts: bool = True
    static_segments: bool = False
    generation_note: str | None = None


ONNXRUNTIME = Backend(
    name="onnxruntime",
    title="ONNX Runtime",
    module="onnxruntime",
    distributions=("onnxruntime", "onnxruntime-gpu"),
    extra="cpu",
    opener="runtime.engines.onnxruntime",
    kinds=frozenset({"segments", "generation", "tasks"}),
    provider="CPUExecutionProvider",
    own_operators=True,
    widens_half=True,
    shares_weights=True,
    caches_integers=True,
)
TENSORRT = Backend(
    name="tensorrt",
    title="TensorRT",
    module="tensorrt",
    distributions=("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    extra="tensorrt",
    opener="runtime.engines.tensorrt",
    finisher="compiler.tensorrt.graphs",
    kinds=frozenset({"segments", "generation"}),
    provider="TensorrtExecutionProvider",
    runs_graphs=False,
    fixed_caches=True,
    takes_computed_counts=False,
    static_segments=True,
    generation_note="KV-cache engines are for TensorRT 10.15 or later; their plans have not run on a GPU yet",
)
OPENVINO = Backend(
    name="openvino",
    title="OpenVINO",
    module="openvino",
    distributions=("openvino",),
    extra="openvino",
    opener="runtime.engines.openvino",
    kinds=frozenset(),
    provider="OpenVINOExecutionProvider",
    judged_by_itself=True,
)
BACKENDS: Mapping[str, Backend] = MappingProxyType({one.name: one for one in (ONNXRUNTIME, TENSORRT, OPENVINO)})
