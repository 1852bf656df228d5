"""A bundle measured on this host: what takes part, what is left out, and hosts that are too busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.device_files.device_file import this_host
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError, MeasurementError, SelectionError
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import measure_bundle

GOLDEN = Path(__file__).parents[3] / "golden"
ENGINES = ["ffn16@b1-s8", "ffn16@b2-s16", "ffn32@b1-s8", "ffn32@b2-s16"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Short rounds on a host that is as busy as the list says: before, and then while engines are timed."""
    busy: list[float | None] = [0.0, 0.0]

    class Load:
        def share(self) -> float | None:
            return busy[1]

    monkeypatch.setattr(measuring, "others_now", lambda _: busy[0])
    monkeypatch.setattr(measuring, "OthersLoad", Load)
    monkeypatch.setattr(measuring, "_ROUND_SECONDS", 0.0)
    return busy


def silent(*_: Any) -> None:
    pass


def test_every_engine_is_measured_as_the_runtime_holds_it(tiny_bundle: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = measure_bundle(open_bundle(tiny_bundle), lambda *each: seen.append(each), threads=1)
    assert seen == [("measure", 0, 1), ("measure", 1, 1)]
    assert (found.measurement.host, found.measurement.threads, found.left_out) == (this_host(), 1, {})
    assert [each.engine for each in found.measurement.engines] == ENGINES
    for each in found.measurement.engines:
        (point,) = each.points
        assert each.residency == "packed"
        assert 0 < point.p50_ms <= (point.p95_ms or 0)
        assert point.noise.runs == 30
        assert point.noise.repeat_ratio is not None
        assert point.noise.others_share == 0.0
    assert found.measurement.created.endswith("+00:00")


def test_a_cap_decides_residencies_and_names_what_it_leaves_out(tiny_bundle: Path) -> None:
    found = measure_bundle(open_bundle(tiny_bundle), silent, threads=1, memory_mb=0.0363)
    assert {each.residency for each in found.measurement.engines} == {"shared"}
    found = measure_bundle(open_bundle(tiny_bundle), silent, threads=1, memory_mb=0.03)
    assert found.left_out == {"ffn32@b2-s16": "no memory"}
    with pytest.raises(SelectionError, match="memory_mb"):
        measure_bundle(open_bundle(tiny_bundle), silent, threads=1, memory_mb=1e-6)


def test_more_threads_than_there_are_cpus_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="threads: expected a whole number from 1 to"):
        measure_bundle(open_bundle(tiny_bundle), silent, threads=10**6)


@pytest.mark.parametrize(("before", "meanwhile"), [(0.83, 0.0), (0.0, 0.83), (None, 0.83)])
def test_a_busy_host_is_refused_unless_forced(
    tiny_bundle: Path, quick: list[float | None], before: float | None, meanwhile: float
) -> None:
    quick[:] = [before, meanwhile]
    bundle = open_bundle(tiny_bundle)
    with pytest.raises(MeasurementError) as error:
        measure_bundle(bundle, silent, threads=1)
    assert str(error.value) == (
        "this host: other programs use 83% of the CPUs, expected at most 20%, so that a measurement would say little; "
        "nothing was kept. Wait until they are done, or measure with `force=True`, which marks figures as noisy"
    )
    forced = measure_bundle(bundle, silent, threads=1, force=True).measurement
    assert {point.noise.others_share for each in forced.engines for point in each.points} == {meanwhile}


def test_where_the_system_does_not_say_how_busy_it_is_engines_are_measured(
    tiny_bundle: Path, quick: list[float | None]
) -> None:
    quick[:] = [None, None]
    found = measure_bundle(open_bundle(tiny_bundle), silent, threads=1)
    assert {point.noise.others_share for each in found.measurement.engines for point in each.points} == {None}


def test_engines_that_tasks_are_merged_into_are_measured_too() -> None:
    bundle = open_bundle(GOLDEN / "bundle-merged")
    found = measure_bundle(bundle, silent, threads=1)
    assert [each.engine for each in found.measurement.engines] == [one.id for one in bundle.manifest.timed_engines]
    assert {each.residency for each in found.measurement.engines} == {"packed"}
