"""A bundle ready to answer: ``load`` opens it, and a call runs dispatch -> fill -> run -> cut back."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from time import perf_counter
from types import TracebackType
from typing import Literal, Self

from ..errors import InputError
from ..profiles.probe_host import probe_host
from .answer import Answer, Padding, Timings
from .arrays import Array
from .bundle import Bundle, Check, open_bundle
from .dispatcher import Dispatcher, Request
from .engine_pool import EnginePool
from .inputs import InputChecker, cut_back
from .manifest import BuildRecord, EngineEntry
from .residency import RESIDENCIES, EngineNeed, Residency, assign_residencies
from .runner import runnable_engines
from .text import Encoded, TextEncoder
from .threads import threads_or_default


def load(
    path: str | os.PathLike[str],
    *,
    memory_mb: float | None = None,
    residency: Residency | Literal["auto"] = "auto",
    threads: int | None = None,
    check: Check = "fast",
    preload: bool = False,
) -> ElasticModel:
    """Opens a bundle as a model; engines open on first use, or at once with ``preload``.

    ``memory_mb`` caps what all engines may hold together (weights, private initializers, activations; 10^6 bytes), and
    ``residency`` is decided under it, see ``assign_residencies``. ``threads`` is the number of cores per run, by
    default those that this process may use. Raises a BundleError, or SelectionError if the cap cannot be met.
    """
    if residency not in (*RESIDENCIES, "auto"):
        raise InputError(f"residency {residency!r}: expected one of auto, {', '.join(RESIDENCIES)}")
    bundle = open_bundle(path, check)
    engines = runnable_engines(bundle)
    residencies = assign_residencies(_needs(bundle, engines), memory_mb, residency)
    model = ElasticModel(bundle, residencies, threads_or_default(threads))
    if preload:
        try:
            model.open_engines()
        except BaseException:
            model.close()
            raise
    return model


class ElasticModel:
    """Every submodel of a bundle behind one call. A context manager; thread-safe."""

    def __init__(self, bundle: Bundle, residencies: Mapping[str, Residency], threads: int) -> None:
        self.bundle = bundle
        self.residencies = residencies
        self.threads = threads
        manifest = bundle.manifest
        self._inputs = InputChecker(manifest.inputs)
        self._outputs = manifest.outputs
        self._dispatcher = Dispatcher(manifest, residencies, bundle.build.latencies, _measured_elsewhere(bundle.build))
        self._pool = EnginePool(bundle, residencies, threads)
        self._encoder_lock = threading.Lock()

    def __call__(
        self,
        inputs: Mapping[str, Array] | str | Sequence[str],
        *,
        budget: str | None = None,
        latency_ms: float | None = None,
        memory_mb: float | None = None,
        submodel: str | None = None,
        truncate: bool = False,
    ) -> Answer:
        """Answers one request: arrays by input name, or a text, or a list of texts.

        At most one of: a named ``budget``; a ``submodel`` by id or label; limits (``latency_ms``, ``memory_mb``).
        Without any the largest submodel answers. An input smaller than its bucket is padded, which the answer says; a
        longer text is refused unless ``truncate``. Raises InputError, SelectionError, or a BundleError if the engine
        cannot be opened.
        """
        started = perf_counter()
        truncated: tuple[int, ...] = ()
        if type(inputs) is dict or isinstance(inputs, Mapping):
            if truncate:
                raise InputError("truncate: applies to text only; cut the arrays yourself")
            feeds = inputs
        else:
            encoded = self._encode(inputs, truncate)
            feeds, truncated = encoded.feeds, encoded.truncated
        encoded_at = perf_counter()

        given = self._inputs.shape_of(feeds)
        request = Request(budget, submodel, latency_ms, memory_mb)
        choice = self._dispatcher.choose(request, given.batch, given.sequence)
        engine = choice.engine
        given = self._inputs.own_shape(given, engine.bucket)
        padding = None
        if given != engine.bucket:
            feeds = self._inputs.filled(feeds, engine.bucket)
            padding = Padding(given, engine.bucket)
        dispatched = perf_counter()

        runner = self._pool.get(engine)
        opened = perf_counter()
        outputs = runner.run(feeds)
        ran = perf_counter()
        if padding:
            outputs = cut_back(outputs, self._outputs, given)
        return Answer(
            outputs={spec.name: output for spec, output in zip(self._outputs, outputs, strict=True)},
            submodel=engine.submodel,
            engine=engine.id,
            bucket=engine.bucket,
            residency=self.residencies[engine.id],
            reason=choice.reason,
            padding=padding,
            truncated=truncated,
            timings=Timings(
                encode=1e3 * (encoded_at - started),
                dispatch=1e3 * (dispatched - encoded_at),
                open=1e3 * (opened - dispatched),
                run=1e3 * (ran - opened),
            ),
        )

    def open_engines(self) -> None:
        """Opens every engine that has a residency, so that no request waits for it."""
        for engine in self.bundle.manifest.engines:
            if engine.id in self.residencies:
                self._pool.get(engine)

    def close(self) -> None:
        """Releases every engine; the model cannot be used afterwards."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ElasticModel({self.bundle!r}, {self.threads} threads)"

    def _encode(self, inputs: str | Sequence[str], truncate: bool) -> Encoded:
        if not isinstance(inputs, (str, Sequence)):
            raise InputError(f"inputs: expected arrays by name, a text or texts, got {type(inputs).__name__}")
        texts = [inputs] if isinstance(inputs, str) else inputs
        with self._encoder_lock:
            encoder = self._encoder
        return encoder.encode(texts, self._dispatcher.longest_sequence(len(texts)), truncate)

    @cached_property
    def _encoder(self) -> TextEncoder:
        text = self.bundle.manifest.text
        if text is None:
            raise InputError(f"bundle {self.bundle.path}: has no tokenizer; pass arrays by input name instead of text")
        return TextEncoder(self.bundle.file(text.file), text, self.bundle.manifest.inputs)


def _measured_elsewhere(build: BuildRecord) -> str | None:
    """The processor of the build record's measurements, or None where it is this host's or nothing was measured."""
    if all(latency.measured_p50_ms is None for latency in build.latencies):
        return None
    here = probe_host()
    if (build.host.get("cpu"), build.host.get("architecture")) == (here.cpu, here.architecture):
        return None
    return " ".join(str(build.host.get("cpu", "an unknown processor")).split())[:80]


def _needs(bundle: Bundle, engines: Sequence[EngineEntry]) -> list[EngineNeed]:
    submodels = {entry.id: entry for entry in bundle.manifest.submodels}
    predicted = {latency.engine: latency.predicted_ms for latency in bundle.build.latencies}
    named = [budget.submodel for budget in bundle.manifest.budgets]
    needs = []
    for engine in engines:
        submodel = submodels[engine.submodel]
        needs.append(
            EngineNeed(
                engine=engine.id,
                widths=tuple(width for kind in sorted(submodel.values) for width in submodel.values[kind]),
                weight_bytes=submodel.weight_bytes,
                own_bytes=engine.private_bytes + engine.activation_bytes,
                latency_ms=predicted.get(engine.id, 1.0),
                importance=1.0 + named.count(engine.submodel),
            )
        )
    return needs
