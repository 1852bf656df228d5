"""A fleet's compile matrix on Ray, which decides what runs where, and runs again what a lost machine left.

Ours is only what Ray cannot know. Jobs of one model trace the same graphs and write the same weights, so the first that
does goes before those that then link to its files; and a bundle that is there already, of the same job, stays.
"""

import os
import shutil
import socket
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ..bundle.open_bundle import open_bundle
from ..errors import InputError, NestforgeError, OutputError
from ..profiles.backends import BACKENDS
from ..profiles.compile_request import CompileRequest
from ..progress import Progress
from ..whole_file import lock_holders, take_lock
from .compile import compile_job, prepare
from .job import Job, resolve
from .provenance import keys_of
from .work.clock import Clock

# Beside the bundles, until all are done: what the jobs of a model share.
_POOLS = ".farm"
_POLL_S, _CONNECT_S = 0.5, 10.0
# For a compile that is given neither tasks nor precisions; others have up to three more.
_STAGES = 11


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its bundle was made now, or ``kept``, since it was there; or ``problem`` says in a line why it
    failed. ``seconds`` are those of the run that ended it, on ``host``."""

    name: str
    state: Literal["made", "kept", "failed"]
    bundle: str
    problem: str | None = None
    seconds: float = 0.0
    host: str = ""


def run_farm(requests: Mapping[str, CompileRequest], address: str | None, progress: Progress) -> Iterator[Outcome]:
    """Compiles ``requests``, by name, into one folder, on the Ray cluster at ``address`` (HOST:PORT; ``auto``: of this
    machine), else on this machine; yields each job's outcome when it ends. One that fails stops no other, and
    one whose worker or machine is lost is run again, by Ray, three times, and goes on where it was.

    ``progress`` gets the name of a job in place of a stage, and how many of its stages are done. Raises InputError
    where there is no cluster, OutputError where another farm fills the folder.
    """
    import ray

    _require(address)
    pools = Path(next(iter(requests.values())).output).parent / _POOLS
    with _alone(pools):
        failed = False
        for one in _ended(requests, pools, address, ray, progress):
            if one.state == "failed":
                failed = True
            else:
                progress(one.name, 1, 1)
            yield one
        if not failed:
            shutil.rmtree(pools, ignore_errors=True)


def _ended(
    requests: Mapping[str, CompileRequest], pools: Path, address: str | None, ray: Any, progress: Progress
) -> Iterator[Outcome]:
    """The outcomes of ``run_farm``, first of jobs that need no cluster."""
    jobs: dict[str, Job] = {}
    for name, request in requests.items():
        if (one := _resolved(name, request, jobs)) is not None:
            yield one
    if not jobs:
        return
    with _cluster(ray, address):
        told = import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0, "max_restarts": -1})
        task, rooms, stages = ray.remote(_compile), _rooms(ray), Counter[str]()
        order, running = TopologicalSorter(_before(requests, jobs)), dict[Any, str]()
        order.prepare()
        while order.is_active():
            for name in order.get_ready():
                own = task.options(name=name, **_needs(jobs[name], rooms))
                running[own.remote(name, requests[name], Path.cwd(), pools.absolute(), told)] = name
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            with suppress(ray.exceptions.RayError):  # of the table, not of a job
                for name in told.get_nowait_batch(told.qsize()):
                    progress(name, min(stages[name], _STAGES - 1), _STAGES)
                    stages[name] += 1
            for ref in done:
                name = running.pop(ref)
                order.done(name)
                try:
                    yield ray.get(ref)
                except ray.exceptions.RayError as failure:
                    lost = " ".join(str(failure).split())
                    yield Outcome(name, "failed", str(requests[name].output), f"lost with its machine, {lost:.300}")


def _compile(name: str, request: CompileRequest, folder: Path, pools: Path, told: Any) -> Outcome:
    """The task: a job on the machine where Ray runs it, which sees the same folders."""
    began = time.perf_counter()

    def tell(_: str, done: float, __: int) -> None:
        if done == 0:
            told.actor.put_nowait.remote(name)  # nobody waits for it

    def ended(state: Literal["made", "kept", "failed"], problem: str | None = None) -> Outcome:
        seconds = round(time.perf_counter() - began, 1)
        return Outcome(name, state, str(request.output), problem, seconds, socket.gethostname())

    try:
        os.chdir(folder)
        clock = Clock(tell)
        job = prepare(request, clock)
        if _is_done(job):  # by a worker that was lost when it had published it
            return ended("kept")
        compile_job(job, clock, pools=pools)
    except NestforgeError as failure:
        return ended("failed", str(failure))
    except Exception as failure:  # noqa: BLE001  (a bug of one job stops no other)
        return ended("failed", f"internal error: {failure!r}; {traceback.format_exc()}")
    return ended("made")


def _resolved(name: str, request: CompileRequest, jobs: dict[str, Job]) -> Outcome | None:
    """Adds the job of ``request`` to ``jobs``, or returns how it ended before it began."""
    try:
        job = resolve(request)
        job.cost  # noqa: B018  (raises for budgets that nothing keeps)
        if _is_done(job):
            return Outcome(name, "kept", str(request.output))
    except NestforgeError as failure:
        return Outcome(name, "failed", str(request.output), str(failure))
    jobs[name] = job
    return None


def _is_done(job: Job) -> bool:
    """Whether the bundle is there and follows from just what the job states."""
    return job.output.is_dir() and open_bundle(job.output).build.job_sha256 == keys_of(job).sha256


def _before(requests: Mapping[str, CompileRequest], jobs: Mapping[str, Job]) -> dict[str, set[str]]:
    """Which jobs go before each: of those that trace one graph the first one, alone."""
    first: dict[object, str] = {}
    return {
        name: {
            first.setdefault((str(requests[name].model), job.shared_options, _form(job), bucket), name)
            for bucket in job.profile.buckets
        }
        - {name}
        for name, job in jobs.items()
    }


def _form(job: Job) -> object:
    return BACKENDS[job.profile.backend].own_operators, job.profile.opset


def _rooms(ray: Any) -> dict[str, float]:
    """The most cores and memory that one machine has."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return {name: max(one.get(name, 0.0) for one in machines) for name in ("CPU", "memory")}


def _needs(job: Job, rooms: Mapping[str, float]) -> dict[str, float]:
    """Resources that Ray sets aside for a job: a core, or a machine of its own where engines are timed."""
    cores = rooms["CPU"] if job.profile.host is not None else 1.0
    return {"num_cpus": cores, "memory": min(job.cost.memory_mb * 1e6, rooms["memory"])}


def _require(address: str | None) -> None:
    """Raises InputError where no one listens at ``address``: Ray would try for minutes."""
    if address in (None, "auto"):
        return
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as failure:
        raise InputError(
            f"address {address!r:.80}: no Ray cluster is there ({failure}); expected HOST:PORT as `ray start --head` "
            "said it, or auto"
        ) from failure


@contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # which Ray would send home
    try:
        ray.init(address=address or "local", include_dashboard=None if address else False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as failure:
        said = " ".join(str(failure).split())
        raise InputError(f"address {address or 'local'}: no Ray cluster can be used there: {said:.300}") from failure
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _alone(pools: Path) -> Iterator[None]:
    """Holds the folder ``pools``, made if it is missing. Raises OutputError for one that another farm holds."""
    try:
        pools.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(pools, os.O_RDONLY)
    except OSError as failure:
        raise OutputError(f"{pools.parent}: cannot be written ({failure.strerror})") from failure
    try:
        take_lock(descriptor)
        yield
    except BlockingIOError:
        raise OutputError(f"{pools.parent}: another farm is at work there: {lock_holders(descriptor)}") from None
    finally:
        os.close(descriptor)
