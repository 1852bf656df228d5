from __future__ import annotations

from typing import Any

from nestforge.bucket import Bucket
from nestforge.exporters.families.coda.family import TokenRoutes
from nestforge.exporters.families.coda.ops import elastic_spec
from support.tiny_coda import coda_config

BUCKET = Bucket(2, 10)


def stated(reduction: int, **settings: Any) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, int | str]]:
    config = coda_config(**settings)
    routes, submodel = TokenRoutes(config), elastic_spec(config).submodel({"coda.reduction": reduction})
    entries = [(entry.name, entry.shape) for entry in routes.entries(submodel, BUCKET)]
    return entries, dict(routes.metadata(submodel, BUCKET))


def test_the_manifest_says_which_k() -> None:
    entries, metadata = stated(4)
    assert entries == [("routes.0", (2, 3)), ("routes.1", (2, 3))]
    assert metadata == {
        "reduction": 4,
        "tokens per row": 10,
        "tokens selected": 3,
        "router": "soft_top_k",
        "keys and values of": "all",
        "padding is routed": "no",
        "soft top-k": "3 rounds from epsilon 4 by 0.7 to 0.5, b from zero",
    }
    assert stated(4, conditional_layers=(1,))[0] == [("routes.1", (2, 3))]


def test_where_nothing_is_compared_nothing_is_returned() -> None:
    entries, metadata = stated(4, router="first_k")
    assert (entries, metadata["tokens selected"], metadata["router"]) == ([], 3, "first_k")
    entries, metadata = stated(1, reduction_of_one="dense")
    assert (entries, metadata["tokens selected"], metadata["router"]) == ([], 10, "none")


def test_layers_may_differ_in_k() -> None:
    entries, metadata = stated(4, tokens_selected={"10": {"4": (4, 2)}})
    assert entries == [("routes.0", (2, 4)), ("routes.1", (2, 2))]
    assert (metadata["tokens per row"], metadata["tokens selected"]) == (10, "4, 2")
