"""A hub on this host: one model's folder at one commit, as far as ``huggingface_hub`` asks for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

NAME, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append(f"{self.command} {path}")
        files = {file.relative_to(self.server.folder).as_posix(): file for file in self.server.folder.rglob("*.*")}
        if path in (f"api/models/{NAME}/revision/{revision}" for revision in ("main", "v1", COMMIT)):
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": NAME, "modelId": NAME, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        elif path == f"api/models/{NAME}/tree/{COMMIT}":
            self._json(
                [{"type": "file", "path": n, "size": f.stat().st_size, "oid": _oid(f)} for n, f in files.items()]
            )
        elif path.startswith(f"{NAME}/resolve/{COMMIT}/") and (name := path.partition(f"{COMMIT}/")[2]) in files:
            self._send(files[name].read_bytes(), {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": COMMIT})
        else:
            kind = "RevisionNotFound" if path.startswith(f"api/models/{NAME}/") else "RepoNotFound"
            self._send(b"{}", {"X-Error-Code": kind, "X-Error-Message": "none"}, 404)

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: dict[str, str], code: int = 200) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Hub(ThreadingHTTPServer):
    """``folder`` is what it serves, ``asked`` what it was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked = folder, list[str]()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()  # noqa: S324  (as git has it)
