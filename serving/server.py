"""``nestforge serve``: bundles opened, a port bound, and requests answered until a signal ends it."""

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..bundle.open_bundle import open_bundle
from ..errors import InputError
from ..optional import needed
from ..profiles.probe_host import probe_host
from ..runtime.engines.residency import Residency
from ..runtime.inputs.files import read_text_file
from ..runtime.load import load
from . import classes, completions, embeddings, kserve
from .app import ERRORS, LATE, PLAIN, AccessLog, Endpoint, Guard, Limits, Problem, Protocol, Service, metrics
from .desk import Desk
from .served import Served, small_submodels

_MOST_HEAD = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ServeRequest:
    """Bundles to serve, and how; see ``nestforge serve --help``. ``workers`` are the runs of ``threads`` at a time,
    None is as many as the cores have room for; ``maps``: weights are in files that the processes of a host map
    together."""

    bundles: Sequence[Path]
    _: KW_ONLY
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    token: str | None = None
    stop_s: float = 30.0
    threads: int | None = None
    limits: Limits = Limits()
    maps: bool = False
    workers: int | None = None


class JoinedWrites:
    """A transport that sends what is written twice in a row at once, as the head of an answer and its body: each time
    that something is sent wakes the client, on the cores that answer."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.writelines((held, data))
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for no one: a head has to be there within ``read_s`` of the connection, or of its first
    byte, and within 64 KiB, and a body as soon after it; a client that reads too little of an answer for ``write_s``
    loses it; of more connections than ``most`` the new one is closed."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _in_head, _head_bytes = True, 0
    # Action where the rest of a head or body does not come in time, and whether that is new since the last look.
    _late: Callable[[], None] | None = None
    _is_new = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)  # type: ignore[assignment]
        self._late = self.transport.close
        self._watch()
        if len(self.connections) > self.limits.connections:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD:
                self.transport.close()
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._late, self._is_new = self.transport.close, True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self._late, self._is_new = self._end_body, True

    def on_message_complete(self) -> None:
        self._late, self._is_new = None, True
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unstick()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late, self._is_new = None, True
        self._watch()
        self._unstick()
        super().connection_lost(exc)

    def _end_body(self) -> None:
        """The request hears that its body has ended, and that it is late."""
        self.scope[LATE] = True  # type: ignore[literal-required]
        self.cycle.keep_alive = self.cycle.more_body = False
        self.cycle.message_event.set()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _watch(self) -> None:
        """Once for all that came together: most requests come whole, and need no timer."""
        if self._is_new:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if self._late is None else self.loop.call_later(self.limits.read_s, self._late)
            self._is_new = False


class _Server(uvicorn.Server):
    """Stops at the first signal, bounded by its time to stop, and at once at a second Ctrl-C."""

    _end_rpc: Callable[[float], Awaitable[None]] | None = None

    def __init__(self, config: uvicorn.Config, service: Service, app: Guard, request: ServeRequest) -> None:
        super().__init__(config)
        self._service, self._app, self._request = service, app, request

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        request, rpc_port = self._request, None
        if request.grpc_port is not None:
            rpc = needed("nestforge.serving.rpc", "grpc_port", "gRPC (pip install 'nestforge[grpc]')", "leave it out")
            limit = self._service.limits.body_bytes
            rpc_port, self._end_rpc = await rpc.start(self._app, request.host, request.grpc_port, limit)
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        names = ", ".join(self._service.served)
        print(f"nestforge: serving {names} at http://{host}:{port}", file=sys.stderr, flush=True)
        if rpc_port is not None:
            print(f"nestforge: and at grpc://{host}:{rpc_port}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        over = [super().shutdown(sockets)]
        if self._end_rpc is not None:
            over.append(self._end_rpc(self._request.stop_s))  # type: ignore[arg-type]
        await asyncio.gather(*over)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._service.is_ready = False
        super().handle_exit(sig, frame)


def application(service: Service, token: str | None, log: AccessLog) -> Guard:
    """The server's routes as an ASGI application."""
    tables: list[tuple[Protocol, Any]] = [
        (kserve.PROTOCOL, kserve.ROUTES),
        (embeddings.OPENAI, embeddings.OPENAI_ROUTES),
        (embeddings.OPENAI, completions.ROUTES),
        *(
            (embeddings.TEI, [(method, f"{before}{end}" or "/", handler)])
            for before in ("", "/models/{model}")
            for method, end, handler in (*embeddings.TEI_ROUTES, *classes.ROUTES)
        ),
        (PLAIN, [("GET", "/metrics", metrics), ("GET", "/health", kserve.ready)]),
    ]
    routes = [
        Route(path, Endpoint(service, protocol, handler), methods=[method])
        for protocol, table in tables
        for method, path, handler in table
    ]
    # A request that no route takes is refused as the protocol of its path says it.
    of = {"/v1/": embeddings.OPENAI, "/v2": kserve.PROTOCOL, "/": embeddings.TEI}

    async def nowhere(_: Service, request: Request) -> Response:
        others = any(route.matches(request.scope)[0] == Match.PARTIAL for route in routes)
        raise Problem("method" if others else "unknown", f"no route {request.method} {request.url.path:.200}")

    rest = [Route(f"{start}{{rest:path}}", Endpoint(service, protocol, nowhere)) for start, protocol in of.items()]

    def protocol_of(path: str) -> Protocol:
        return next((protocol for start, protocol in of.items() if path.startswith(start)), PLAIN)

    router = Router([*routes, *rest])
    # To infer, which comes most often, no route is tried.
    direct = {f"/v2/models/{name}/infer": {"model": name} for name in service.served}
    infer = Endpoint(service, kserve.PROTOCOL, kserve.infer)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST" and (found := direct.get(scope["path"])) is not None:
            scope["path_params"] = found
            await infer(scope, receive, send)
        else:
            await router(scope, receive, send)

    return Guard(app, service, token, log, protocol_of)


def model_names(bundles: Sequence[Path]) -> list[str]:
    """The names that models have, those of their folders. Raises InputError for those that none can have, or clash."""
    names = [Path(os.path.abspath(path)).name.removesuffix(".bundle") for path in bundles]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            raise InputError(
                f"bundle {name!r:.80}: a model's name is its folder's, of letters, digits and ._-, and once; rename it"
            )
    return names


def read_token(file: Path | None) -> str | None:
    """The token in ``file``, if there is one. Raises InputError."""
    token = None if file is None else read_text_file(file).strip()
    if token is not None and not (token.isascii() and token.isprintable() and token):
        raise InputError(f"{file}: expected a token of printable ASCII characters")
    return token


def _mapped(path: Path) -> Residency:
    """How engines of a bundle map their weights: packed, but those that generate, of which there are no such files."""
    return "mapped" if open_bundle(path).manifest.generation is None else "shared"


@contextmanager
def opened(request: ServeRequest) -> Iterator[tuple[Service, Guard]]:
    """The bundles of ``request``, open and warm, behind the server's routes. Raises as ``model_names`` and ``load``
    do."""
    with ExitStack() as stack:
        served = {}
        for name, path in zip(model_names(request.bundles), request.bundles, strict=True):
            residency = _mapped(path) if request.maps else "auto"
            model = load(path, threads=request.threads, residency=residency, preload=True)
            stack.enter_context(model)
            narrow = None
            if model.threads > 1 and (small := small_submodels(model.bundle.manifest)):
                narrow = stack.enter_context(load(path, threads=1, residency=residency))
                narrow.open_engines(small)
            served[name] = Served(name, model, narrow)
            served[name].warm_up()
        threads = next(iter(served.values())).model.threads
        workers = request.workers or max(1, probe_host().cores // threads)
        desk = Desk(workers * threads, request.limits.requests)
        stack.callback(desk.close)
        _log()
        log = AccessLog()
        stack.callback(log.close)
        service = Service(served, desk, request.limits)
        yield service, application(service, request.token, log)


def serve(request: ServeRequest) -> None:
    """Serves until SIGTERM or Ctrl-C, then finishes what is in progress within ``stop_s``. Raises InputError for a port
    that is taken, and as ``opened`` does."""
    model_names(request.bundles)  # before the port is bound
    with _bound(request.host, request.port) as bound, opened(request) as (service, app):
        config = uvicorn.Config(
            app,
            http=type("_Connection", (Connection,), {"limits": request.limits}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(request.stop_s)),
        )
        uvloop.run(_Server(config, service, app, request).serve(sockets=[bound]))


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    with ExitStack() as own:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # asyncio switches Nagle's delay, 40 ms an answer, off for sockets that say their protocol alone.
            bound = own.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as failure:
            raise InputError(
                f"{host}:{port}: cannot be bound ({failure.strerror}); choose another `host` or `port`"
            ) from failure
        yield bound


def _log() -> None:
    """Faults are standard error; standard output is the access log."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    ERRORS.handlers, ERRORS.propagate = [logging.StreamHandler(sys.stderr)], False
