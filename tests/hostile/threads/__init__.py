"""The driver of threads: a seed is a crowd that asks a bundle for everything at once, while it is opened and closed.

Acceptable is the answer that the same request gets when it is asked alone, to the bit, or the same refusal. After the
crowd has left, nothing may stay: no thread, file, mapping of the bundle or memory of a device.
"""

import gc
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import psutil
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleError
from nestforge.runtime.engines.onnxruntime_gpu import session
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.exit_bundles import write_exits_bundle
from support.fake_gpu import Gpu, PlayedSession, provider_on

from ..outcomes import Result
from ..worker import begin, golden_bundles
from .asked import Asked, Told, alone, ask, asked_of

# Each crowd: threads that ask one model, requests of each, and how many different ones there are.
ASKING, EACH, KINDS = 8, 20, 40
# While they ask, the model is replaced this often, and this often another one is opened, asked and closed beside it.
RELOADS, VISITS = 6, 6
# Memory that a process may come to hold beyond the first crowds, in MB: allocators keep some of what was freed.
_GROWTH_MB = 96
_SETTLES_S = 10.0

Open = Callable[[], ElasticModel]


def open_driver(folder: Path) -> Callable[[int], Result]:
    """See the package. Bundles take turns by seed: the golden ones that this host can run, one with exits and many
    buckets, and that one on a stand-in for a GPU."""
    sites = [Site(path.name, path) for path in golden_bundles()]
    exits = write_exits_bundle(folder / "exits")
    session.GpuSession = type("Session", (PlayedSession,), {"opened": []})
    sites += [Site("exits", exits), GpuSite("exits, GPU played", exits)]
    return lambda seed: sites[seed % len(sites)].attempt(seed)


class Site:
    """One bundle, and what the process held after the first crowd that asked it."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._held: tuple[int, int] | None = None
        self._crowds, self._megabytes = 0, 0.0

    def attempt(self, seed: int) -> Result:
        """Lets a crowd in, compares what it was answered, and looks for what it left."""
        rng = Random(f"{self._name} {seed}")
        residency = rng.choice(("shared", "packed", "auto"))
        how = f"{ASKING} threads x {EACH} requests, {residency}"
        begin(self._name, how)
        bundle = open_bundle(self._path)
        requests = asked_of(bundle, rng, KINDS)
        opened = self.enter(residency)
        crowd = Crowd(opened, requests, rng)
        crowd.run()
        with opened() as quiet:
            wrong = [problem for request, told in crowd.told if (problem := _difference(quiet, request, told))]
        self.leave()
        left = self._left()
        result = partial(Result, seed, what=self._name, how=how, count=len(crowd.told))
        if crowd.failures:
            return result("escaped", message=crowd.failures[0])
        if wrong:
            return result("wrong", message=f"{len(wrong)} answers; {wrong[0]}")
        return result("leaked", message=left) if left else result("same")

    def enter(self, residency: str) -> Open:
        """How models are opened from here on."""
        return lambda: load(self._path, threads=1, residency=residency)

    def leave(self) -> None:
        """All models are closed."""

    def _left(self) -> str | None:
        """Everything that stayed, in words, compared with the first crowd, after which libraries hold theirs."""
        ends = time.monotonic() + _SETTLES_S
        while True:  # a native thread may need a moment to end
            gc.collect()
            process = psutil.Process()
            held = process.num_threads(), process.num_fds()
            mapped = [entry.path for entry in process.memory_maps() if entry.path.startswith(str(self._path))]
            first = self._held or held
            problem = next(
                (
                    f"{now} {what} after {before}"
                    for what, now, before in zip(("threads", "open files"), held, first, strict=True)
                    if now > before
                ),
                f"{mapped[0]} is still mapped" if mapped else None,
            )
            if problem is None or time.monotonic() > ends:
                break
            time.sleep(0.05)
        self._held = first
        self._crowds += 1
        megabytes = process.memory_info().rss / 2**20
        if self._crowds == 3:
            self._megabytes = megabytes
        if problem is None and self._crowds > 3 and megabytes > self._megabytes + _GROWTH_MB:
            problem = f"{megabytes:.0f} MB after {self._crowds} crowds, {self._megabytes:.0f} MB after the third"
        return problem


class GpuSite(Site):
    """The bundle on what plays a GPU, whose sessions keep CUDA graphs as ONNX Runtime's do."""

    def enter(self, residency: str) -> Open:
        self._gpu = gpu = Gpu()
        bundle = open_bundle(self._path)
        held = dict.fromkeys((engine.id for engine in bundle.manifest.engines), "shared")
        return lambda: ElasticModel(bundle, held, 1, provider_on(gpu))

    def leave(self) -> None:
        self._gpu.thread.close()

    def _left(self) -> str | None:
        kept = self._gpu.allocated_bytes
        return f"{kept} bytes of the device" if kept else super()._left()


class Crowd:
    """Threads that ask one model, one that replaces it meanwhile, and one that visits others. ``told`` is what was
    answered, ``failures`` what escaped."""

    def __init__(self, opened: Open, requests: list[Asked], rng: Random) -> None:
        self._open, self._requests = opened, requests
        self._seeds = [rng.random() for _ in range(ASKING + 1)]
        self._model = opened()
        self._over = threading.Event()
        self.told: list[tuple[Asked, Told]] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Until all have been answered."""
        asking = [threading.Thread(target=self._guard, args=(self._ask, seed)) for seed in self._seeds[:ASKING]]
        beside = self._reload, self._visit
        others = [threading.Thread(target=self._guard, args=(work, self._seeds[-1])) for work in beside]
        for thread in (*asking, *others):
            thread.start()
        for thread in asking:
            thread.join()
        self._over.set()
        for thread in others:
            thread.join()
        self._model.close()

    def _guard(self, work: Callable[[Random], None], seed: float) -> None:
        try:
            work(Random(seed))
        except BaseException as failure:  # noqa: BLE001  (whatever it is, it is a finding)
            where = "".join(traceback.format_tb(failure.__traceback__)[-3:])
            self.failures.append(f"{type(failure).__name__}: {failure}\n{where}")

    def _ask(self, rng: Random) -> None:
        for _ in range(EACH):
            request = rng.choice(self._requests)
            while True:
                model = self._model
                try:
                    self.told.append((request, ask(model, request)))
                    break
                except BundleError:
                    if self._model is model:  # nobody closed it
                        raise

    def _reload(self, rng: Random) -> None:
        for _ in range(RELOADS):
            if self._over.wait(rng.random() * 0.05):
                return
            replaced, self._model = self._model, self._open()
            replaced.close()

    def _visit(self, rng: Random) -> None:
        for _ in range(VISITS):
            with self._open() as model:
                if rng.random() < 0.5:
                    model.open_engines()
                for request in rng.choices(self._requests, k=4):
                    self.told.append((request, ask(model, request)))
            if self._over.is_set():
                return


def _difference(quiet: ElasticModel, request: Asked, told: Told) -> str | None:
    wanted = alone(quiet, request, told)
    return None if told.what == wanted.what else f"{request.options}: {told.what}; alone {wanted.what}"
