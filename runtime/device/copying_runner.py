"""What runners on a device share: runs from and into arrays of the host, copied through memory of the runner's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.open_bundle import Bundle
from ...errors import BundleError, InputError
from ..inputs.arrays import Array
from .layout import Layout, Layouts


class CopyingRunner(ABC):
    """One engine on a device; see ``DeviceRunner``."""

    # What runs as long as it is the same object, None while inactive; calls that are bound keep it.
    _opened: object | None

    def __init__(self, bundle: Bundle, engine: EngineEntry) -> None:
        self.engine = engine
        self._bundle = bundle
        self._where = f"engine {engine.id}"
        self._inputs, outputs = bundle.manifest.interface_of(engine)
        routing = tuple(TensorSpec(entry.name, "int64", entry.shape) for entry in engine.routing or ())
        self._returned = (*outputs, *routing)
        self._layouts = Layouts(self._inputs, self._returned, engine.bucket)
        self._outputs = [spec.name for spec in outputs]
        self._all = [*self._outputs, *(spec.name for spec in routing)]
        self._opened = None

    @abstractmethod
    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs from ``feeds`` into ``outputs``, which fit ``layout``. Raises as ``run`` does."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """See ``Runner.run``. Arrays with strides are copied first.

        Raises InputError for arrays that do not fit or values that the processor refuses, BundleError while inactive or
        where the GPU fails.
        """
        feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        layout = self._layouts.of(feeds)
        names = self._all if routing else self._outputs
        outputs = {name: np.empty(layout.outputs[name].shape, layout.outputs[name].dtype) for name in names}
        self._check(layout.misfit(feeds, outputs))
        self._run(layout, feeds, outputs)
        return list(outputs.values())

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """See ``Runner.bind``. Values still go through page-locked memory of the runner's own."""
        layout = self._layouts.of(feeds)
        self._check(layout.misfit(feeds, outputs))
        opened = self._opened
        if opened is None:
            raise self._not_open()

        def call() -> None:
            if self._opened is not opened:
                raise self._not_open()
            self._run(layout, feeds, outputs)

        return call

    def _check(self, problem: str | None) -> None:
        if problem:
            raise InputError(f"{self._where}: {problem}")

    def _not_open(self) -> BundleError:
        return BundleError(f"{self._where}: not open; run it inside its `with` block")
