"""Micro-benchmarks of this host: the rates that an ONNX Runtime engine of an encoder will see, in about four seconds.

Each is a chain of operations on one tensor, run by ONNX Runtime where the ``onnx`` package can write the chain down, by
numpy otherwise. The two differ, so ``Rates.source`` says which it was. Integer products are ONNX Runtime's alone, with
the kernels of compiler/graph/precision/quantize.py, of which nothing is imported: a profile is made on devices
without a compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import util
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil

from .device_profile import ProductRates, Rates
from .precision import PRECISIONS

if TYPE_CHECKING:
    import onnx


Array = npt.NDArray[np.float32]
Constants = Mapping[str, npt.NDArray[Any]]
DOMAIN = "com.microsoft"
_ROUNDING = ("step", "middle", "last")  # of activations: the scale, the integer of 0, and the axis of a row
_ACCURACY_INT8_SUMS = 4  # activations become int8, so that the sums are integer sums
_TIMED_ROUNDS = 5
_SECONDS_PER_ROUND = 0.08
_READ_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Chain:
    """``steps`` (operator, its operand if any) on one tensor of ``shape``, ``repeat`` times over.

    Operands of ``Gemm`` are ``[n, k]``, and so are those of ``QGemm``, of the same with a scale for each row
    (``QGemmOfRows``) and of ``MatMulNBits`` in blocks of 32 and 128 inputs, which integer engines use.
    ``work`` counts FLOPs, bytes or operations of one repetition. ``weights``: operands are constants of the graph.
    """

    shape: tuple[int, ...]
    steps: tuple[tuple[str, str | None], ...]
    operands: Mapping[str, tuple[int, ...]]
    repeat: int
    work: int
    weights: bool = True

    def values(self) -> dict[str, Array]:
        """The operands and the input ``x``, scaled so that no chain overflows or decays."""
        random = np.random.default_rng(0)
        shapes = {"x": self.shape, **self.operands}
        return {
            name: (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
            for name, shape in shapes.items()
        }


# An encoder at 128 tokens: hidden size 384, feed-forward 1536, 12 heads of 32.
CHAINS = {
    "gemm": Chain(
        (128, 384),
        (("Gemm", "up"), ("Gemm", "down")),
        {"up": (1536, 384), "down": (384, 1536)},
        6,
        4 * 128 * 384 * 1536,
    ),
    "batched_gemm": Chain(
        (1, 12, 128, 32),
        (("MatMul", "keys"), ("MatMul", "values")),
        {"keys": (1, 12, 32, 128), "values": (1, 12, 128, 32)},
        6,
        4 * 12 * 128 * 128 * 32,
        weights=False,
    ),
    # Add reads two tensors and writes one; Gelu, and LayerNormalization, read and write one.
    "elementwise": Chain(
        (128, 1536),
        (("Add", "y"), ("Gelu", None), ("LayerNormalization", "scale")),
        {"y": (128, 1536), "scale": (1536,)},
        4,
        7 * 4 * 128 * 1536,
    ),
    "tiny": Chain((1, 8), (("Add", "y"),), {"y": (1, 8)}, 200, 1),
}
# The products of "gemm" in other precisions. Inputs of the second shrink in an engine, so that of int4 it has 8 bits.
CHAINS_BY_PRECISION: Mapping[str, Chain] = {
    precision: replace(CHAINS["gemm"], steps=((spec.rated_by[0], "up"), (spec.rated_by[1], "down")))
    for precision, spec in PRECISIONS.items()
    if spec.rated_by is not None
}
# The largest activation of a chain, as calibration would find it: 5 times their rms.
_LARGEST_VALUE = 5 / np.sqrt(384)


def measure_host_rates(cores: int) -> Rates:
    """Measures every rate with ``cores`` threads; those of integer products where the ``onnx`` package is there."""
    runs: dict[str, Callable[[], object]]
    chains = dict(CHAINS)
    if util.find_spec("onnx"):
        import onnxruntime

        source = f"onnxruntime {onnxruntime.__version__}"
        chains |= CHAINS_BY_PRECISION
        runs = {name: onnxruntime_run(chain, cores) for name, chain in chains.items()}
    else:
        source = f"numpy {np.__version__}"
        runs = {name: numpy_run(chain) for name, chain in chains.items()}
    with ThreadPoolExecutor(cores) as pool:
        parts = np.array_split(_large_array(), cores)
        seconds = _fastest({**runs, "read": lambda: list(pool.map(np.max, parts))})
    rate = {name: chain.repeat * chain.work / seconds[name] for name, chain in chains.items()}
    batched = rate["batched_gemm"] / 1e9  # of two activations, which stay in float32
    integers = {name: ProductRates(rate[name] / 1e9, batched) for name in CHAINS_BY_PRECISION if name in rate}
    return Rates(
        gemm_gflops=rate["gemm"] / 1e9,
        batched_gemm_gflops=batched,
        elementwise_gb_s=rate["elementwise"] / 1e9,
        bandwidth_gb_s=sum(part.nbytes for part in parts) / seconds["read"] / 1e9,
        op_overhead_us=1e6 / rate["tiny"],
        source=f"measured on this host with {source}",
        at=integers or None,
    )


def numpy_run(chain: Chain) -> Callable[[], Array]:
    """A call that runs ``chain`` in numpy and returns the last tensor."""
    values = chain.values()

    def run() -> Array:
        x = values["x"]
        for operator, operand in chain.steps * chain.repeat:
            x = _NUMPY_KERNELS[operator](x, *([values[operand]] if operand else []))
        return x

    return run


def onnxruntime_run(chain: Chain, cores: int) -> Callable[[], Array]:
    """A call that runs ``chain`` in an ONNX Runtime session of ``cores`` threads and returns the last tensor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores
    # The graph runs as it is written: no fusion, so that every operation is counted once.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # One session must not spin on the cores that the next one is measured on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(_onnx_bytes(chain), options, providers=["CPUExecutionProvider"])
    values = chain.values()
    feeds = {entry.name: values[entry.name] for entry in session.get_inputs()}

    def run() -> Array:
        return session.run(None, feeds)[0]

    return run


def _onnx_bytes(chain: Chain) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    nodes, x, values = [], "x", chain.values()
    for index, (operator, operand) in enumerate(chain.steps * chain.repeat):
        y = f"t{index}"
        if operator in _INTEGER_NODES and operand:
            nodes += _INTEGER_NODES[operator](x, operand, y)
        elif operator in _BLOCKS and operand:
            nodes += matmul_nbits(x, operand, y, chain.operands[operand], _BLOCKS[operator])
        else:
            attributes: dict[str, Any] = {"transB": 1} if operator == "Gemm" else {}
            nodes.append(helper.make_node(operator, [x, operand] if operand else [x], [y], **attributes))
        x = y
    constants = values.keys() - {"x"} if chain.weights else set()
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape)
        for name, value in values.items()
        if name not in constants
    ]
    output = helper.make_tensor_value_info(x, TensorProto.FLOAT, chain.shape)
    encode = {operand: _ENCODERS[operator] for operator, operand in chain.steps if operator in _ENCODERS}
    stored: dict[str, npt.NDArray[Any]] = {}
    for name in sorted(constants):
        stored |= encode[name](name, values[name]) if name in encode else {name: values[name]}
    read = {name for node in nodes for name in node.input}  # ONNX Runtime warns of what no node reads
    weights = [numpy_helper.from_array(value, name) for name, value in stored.items() if name in read]
    graph = helper.make_graph(nodes, "chain", inputs, [output], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


def _fastest(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest run of each: other work on the host slows some runs down, and nothing speeds one up.

    In several rounds, for that work comes in bursts longer than one round.
    """
    best = dict.fromkeys(runs, inf)
    for _ in range(_TIMED_ROUNDS):
        for name, run in runs.items():
            run()
            end = time.perf_counter() + _SECONDS_PER_ROUND
            while True:
                start = time.perf_counter()
                run()
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                if now >= end:
                    break
    return best


def _large_array() -> Array:
    """More than any cache holds, and no more than the host can spare."""
    return np.ones(min(_READ_BYTES, int(psutil.virtual_memory().available) // 8) // 4, np.float32)


_NUMPY_KERNELS: dict[str, Callable[..., Any]] = {
    "Gemm": lambda x, weight: x @ weight.T,
    "MatMul": np.matmul,
    "Add": np.add,
    "Gelu": lambda x: x * (0.5 + 0.5 * np.tanh(x)),
    "LayerNormalization": lambda x, scale: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5) * scale,
}


def qgemm(x: str, weight: str, y: str) -> list[onnx.NodeProto]:
    """``y = x weight^T`` of uint8 activations, by one constant scale, and weights of 8 bits."""
    from onnx import helper

    *weights, step, middle, _ = _names(weight, "zero", *_ROUNDING)
    quantised = [f"{y}.integers", step, middle]
    return [
        helper.make_node("QuantizeLinear", [x, step, middle], quantised[:1]),
        helper.make_node("QGemm", [*quantised, *weights], [y], domain=DOMAIN, transB=1),
    ]


def qgemm_of_rows(x: str, weight: str, y: str) -> list[onnx.NodeProto]:
    """As ``qgemm``, in units of the largest magnitude of each row of activations, so that these have scales of their
    own."""
    from onnx import helper

    sizes, largest, units, sums = (f"{y}.{part}" for part in ("sizes", "largest", "units", "sums"))
    return [
        helper.make_node("Abs", [x], [sizes]),
        helper.make_node("ReduceMax", [sizes, _names(weight, *_ROUNDING)[-1]], [largest]),
        helper.make_node("Div", [x, largest], [units]),
        *qgemm(units, weight, sums),
        helper.make_node("Mul", [sums, largest], [y]),
    ]


def qgemm_constants(name: str, weight: npt.NDArray[np.float32], largest: float) -> Constants:
    """int8 ``[n, k]``, and a scale and a zero point for each output; and what rounds activations, of which ``largest``
    becomes 127."""
    scale = np.abs(weight).max(axis=1) / 127
    integers = np.rint(weight / scale[:, None]).astype(np.int8)
    rounding = (np.array(largest / 127, np.float32), np.array(128, np.uint8), np.array([-1], np.int64))
    values = (integers, scale, np.zeros(len(weight), np.int8), *rounding)
    return dict(zip(_names(name, "zero", *_ROUNDING), values, strict=True))


def matmul_nbits(x: str, weight: str, y: str, shape: tuple[int, ...], block: int) -> list[onnx.NodeProto]:
    """``y = x weight^T`` of weights ``[n, k]`` of 4 bits; ``k`` is a multiple of the inputs of a ``block``."""
    from onnx import helper

    outputs, inputs = shape
    node = helper.make_node("MatMulNBits", [x, *_names(weight)], [y], domain=DOMAIN, K=inputs, N=outputs)
    how = {"bits": 4, "block_size": block, "accuracy_level": _ACCURACY_INT8_SUMS}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in how.items())
    return [node]


def matmul_nbits_constants(name: str, weight: npt.NDArray[np.float32], block: int) -> Constants:
    """uint8 ``[n, k / block, block / 2]``, two weights a byte, the first in the low half; and scales."""
    blocks = weight.reshape(len(weight), -1, block)
    scale = np.abs(blocks).max(axis=2) / 7
    integers = (np.rint(blocks / scale[:, :, None]) + 8).astype(np.uint8)
    return dict(zip(_names(name), (integers[..., ::2] | integers[..., 1::2] << 4, scale), strict=True))


def _names(weight: str, *more: str) -> list[str]:
    return [f"{weight}.{part}" for part in ("integers", "scale", *more)]


_BLOCKS = {"MatMulNBits": 32, "MatMulNBits128": 128}
_INTEGER_NODES = {"QGemm": qgemm, "QGemmOfRows": qgemm_of_rows}
_ENCODERS: Mapping[str, Callable[[str, Array], Mapping[str, npt.NDArray[Any]]]] = {
    "QGemm": partial(qgemm_constants, largest=_LARGEST_VALUE),
    "QGemmOfRows": partial(qgemm_constants, largest=1.0),
    **{name: partial(matmul_nbits_constants, block=block) for name, block in _BLOCKS.items()},
}
