"""TensorRT and CUDA as far as the back end uses them, played on the processor: plans run in ONNX Runtime.

What TensorRT really does is not in here: tests with these modules show that our side of the conversation is right,
and tests/unit/compiler/tensorrt/test_contract.py that the real bindings know every word of it. Device memory is host
memory, and a plan is JSON that names its graph. ``World`` (fake_cuda.py) holds what a test may change, and what it
may ask.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.bundle.device_files.plan_index import Gpu, PlanEntry, PlanParity, build_key, write_plans
from nestforge.bundle.files import KEY_VARIABLE
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.bundle.shape_profile import shape_profiles
from nestforge.profiles.device_profile import TensorRTOptions
from support.fake_cuda import ON_A_GPU, FakeCuda, World
from support.sealing import edit_manifest

OPTIONS = TensorRTOptions()
_KINDS = {1: "FLOAT", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF"}
_ARRAYS = {"FLOAT": np.float32, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_, "HALF": np.float16}


class Named(enum.Enum):
    """Enumerators that compare by identity and convert to numbers, as the bindings' do."""

    def __int__(self) -> int:
        return list(type(self)).index(self)


class _Handle:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


def _tensors(graph: Path) -> list[Any]:
    model = onnx.load(graph, load_external_data=False).graph
    updated = {node.output[0]: node.input[0] for node in model.node if node.op_type == "TensorScatter"}
    return [
        _Handle(
            name=value.name,
            is_input=is_input,
            alias=updated.get(value.name),
            dtype=_KINDS[value.type.tensor_type.elem_type],
            dims=tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
            shape=tuple(dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim),
        )
        for is_input, values in ((True, model.input), (False, model.output))
        for value in values
    ]


def make_tensorrt(world: World, cuda: FakeCuda) -> ModuleType:
    """``tensorrt``, on ``world``."""
    trt = world.module = ModuleType("tensorrt")
    severity = Named("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")

    class ILogger:
        Severity = severity

    class IProgressMonitor:
        pass

    class Context:
        def __init__(self, engine: Any, has_memory: bool) -> None:
            self.engine, self.addresses, self.shapes = engine, {}, {}
            self.profile, self.has_memory = 0, has_memory
            self.memory, self.by_shapes = 0, False

        def update_device_memory_size_for_shapes(self) -> int:
            assert self.infer_shapes() == []
            self.by_shapes = True
            return self._needed()

        def _needed(self) -> int:
            tokens = max((int(np.prod(shape)) for shape in self.shapes.values()), default=0)
            return 64 * tokens**2 if self.by_shapes else self.engine.device_memory_size_v2

        def set_device_memory(self, memory: int, size: int) -> None:
            assert len(world.allocated[memory]) == size >= self._needed()
            self.has_memory, self.memory = True, memory

        def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
            world.calls.append(f"profile {profile_index}")
            self.profile, self.shapes = profile_index, {}
            return bool(profile_index < len(self.engine.profiles))

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            world.calls.append(f"shape {'x'.join(map(str, shape))}")
            low, _, high = self.engine.profiles[self.profile][name]
            self.shapes[name] = shape
            return all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True))

        def infer_shapes(self) -> list[str]:
            return [t.name for t in self.engine.tensors if t.is_input and -1 in t.shape and t.name not in self.shapes]

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            inputs = [tensor for tensor in self.engine.tensors if tensor.is_input]
            sizes = {
                dim: size for t in inputs for dim, size in zip(t.dims, self.shapes.get(t.name, t.shape), strict=True)
            }
            tensor = self.engine._tensor(name)
            first, *rest = (sizes.get(dim, dim) for dim in tensor.dims)
            return (first if tensor.is_input else first + world.more_rows, *rest)

        def set_tensor_address(self, name: str, memory: int) -> bool:
            self.addresses[name] = memory
            return True

        def execute_async_v3(self, stream_handle: int) -> bool:
            assert self.infer_shapes() == []
            assert self.has_memory
            assert not self.memory or len(world.allocated[self.memory]) >= self._needed()
            places = {t: (self.addresses[t.name], self.get_tensor_shape(t.name)) for t in self.engine.tensors}
            cuda.submit(stream_handle, lambda: self._execute(places))  # a captured run keeps what it was queued with
            return True

        def _execute(self, places: dict[Any, tuple[int, tuple[int, ...]]]) -> None:
            world.calls.append("run")
            arrays = {tensor.name: _array(address, tensor, shape) for tensor, (address, shape) in places.items()}
            assert all(address == arrays[t.alias].ctypes.data for t, (address, _) in places.items() if t.alias)
            session = self.engine.session()
            found = session.run(None, {t.name: arrays[t.name] for t in self.engine.tensors if t.is_input})
            for tensor, value in zip((t for t in self.engine.tensors if not t.is_input), found, strict=True):
                arrays[tensor.name][...] = value + world.off_by if self.engine.has_weights else 0

    class Engine:
        device_memory_size_v2 = 4096

        def __init__(self, plan: dict[str, Any]) -> None:
            self.graph, self.has_weights = Path(plan["graph"]), not plan["stripped"]
            self.profiles = plan.get("profiles", [])
            self.num_optimization_profiles = max(1, len(self.profiles))
            self.tensors = _tensors(self.graph)
            self.num_io_tensors = len(self.tensors)
            self._session: Any = None

        def session(self) -> Any:
            with world.lock:
                if self._session is None:
                    options = onnxruntime.SessionOptions()
                    options.log_severity_level = 3  # it warns of caches that it copies
                    options.intra_op_num_threads = 1
                    self._session = onnxruntime.InferenceSession(str(self.graph), options)
            return self._session

        def _tensor(self, name: str) -> Any:
            return next(tensor for tensor in self.tensors if tensor.name == name)

        def get_tensor_name(self, index: int) -> str:
            return str(self.tensors[index].name)

        def get_tensor_mode(self, name: str) -> Any:
            return trt.TensorIOMode.INPUT if self._tensor(name).is_input else trt.TensorIOMode.OUTPUT

        def get_tensor_dtype(self, name: str) -> Any:
            return SimpleNamespace(name=self._tensor(name).dtype)

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return tuple(self._tensor(name).shape)

        def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
            return [tuple(shape) for shape in self.profiles[profile_index][name]]

        def get_aliased_input_tensor(self, name: str) -> str | None:
            return self._tensor(name).alias if world.shares else None

        def get_tensor_location(self, name: str) -> Any:
            return trt.TensorLocation.DEVICE

        def create_execution_context(self, strategy: Any = None) -> Context:
            world.calls.append("context")
            return Context(self, has_memory=getattr(strategy, "name", "STATIC") == "STATIC")

        def create_engine_inspector(self) -> Any:
            layers = [{"Name": "a", "LayerType": "gemm"}, {"Name": "b", "LayerType": "Reformat"}]
            text = json.dumps({"Layers": layers, "Bindings": [tensor.name for tensor in self.tensors]})
            return _Handle(get_engine_information=lambda _format: text)

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
            world.calls.append("open")
            if not world.opens:
                self.logger.log(severity.ERROR, "Version tag does not match.\nCurrent 1, expected 2")
                return None
            return Engine(json.loads(plan))

    class Refitter:
        def __init__(self, engine: Engine, logger: Any) -> None:
            self.engine = engine

        def get_missing_weights(self) -> list[str]:
            return list(world.missing)

        def refit_cuda_engine(self) -> bool:
            world.calls.append("refit")
            self.engine.has_weights = True
            return True

    class OnnxParserRefitter:
        num_errors = 0

        def __init__(self, refitter: Refitter, logger: Any) -> None:
            pass

        def refit_from_file(self, model: str) -> bool:
            return Path(model).is_absolute() and Path(model).is_file()

    class Builder:
        def __init__(self, logger: Any) -> None:
            if not world.starts:
                logger.log(severity.ERROR, "CUDA initialization failure with error: 35")
                raise TypeError("pybind11::init(): factory function returned nullptr")
            self.logger = logger

        def create_network(self, flags: int) -> Any:
            assert flags == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
            return _Handle(graph=None, num_inputs=0)

        def create_builder_config(self) -> Any:
            return Config()

        def create_optimization_profile(self) -> Any:
            shapes: dict[str, Any] = {}
            return _Handle(shapes=shapes, set_shape=lambda name, *three: shapes.update({name: three}))

        def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
            world.calls.append("build")
            monitor = config.progress_monitor
            monitor.phase_start("Building", None, world.steps)
            monitor.phase_start("Tactics", "Building", 1)
            goes_on = all(monitor.step_complete("Building", step) for step in range(world.steps))
            monitor.phase_finish("Building")
            if not goes_on or not world.builds:
                self.logger.log(severity.ERROR, "Could not find any implementation for node")
                return None
            config.cache.entries += b"+" + Path(network.graph).name.encode()
            profiles, inputs = config.profiles, [network.get_input(index) for index in range(network.num_inputs)]
            free = {tensor.name for tensor in inputs if -1 in tensor.shape}
            assert all(profile.keys() == free for profile in profiles)
            assert bool(profiles) == bool(free)
            plan = {"graph": str(network.graph), "stripped": "STRIP_PLAN" in config.flags, "profiles": profiles}
            return json.dumps(plan).encode()

    class Cache:
        def __init__(self, entries: bytes) -> None:
            self.entries = entries

        def combine(self, others: Cache, ignore_mismatch: bool) -> bool:
            assert not ignore_mismatch
            self.entries += b"".join(b"+" + e for e in others.entries.split(b"+") if e and e not in self.entries)
            return True

        def serialize(self) -> bytes:
            return self.entries

    class Config:
        def __init__(self) -> None:
            world.config.clear()
            self.flags = {"TF32"}
            self.progress_monitor: Any = None
            self.profiles: list[dict[str, Any]] = []

        def __setattr__(self, name: str, value: Any) -> None:
            self.__dict__[name] = value
            world.config[name] = value

        def set_flag(self, flag: Named) -> None:
            self.flags.add(flag.name)

        def clear_flag(self, flag: Named) -> None:
            self.flags.discard(flag.name)

        def set_memory_pool_limit(self, pool: Named, pool_size: int) -> None:
            world.config[pool.name] = pool_size

        def create_timing_cache(self, serialized_timing_cache: bytes) -> Cache:
            return Cache(serialized_timing_cache)

        def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
            assert not ignore_mismatch
            self.cache = cache
            return not cache.entries.startswith(b"damaged")

        def add_optimization_profile(self, profile: Any) -> int:
            self.profiles.append(profile.shapes)
            return len(self.profiles) - 1

    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self.network = network
            self.num_errors = 0 if world.parses else 1

        def parse_from_file(self, model: str) -> bool:
            inputs = [tensor for tensor in _tensors(Path(model)) if tensor.is_input]
            self.network.graph, self.network.num_inputs = model, len(inputs)
            self.network.get_input = inputs.__getitem__
            return world.parses

        def get_error(self, index: int) -> Any:
            return _Handle(desc=lambda: "No importer registered\nfor op: Unique")

    trt.__dict__.update(
        __version__=world.version,
        ExecutionContextAllocationStrategy=Named("ExecutionContextAllocationStrategy", "STATIC USER_MANAGED"),
        BuilderFlag=Named("BuilderFlag", "DEBUG TF32 STRIP_PLAN VERSION_COMPATIBLE"),
        HardwareCompatibilityLevel=Named("HardwareCompatibilityLevel", "NONE AMPERE_PLUS"),
        LayerInformationFormat=Named("LayerInformationFormat", "ONELINE JSON"),
        MemoryPoolType=Named("MemoryPoolType", "WORKSPACE"),
        NetworkDefinitionCreationFlag=Named("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH STRONGLY_TYPED"),
        ProfilingVerbosity=Named("ProfilingVerbosity", "LAYER_NAMES_ONLY DETAILED"),
        TensorIOMode=Named("TensorIOMode", "NONE INPUT OUTPUT"),
        TensorLocation=Named("TensorLocation", "DEVICE HOST"),
        Dims=tuple,
        **{cls.__name__: cls for cls in (ILogger, IProgressMonitor, Runtime, Refitter, OnnxParserRefitter)},
        **{cls.__name__: cls for cls in (Builder, OnnxParser)},
        **dict.fromkeys(("ICudaEngine", "IExecutionContext", "IHostMemory", "IBuilderConfig"), object),
    )
    return trt


def _array(address: int, tensor: Any, shape: tuple[int, ...]) -> np.ndarray:
    kind = np.dtype(_ARRAYS[tensor.dtype])
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind).reshape(shape)


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Both modules stand in for the real ones; our own are imported afresh, and again afterwards."""
    cuda = FakeCuda(world)
    package: Any = ModuleType("cuda")
    bindings: Any = ModuleType("cuda.bindings")
    package.bindings, bindings.runtime = bindings, cuda
    fakes = {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.runtime": cuda}
    fakes["tensorrt"] = make_tensorrt(world, cuda)
    ours = [f"nestforge.{name}" for name in ON_A_GPU]  # they keep the modules that they found first
    before = {name: _forgotten(name) for name in (*fakes, *ours)}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name, module in before.items():
            _forgotten(name)
            if module is not None:
                sys.modules[name] = module
                _set_in_package(name, module)


def _forgotten(name: str) -> ModuleType | None:
    """The module of that name, which the next import of it, from its package too, makes anew."""
    module = sys.modules.pop(name, None)
    _set_in_package(name, None)
    return module


def _set_in_package(name: str, module: ModuleType | None) -> None:
    package, _, own = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(own, None)
        if module is not None:
            setattr(sys.modules[package], own, module)


@contextmanager
def host_with_gpu(cache: Path, **facts: Any) -> Iterator[World]:
    """A host whose stand-ins are installed and whose private files lie in ``cache``; ``facts`` are of its World."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.delenv(KEY_VARIABLE, raising=False)
        world = World(**facts)
        with installed(world):
            yield world
    assert not world.allocated  # whatever a test does, nothing stays allocated


def list_plans(bundle: Path, target: Path, options: TensorRTOptions = OPTIONS) -> Bundle:
    """A copy of ``bundle`` whose engines are plans as this module builds them, all of them listed."""
    shutil.copytree(bundle, target)
    edit_manifest(target, lambda data: [engine.update(backend="tensorrt") for engine in data["engines"]])
    opened, gpu = open_bundle(target), Gpu("Fake GPU", "8.7", "10.3.0")
    plans = []
    for engine in {engine.file: engine for engine in opened.manifest.engines}.values():
        inputs = () if engine.bucket.is_static else opened.manifest.interface_of(engine)[0]
        profiles = [
            {spec.name: profile.shapes(spec) for spec in inputs} for profile in shape_profiles(opened.manifest, engine)
        ]
        graph, stripped = str(opened.file(engine.file)), options.strip_weights
        plan = json.dumps({"graph": graph, "stripped": stripped, "profiles": profiles}).encode()
        file = engine.file.replace(".onnx", ".plan")
        opened.file(file).write_bytes(plan)
        sha256, key = hashlib.sha256(plan).hexdigest(), build_key(opened, engine, gpu, options)
        parity = PlanParity("the graph", "exact", 1, 0.0, 1.0)
        plans.append(PlanEntry(engine.file, file, len(plan), sha256, key, gpu, options, 4096, 1.0, {"gemm": 2}, parity))
    write_plans(opened, plans)
    return opened
