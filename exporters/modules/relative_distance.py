"""Distances between tokens in buckets, as T5 has them: near ones have one each, farther ones share by logarithm."""

from __future__ import annotations

import math

# As in T5: the buckets of a relative bias, and the distance from which on all keys share the last of them.
RELATIVE_BUCKETS, RELATIVE_REACH = 32, 128


def distance_bucket(distance: int, buckets: int, reach: int) -> int:
    """The bucket, of ``buckets``, of a key ``distance`` >= 0 tokens away; from ``reach`` on all share the last.

    Distances below half of ``buckets`` have one each.
    """
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(reach / exact)
    return min(exact + int(share * (buckets - exact)), buckets - 1)
