"""``nestforge serve`` as a process of its own, with a short time to read requests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

PROGRAM = """
import sys
from nestforge.serving import app, server
token, stop_s, body_bytes, read_s, *bundles = sys.argv[1:]
limits = app.Limits(body_bytes=int(body_bytes), read_s=float(read_s))
server.serve(server.ServeRequest(bundles, port=0, token=token or None, stop_s=float(stop_s), limits=limits))
"""


class Running:
    """A server that runs; ``log`` is what it wrote to stderr."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        self.host, port = address.split(":")
        self.port = int(port)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        connection = HTTPConnection(self.host, self.port, timeout=60)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return response.status, response.headers, json.loads(content) if is_json else content


@contextmanager
def serving(
    *bundles: Path, token: str = "", stop_s: float = 10.0, body_bytes: int = 1 << 20, read_s: float = 0.5
) -> Iterator[Running]:
    arguments = [sys.executable, "-c", PROGRAM, token, *map(str, (stop_s, body_bytes, read_s, *bundles))]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://(\S+)$", line.strip())
            assert found, line + process.stderr.read()
            yield Running(process, found[1])
        finally:
            process.kill()
