"""Engines that generate, as TensorRT plans: what they keep of tokens stays on the GPU, in memory of the caller's.

A plan updates a cache in place: its input and its output are bound to one address, so that a run copies new tokens over
and logits back (cache_runs.py). What an encoder makes of a prompt is an output there, and an input of the decoder's
plan. All runs of an engine are queued in the device's stream, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorrt as trt

from ....bundle.device_files.plan_index import PlanEntry
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.generation_entry import ENCODER
from ....bundle.open_bundle import Bundle
from ...device.cached_layout import CachedRun, CachedRunner
from ...device.cuda_device import take_cuda_device
from ...device.cuda_memory import use_device
from ...inputs.arrays import Array
from .cache_runs import CacheContext, CacheRun
from .engine import Log, inspected, open_plan


class TensorRTCacheRunner(CachedRunner):
    """One engine on one GPU; see ``CacheRunner``. ``plan`` may be given by who has just built it."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, device: int = 0, plan: PlanEntry | None = None) -> None:
        super().__init__(bundle, engine)
        self._index, self._plan = device, plan
        self._log = Log()
        self._opened: trt.ICudaEngine | None = None
        self._context: CacheContext | None = None

    def __enter__(self) -> TensorRTCacheRunner:
        """Opens the plan. Raises BundleCorruptError or BundleIncompatibleError."""
        self._device = device = take_cuda_device(self._index)
        try:
            with device.lock:
                use_device(self._index)
                self._opened = opened = open_plan(
                    self._bundle,
                    self.engine,
                    self._plan,
                    self._index,
                    self._layouts.interface,
                    self._layouts.smallest.bytes,
                    self._log,
                )
                profile = self._layouts.profiles[0]
                usual = {spec.name: profile.shapes(spec)[1] for spec in self._layouts.inputs}
                self._context = CacheContext(
                    self._where, opened, device, usual if self.engine.segment == ENCODER else None
                )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _bind(self, bound: CachedRun, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> CacheRun:
        use_device(self._index)
        if self._context is None:
            raise self._not_open()
        return CacheRun(self._context, bound, feeds, outputs, self._runs.discard)

    def _close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._opened = self._context = None

    def inspect(self) -> str:
        """TensorRT's engine, as the JSON of its engine inspector. Raises BundleError while inactive."""
        return inspected(self._require_open())

    @property
    def activation_bytes(self) -> int:
        """Device memory that one run takes beside its inputs and outputs, of a prompt a usual one. Raises BundleError
        while inactive."""
        self._require_open()
        assert self._context is not None
        return self._context.usual_bytes

    def _require_open(self) -> trt.ICudaEngine:
        if self._opened is None:
            raise self._not_open()
        return self._opened
