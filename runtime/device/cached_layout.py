"""Arrays of the host and memory of the device that a run of an engine that generates is bound to; such
runs, and runners of them alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import ON_DEVICE, PAST, PRESENT
from ...bundle.open_bundle import Bundle
from ...bundle.shape_profile import shape_profiles
from ...errors import BundleError, InputError
from ..inputs.arrays import Array, named_sizes
from .device import Device, DeviceArray, DeviceCall
from .layout import Layout, layout_of, routes_of

# As ``CacheRunner.bind_cache``.
Bind = Callable[[Mapping[str, Array], Mapping[str, Array], Mapping[str, DeviceArray]], DeviceCall]


@dataclass(frozen=True)
class CachedRun:
    """One run's arrays: ``layout`` of those that are copied, and by the names of inputs and of outputs what lies on the
    device; a cache is both. ``profile`` is the number of the engine's shape profile that takes it."""

    profile: int
    layout: Layout
    read: Mapping[str, DeviceArray]
    written: Mapping[str, DeviceArray]


class CachedLayouts:
    """The runs of one engine."""

    def __init__(self, bundle: Bundle, engine: EngineEntry) -> None:
        self._where = f"engine {engine.id}"
        inputs, outputs = bundle.manifest.interface_of(engine)
        outputs += routes_of(engine)
        self.interface = inputs, outputs
        self.inputs = [spec for spec in inputs if not spec.name.startswith(ON_DEVICE)]
        self.outputs = [spec for spec in outputs if not spec.name.startswith((PRESENT, *ON_DEVICE))]
        # Arrays on the device: those that runs read, a cache and what they update in place among it, and what they
        # make.
        self.read = [spec for spec in inputs if spec.name.startswith(ON_DEVICE)]
        self.made = [spec for spec in outputs if spec.name.startswith(ON_DEVICE)]
        self.profiles = shape_profiles(bundle.manifest, engine)

    @property
    def smallest(self) -> Layout:
        """That of one token of one row."""
        return layout_of(self.inputs, self.outputs, Bucket(1, 1), dict.fromkeys(self.profiles[0].most, 1))

    def run(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array], caches: Mapping[str, DeviceArray]
    ) -> CachedRun:
        """The run that ``CacheRunner.bind_cache`` binds. Raises InputError for arrays that do not fit."""
        sizes = named_sizes([*self.inputs, *self.read], {**caches, **feeds})
        number = next((number for number, profile in enumerate(self.profiles) if profile.takes(sizes)), None)
        if number is None:
            taken = ", ".join(str(profile.bucket) for profile in self.profiles)
            raise InputError(f"{self._where}: a run of {sizes}; expected one within {taken}")
        bucket = Bucket(sizes["batch"], sizes["sequence"])
        layout = layout_of(self.inputs, self.outputs, bucket, sizes)
        if problem := layout.misfit(feeds, outputs) or self._misfit(caches, bucket, sizes):
            raise InputError(f"{self._where}: {problem}")
        read, made = ({spec.name: caches[spec.name] for spec in specs} for specs in (self.read, self.made))
        updated = {PRESENT + name.removeprefix(PAST): array for name, array in read.items() if name.startswith(PAST)}
        return CachedRun(number, layout, read, {**updated, **made})

    def _misfit(self, caches: Mapping[str, DeviceArray], bucket: Bucket, sizes: Mapping[str, int]) -> str | None:
        """Why ``caches`` is not what the engine keeps at these sizes, or None."""
        specs = {spec.name: spec for spec in (*self.read, *self.made)}
        if caches.keys() != specs.keys():
            return f"caches are {', '.join(caches)}; it has {', '.join(specs)}"
        for name, spec in specs.items():
            array, shape = caches[name], spec.shape(bucket, sizes)
            if (array.dtype, array.shape) != (spec.dtype, shape):
                return f"{name}: expected {spec.dtype} {list(shape)}, got {array.dtype} {list(array.shape)}"
        return None


class HostRun(ABC):
    """A call that runs from arrays of the host into arrays of the host, and returns once they are written."""

    def __init__(
        self,
        where: str,
        device: Device,
        bound: CachedRun,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        forget: Callable[[HostRun], None],
    ) -> None:
        """``forget`` is called when the run is closed. Made under the device's lock. Raises BundleIncompatibleError
        where memory is short."""
        self._where, self._device, self._layout, self._forget = where, device, bound.layout, forget
        self._feeds, self._outputs = feeds, outputs
        self._block = device.allocate(self._layout.bytes)
        with ExitStack() as stack:
            stack.callback(device.free, self._block)
            self._staging = device.staging(self._layout.bytes)
            stack.callback(device.free_staging, self._staging)
            self._place(bound)
            stack.pop_all()
        self._is_open = True

    @abstractmethod
    def _place(self, bound: CachedRun) -> None:
        """Tells the engine where its tensors lie: in ``_block``, and where those of ``bound`` do."""

    @property
    @abstractmethod
    def is_captured(self) -> bool:
        """Whether the next run starts as one CUDA graph."""

    @abstractmethod
    def _queue(self) -> None:
        """Queues a run: inputs from ``_staging`` to ``_block``, the engine, and wanted outputs back."""

    def _ran(self) -> None:  # noqa: B027  (most have nothing to do)
        """Called once a run is done."""

    @abstractmethod
    def _release(self) -> None:
        """Waits for a run that was interrupted, and lets go of what runs it."""

    def __call__(self) -> None:
        """Raises BundleError where the GPU fails, or once the run or the engine is closed."""
        with self._device.lock:
            if not self._is_open:
                raise BundleError(f"{self._where}: not open; run it inside its `with` block")
            self._layout.fill(self._staging, self._feeds)
            self._queue()
            self._device.wait()
            self._layout.read(self._staging, self._outputs)
            self._ran()

    def close(self) -> None:
        """See ``DeviceCall.close``."""
        with self._device.lock:
            is_open, self._is_open = self._is_open, False
            if is_open:
                with ExitStack() as stack:
                    stack.callback(self._device.free_staging, self._staging)
                    stack.callback(self._device.free, self._block)
                    stack.callback(self._forget, self)
                    self._release()


class CachedRunner(ABC):
    """One engine that generates on a device, which it has while it is open; see ``CacheRunner``."""

    def __init__(self, bundle: Bundle, engine: EngineEntry) -> None:
        self.engine = engine
        self._bundle = bundle
        self._where = f"engine {engine.id}"
        self._layouts = CachedLayouts(bundle, engine)
        self._device: Device | None = None
        self._runs: set[HostRun] = set()

    def __exit__(self, *_: object) -> None:
        """Closes every run that is bound; they fail afterwards."""
        device, self._device = self._device, None
        if device is None:
            return
        with ExitStack() as stack:  # what fails keeps nothing else from being given back
            stack.callback(device.release)
            stack.enter_context(device.lock)
            stack.callback(self._close)
            for run in tuple(self._runs):
                stack.callback(run.close)

    @property
    def device(self) -> Device:
        """Where it runs, and caches must lie. Raises BundleError while inactive."""
        if self._device is None:
            raise self._not_open()
        return self._device

    def bind_cache(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array], caches: Mapping[str, DeviceArray]
    ) -> HostRun:
        """See ``CacheRunner.bind_cache``."""
        bound = self._layouts.run(feeds, outputs, caches)
        with self.device.lock:
            run = self._bind(bound, feeds, outputs)
            self._runs.add(run)
            return run

    @abstractmethod
    def _bind(self, bound: CachedRun, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> HostRun:
        """A run of the open engine, made under the device's lock, and forgotten by ``_runs`` when it is closed. Raises
        BundleError where another thread has closed the engine."""

    @abstractmethod
    def _close(self) -> None:
        """Closes the engine, if it is open, under the device's lock."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:  # noqa: ARG002
        """Raises InputError: see ``bind_cache``."""
        raise self._on_the_gpu()

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:  # noqa: ARG002
        """Raises InputError: see ``bind_cache``."""
        raise self._on_the_gpu()

    def _not_open(self) -> BundleError:
        return BundleError(f"{self._where}: not open; run it inside its `with` block")

    def _on_the_gpu(self) -> InputError:
        return InputError(f"{self._where}: its cache lies on the GPU; run it in a session of its model")
