"""Parts that every protocol of the server shares: limits, a token, errors in one line, metrics and the access log."""

import asyncio
import hmac
import json
import logging
import re
import traceback
from collections import Counter as Counted
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Event, Thread
from time import time
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BundleError, InputError, NestforgeError, OverloadError, SelectionError
from ..outside_file import parse_json
from ..runtime.answering import joined
from .desk import Desk, own_part
from .generating import Generating
from .scheduler import Job
from .served import Reply, Served, Terms, Work, now_ms

ERRORS = logging.getLogger("nestforge.serving")
# In the scope of a request whose body did not come in time.
LATE = "nestforge.late"
# In the scope of every request: its headers by name, as bytes, and those of ours as text.
HEADERS, OWN_HEADERS = "nestforge.headers", "nestforge.own"
# Bodies above are read as JSON on another thread, so that other requests go on.
_LARGE = 1 << 16
_MOST_LINES, _LOG_S = 4096, 0.1
_WATCHED_S = 0.005
_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
# Which say whether a server is there, whoever asks and however busy it is.
_HEALTH = ("/v2/health/live", "/v2/health/ready", "/health")
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/:;,'\"]+/)+")
# As errors name a setting, in Python; a body has it in JSON.
_SETTING = re.compile(r"`(\w+)=(True|False)`")
_ASCII = re.compile(r"[^\x20-\x7e]")
T = TypeVar("T")


class Problem(Exception):
    """A request that is refused: ``kind`` is a key of ``STATUS``."""

    def __init__(self, kind: str, text: str, needs_ms: float | None = None) -> None:
        super().__init__(text)
        self.kind, self.needs_ms = kind, needs_ms


STATUS = {
    "invalid": 400,
    "unauthorized": 401,
    "unknown": 404,
    "method": 405,
    "slow": 408,
    "too_large": 413,
    "unsupported": 415,
    "overloaded": 503,
    "broken": 503,
    "internal": 500,
}


@dataclass(frozen=True)
class Protocol:
    """Errors as a protocol says them: ``body(kind, message, status)``, and statuses that differ from ``STATUS``."""

    name: str
    body: Callable[[str, str, int], Any]
    status: Mapping[str, int] = field(default_factory=dict)


PLAIN = Protocol("http", lambda _kind, text, _status: {"error": text})


class Metrics:
    """Metrics as Prometheus reads them at ``/metrics``."""

    def __init__(self, desk: Desk) -> None:
        self.registry = registry = CollectorRegistry()
        requests = Counter("nestforge_requests", "Requests.", ["protocol", "model", "status"], registry=registry)
        answers = Counter("nestforge_answers", "Answers by submodel.", ["model", "submodel"], registry=registry)
        refused = Counter("nestforge_refused", "Requests refused under load.", ["model"], registry=registry)
        late = Counter("nestforge_late", "Answers after their deadline.", ["model"], registry=registry)
        latency = Histogram(
            "nestforge_request_ms", "Milliseconds from request to answer.", ["model"], buckets=_MS, registry=registry
        )
        # By labels, looked up once: a lookup costs more than the count.
        self.requests, self.answers, self.refused = cache(requests.labels), cache(answers.labels), cache(refused.labels)
        self.late, self.latency = cache(late.labels), cache(latency.labels)
        self.shared = Histogram(
            "nestforge_run_requests", "Requests that a run answered.", buckets=(1, 2, 4, 8, 16, 32), registry=registry
        )
        self.count("waiting", "Jobs that wait.", lambda: desk.scheduler.waiting)
        self.count("running", "Runs.", lambda: desk.scheduler.running)
        self.count("share", "Planned part of deadlines.", lambda: desk.scheduler.share)

    def count(self, name: str, what: str, now: Callable[[], float]) -> None:
        """A gauge of what there is ``now``."""
        Gauge(f"nestforge_{name}", what, registry=self.registry).set_function(now)


@dataclass(frozen=True)
class Limits:
    """``body_bytes`` of a request, of which ``json_bytes`` are JSON (its parser lets no thread run beside it, a quarter
    of a second for 8 MiB of numbers), ``letters`` of all its texts, ``requests`` in progress, ``connections`` that are
    open, ``read_s`` to read a request, ``write_s`` in which a client reads some of an answer, ``patience_ms`` of a
    request without a deadline."""

    body_bytes: int = 64 << 20
    json_bytes: int = 8 << 20
    letters: int = 1 << 20
    requests: int = 512
    connections: int = 1024
    read_s: float = 10.0
    write_s: float = 30.0
    patience_ms: float = 30_000.0


def document_of(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises Problem."""
    try:
        data = parse_json(raw)
    except ValueError as failure:
        raise Problem("invalid", f"body: not JSON ({failure})") from None
    if not isinstance(data, dict):
        raise Problem("invalid", f"body: expected a JSON object, got {type(data).__name__}")
    return data


def client_of(scope: Scope, name: object) -> str:
    """Who asks: by a name from this host alone, as a proxy gives it; from elsewhere anyone could take any."""
    address = str((scope.get("client") or ("127.0.0.1", 0))[0])
    return str(name)[:80] if name and (address.startswith("127.") or address == "::1") else address


class Service:
    """The bundles of a server, by name, and what its protocols ask of them."""

    def __init__(self, served: Mapping[str, Served], desk: Desk, limits: Limits) -> None:
        self.served, self.desk, self.limits, self.metrics = served, desk, limits, Metrics(desk)
        self.generating = {name: Generating(one.model.generate, desk) for name, one in served.items()}
        rows = self.generating.values()
        self.metrics.count("generating", "Rows that generate.", lambda: sum(one.rows for one in rows))
        self.is_ready = True

    def model(self, name: object) -> Served:
        """Raises Problem for a name that no bundle has."""
        if isinstance(name, str) and name in self.served:
            return self.served[name]
        raise Problem("unknown", f"no model {name!r:.80}; there is {', '.join(self.served)}")

    async def document(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request's body. Raises Problem."""
        return await self.parsed(await self.body(request, self.limits.json_bytes))

    async def parsed(self, raw: bytes) -> dict[str, Any]:
        if len(raw) > self.limits.json_bytes:
            raise Problem(
                "too_large", f"body: expected at most {self.limits.json_bytes} bytes of JSON; send them binary"
            )
        return await asyncio.to_thread(document_of, raw) if len(raw) > _LARGE else document_of(raw)

    async def body(self, request: Request, most: int | None = None) -> bytes:
        """Raises Problem for a body that is too large, comes too slowly, or is compressed."""
        headers = request.scope[HEADERS]
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Problem("unsupported", "content-encoding: expected none")
        most, parts, goes_on = min(self.limits.body_bytes, most or self.limits.body_bytes), list[bytes](), True
        stated, came = int(headers.get(b"content-length", 0)), 0
        while goes_on and max(stated, came) <= most:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            came, goes_on = came + len(parts[-1]), message.get("more_body", False)
        if max(stated, came) > most:
            raise Problem("too_large", f"body: expected at most {most} bytes")
        if LATE in request.scope:
            raise Problem("slow", f"body: did not come within {self.limits.read_s:g} s")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def reply(self, request: Request, served: Served, work: Work) -> Reply:
        """The answer to ``work``, unless the client goes away before. Raises as Desk.answer does."""
        terms = self.terms(request, work.deadline_ms)
        with self.counted(request, served):
            reply = await self.unless_gone(request, self.desk.answer(served, work, served.job(work, terms)))
            if reply.whole is not None:
                reply = await self._with_the_rest(request, served, work, reply, terms)
        self.answered(request, reply, terms)
        return reply

    async def _with_the_rest(self, request: Request, served: Served, work: Work, first: Reply, terms: Terms) -> Reply:
        """The answer of all runs that a request takes, of which the ``first`` is there. Each is a job of its own behind
        what waits; with a deadline by that."""
        assert first.whole is not None
        parts = served.parts(work, first.whole)
        done = [(next(parts)[0], first)]
        for rows, part, one in parts:
            now = now_ms()
            due = terms.due if terms.is_timed else now + terms.patience_ms
            job = Job(None, len(rows), 1, terms.client, now, due, [one], terms.is_timed, continues=True)
            done.append((rows, await self.unless_gone(request, self.desk.answer(served, part, job))))
        outputs = {name: joined([(rows, one.outputs[name]) for rows, one in done]) for name in first.outputs}
        return replace(done[-1][1], outputs=outputs, reason=first.reason)

    def letters(self, name: str, texts: Iterable[str]) -> int:
        """How many ``texts`` have together. Raises Problem for more than a request may have."""
        count = sum(map(len, texts))
        if count > self.limits.letters:
            raise Problem("too_large", f"{name}: {count} letters; expected at most {self.limits.letters} in a request")
        return count

    def terms(self, request: Request, deadline_ms: float | None, user: object = None) -> Terms:
        scope = request.scope
        client = client_of(scope, scope[OWN_HEADERS].get("nestforge-client") or user)
        return Terms(client, scope["nestforge.arrived"], self.limits.patience_ms, deadline_ms)

    @contextmanager
    def counted(self, request: Request, served: Served) -> Iterator[None]:
        """Within it ``served`` answers a request: refusals count, and a bundle that fails is not ready any more."""
        request.scope["nestforge.model"] = served.name
        try:
            yield
        except OverloadError:
            self.metrics.refused(served.name).inc()
            raise
        except BundleError:
            served.is_broken = True
            raise

    async def unless_gone(self, request: Request, answer: asyncio.Future[T]) -> T:
        """The result of ``answer``, unless the client goes away before, for which it is watched where that takes
        longer: then the answer is cancelled, and ClientDisconnect raised."""
        gone: list[asyncio.Future[Message]] = []

        def watch() -> None:
            gone.append(asyncio.ensure_future(request.receive()))
            gone[0].add_done_callback(lambda _: answer.cancel())

        if answer.done():
            return answer.result()
        timer = asyncio.get_running_loop().call_later(_WATCHED_S, watch)
        try:
            return await answer
        except asyncio.CancelledError:
            if not any(one.done() for one in gone):
                raise
            raise ClientDisconnect from None
        finally:
            timer.cancel()
            for one in gone:
                one.cancel()

    def answered(self, request: Request, reply: Reply, terms: Terms) -> None:
        """Keeps an answer for headers, metrics and the access log."""
        request.scope.update({"nestforge.reply": reply, "nestforge.terms": terms})

    def count(self, model: str, reply: Reply, terms: Terms) -> None:
        """Counts an answer that was sent now."""
        took = now_ms() - terms.arrived
        self.metrics.answers(model, reply.submodel).inc()
        self.metrics.latency(model).observe(took)
        if reply.shared:
            self.metrics.shared.observe(reply.shared)
        if terms.deadline_ms is not None and took > terms.deadline_ms:
            self.metrics.late(model).inc()

    def problem(self, failure: BaseException, name: str | None) -> Problem:
        """Line for a client on ``failure``: no path of this host."""
        if isinstance(failure, Problem):
            return failure
        text = str(failure)
        for one in self.served.values():
            text = text.replace(str(one.model.bundle.path), one.name)
        text = _SETTING.sub(lambda found: f'`"{found[1]}": {found[2].lower()}`', _PATH.sub("", text))
        if isinstance(failure, OverloadError):
            return Problem("overloaded", text, failure.needs_ms or None)
        if isinstance(failure, InputError | SelectionError):
            return Problem("invalid", text)
        if isinstance(failure, NestforgeError):
            ERRORS.error("%s", failure)
            return Problem("broken", f"model {name} cannot answer; the server's log says why")
        ERRORS.error("".join(traceback.format_exception(failure)))
        return Problem("internal", "internal error; the server's log says more")


Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """``handler`` as an ASGI application, with errors as ``protocol`` says them, and headers that say who answered and
    why."""

    service: Service
    protocol: Protocol
    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["nestforge.protocol"] = self.protocol.name
        try:
            response = await self.handler(self.service, Request(scope, receive))
        except ClientDisconnect:
            return
        except Exception as failure:  # noqa: BLE001  (a request never ends the server)
            response = refused(self.protocol, self.service.problem(failure, scope.get("nestforge.model")))
        reply: Reply | None = scope.get("nestforge.reply")
        if reply is not None:
            said = [("submodel", reply.submodel), ("reason", _ASCII.sub("?", reply.reason)[:1000])]
            if reply.exits is not None:
                said.append(("exit", ",".join(map(str, reply.exits))))
            response.raw_headers += [(f"nestforge-{name}".encode(), value.encode("latin-1")) for name, value in said]
        await response(scope, receive, send)


def refused(protocol: Protocol, problem: Problem) -> Response:
    """Answer to a client on ``problem``."""
    status = {**STATUS, **protocol.status}[problem.kind]
    response = JSONResponse(protocol.body(problem.kind, str(problem), status), status)
    if problem.kind == "overloaded":
        response.headers["retry-after"] = str(max(1, round(min(problem.needs_ms or 0.0, 1e6) / 1e3)))
    if problem.needs_ms is not None:
        response.headers["nestforge-needs-ms"] = f"{problem.needs_ms:.3f}"
    return response


async def metrics(service: Service, _: Request) -> Response:
    return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")


class AccessLog:
    """Lines to standard output, several times a second by a thread of its own: where nobody reads them requests go on,
    and the oldest are left out that find no room."""

    def __init__(self) -> None:
        self._lines, self._over = deque[Mapping[str, Any]](maxlen=_MOST_LINES), Event()
        self._writer = Thread(target=self._write, name="nestforge-log", daemon=True)
        self._writer.start()

    def add(self, line: Mapping[str, Any]) -> None:
        self._lines.append(line)

    def close(self) -> None:
        """Writes what is there, within a second."""
        self._over.set()
        self._writer.join(1)

    def _write(self) -> None:
        with suppress(OSError, ValueError):  # standard output is closed
            is_over = False
            while not is_over:
                is_over = self._over.wait(_LOG_S)
                while self._lines:
                    print(json.dumps(self._lines.popleft()), flush=not self._lines)


class Guard:
    """Before every route: the token, how many requests are in progress, in all and of one client; behind it a line of
    the access log."""

    def __init__(
        self, app: ASGIApp, service: Service, token: str | None, log: AccessLog, of: Callable[[str], Protocol]
    ) -> None:
        """``of`` gives the protocol of a path."""
        self._app, self._service, self._log, self._of = app, service, log, of
        self._busy = Counted[str]()
        self._wanted = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # what Ray Serve tells of its beginning and end
            await self._app(scope, receive, send)
            return
        scope["nestforge.arrived"] = started = self._service.desk.arrived()
        sent = {"status": 499, "bytes": 0}

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
            sent["bytes"] += len(message.get("body", b""))
            await send(message)

        scope[HEADERS] = headers = dict(scope["headers"])
        scope[OWN_HEADERS] = own = {
            name.decode(): value.decode("latin-1") for name, value in headers.items() if name.startswith(b"nestforge-")
        }
        client = client_of(scope, own.get("nestforge-client"))
        problem = self._problem(scope["path"], headers, client)
        self._busy[client] += 1
        try:
            if problem is not None:
                await refused(self._of(scope["path"]), problem)(scope, receive, count)
            else:
                await self._app(scope, receive, count)
        finally:
            self._busy[client] -= 1
            if not self._busy[client]:
                del self._busy[client]
            # The answer leaves before it is counted, and what is asked next is begun after that.
            asyncio.get_running_loop().call_soon(self._note, scope, started, sent)

    def knows(self, authorization: bytes) -> bool:
        """Whether it is the token, where there is one."""
        return self._wanted is None or hmac.compare_digest(authorization, self._wanted)

    def _problem(self, path: str, headers: Mapping[bytes, bytes], client: str) -> Problem | None:
        most = self._service.limits.requests
        if path in _HEALTH:
            return None
        if not self.knows(headers.get(b"authorization", b"")):
            return Problem("unauthorized", "expected the token as Authorization: Bearer TOKEN")
        own = own_part(most, self._busy, client)
        if path != "/metrics" and (self._busy[client] >= own or self._busy.total() >= most):
            return Problem("overloaded", "too many requests in progress; ask again later")
        return None

    def _note(self, scope: Scope, started: float, sent: Mapping[str, int]) -> None:
        model, reply = scope.get("nestforge.model", ""), scope.get("nestforge.reply")
        protocol = scope.get("nestforge.protocol", "http")
        self._service.metrics.requests(protocol, model, str(sent["status"])).inc()
        client = scope.get("client")
        line = {
            "time": round(time(), 3),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": sent["status"],
            "bytes": sent["bytes"],
            "ms": round(now_ms() - started, 3),
        }
        if reply is not None:
            if reply.ended is not None:
                self._service.desk.scheduler.sent(now_ms() - reply.ended)
            if "nestforge.terms" in scope:
                self._service.count(model, reply, scope["nestforge.terms"])
            line |= {"model": model, "submodel": reply.submodel, "shared": reply.shared}
        self._log.add(line)
