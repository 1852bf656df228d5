"""Replicas on Ray Serve: ``serve run nestforge.serving.replicas:app bundles=my.bundle max_replicas=4``.

Ray starts, places, heals and scales processes, and spreads requests over them. Each is a whole server with its own
queue (record 0056), so that a request for which it has no time is refused at once; Ray is told how often that is, since
a queue that refuses stays short. Replicas of one host map the same files of weights.
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from ..bundle.open_bundle import open_bundle
from ..errors import BundleError, InputError
from .app import Limits
from .server import ServeRequest, model_names, opened, read_token

# The part of requests with a deadline that may miss it, before a replica is added.
_MISSED = 0.01


class Arguments(BaseModel, extra="forbid"):
    """Arguments of ``app``: ``bundles``, by paths that every machine has (with commas between, or a list); replicas of
    ``threads`` cores each, one more where a replica has more than ``target_ongoing_requests`` on average, or misses
    deadlines; as of ``nestforge serve``, a file with the token, and how long a request without a deadline waits."""

    bundles: list[str] = Field(min_length=1)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(8.0, gt=0)
    token_file: str | None = None
    patience_ms: float = Field(30_000.0, gt=0)

    @field_validator("bundles", mode="before")
    @classmethod
    def _listed(cls, given: object) -> object:
        return given.split(",") if isinstance(given, str) else given


class Replica:
    """One process: the bundles, behind the routes of ``nestforge serve``."""

    def __init__(self, request: ServeRequest, token_file: Path | None) -> None:
        self._open = ExitStack()
        request = replace(request, token=read_token(token_file))
        self._service, self._app = self._open.enter_context(opened(request))
        self._before = self._counts()

    def __serve_build_asgi_app__(self) -> Any:
        """Ray asks for the application, once."""
        return self._app

    async def check_health(self) -> None:
        """Raises BundleError where files of a bundle were written to: Ray then starts another replica in its place."""
        broken = [name for name, one in self._service.served.items() if one.is_broken]
        if broken:
            raise BundleError(f"model {broken[0]} cannot answer; its log says why")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The part of requests since the last call that load made late, or was why they were refused."""
        (asked, missed), before = self._counts(), self._before
        self._before = asked, missed
        return {"missed": (missed - before[1]) / max(1.0, asked - before[0])}

    def _counts(self) -> tuple[float, float]:
        """Requests that could be in time, and those that were not."""
        of, refused = self._service.metrics.registry.get_sample_value, self._service.desk.scheduler.overloads
        answered, late = (
            sum(of(f"nestforge_{name}", {"model": model}) or 0.0 for model in self._service.served)
            for name in ("request_ms_count", "late_total")
        )
        return answered + refused, late + refused


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray's policy: as many as the requests in progress want, and one more while deadlines are missed."""
    wanted = context.total_num_requests / context.config.target_ongoing_requests
    missed = [*((context.aggregated_metrics or {}).get("missed") or {}).values()]
    if missed and sum(missed) / len(missed) > _MISSED:
        wanted = max(wanted, context.current_num_replicas + 1)
    return wanted, {}


def app(given: dict[str, Any]) -> Any:
    """The application that ``serve run`` and ``serve deploy`` start, of the ``Arguments`` that are given. Raises
    InputError for others, and for names that clash, and a BundleError for what is no bundle."""
    try:
        arguments = Arguments.model_validate(given)
    except ValidationError as failure:
        first = failure.errors()[0]
        raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}") from failure
    paths = [Path(os.path.abspath(path)) for path in arguments.bundles]
    model_names(paths)
    for path in paths:
        open_bundle(path)
    from ray import serve

    limits = Limits(patience_ms=arguments.patience_ms)
    request = ServeRequest(paths, threads=arguments.threads, limits=limits, maps=True, workers=1)
    token = None if arguments.token_file is None else Path(os.path.abspath(arguments.token_file))
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="nestforge",
        max_ongoing_requests=limits.requests,
        ray_actor_options={"num_cpus": arguments.threads},
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "max_replicas": max(arguments.min_replicas, arguments.max_replicas),
            "target_ongoing_requests": arguments.target_ongoing_requests,
            "policy": {"policy_function": "nestforge.serving.replicas:wanted_replicas"},
        },
    )
    return deployment.bind(request, token)
