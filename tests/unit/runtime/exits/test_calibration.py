import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.manifest import CALIBRATION_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleFormatError, SelectionError
from nestforge.runtime.exits.policy import Calibration, ExitPolicy, check_name, save_policy
from support.exit_bundles import policy
from support.sealing import edit_sealed


@pytest.fixture
def bundle(exits_bundle: Path, tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(exits_bundle, tmp_path / "own.bundle"))


def write_edited(bundle: Bundle, edit: Callable[[dict[str, Any]], object]) -> None:
    save_policy(bundle, policy(), default=True)
    edit_sealed(bundle.path / CALIBRATION_NAME, edit)


def test_what_is_written_is_read(bundle: Bundle) -> None:
    assert Calibration.read(bundle) is None
    kept = Calibration.made_for(bundle, {}, ()).with_policy(policy(), default=True)
    assert kept.write(bundle) == bundle.path / CALIBRATION_NAME
    found = Calibration.read(bundle)
    assert found == kept
    assert found.find("depth4", "lean").policy() == ExitPolicy((0.25, 0.5), "<=", "per_row", "lean")
    # The bundle is what it was: the file is none of the manifest's.
    assert open_bundle(bundle.path, "full").manifest == bundle.manifest


def test_policies_by_name_and_submodel(bundle: Bundle) -> None:
    kept = Calibration.made_for(bundle, {}, ()).with_policy(policy(), default=True)
    kept = kept.with_policy(policy(submodel="depth2"), default=False)
    kept = kept.with_policy(policy("other"), default=False)
    assert [(one.submodel, one.name) for one in kept.policies] == [
        ("depth2", "lean"),
        ("depth4", "lean"),
        ("depth4", "other"),
    ]
    replaced = kept.with_policy(replace(policy(), batch=8), default=False)
    assert len(replaced.policies) == 3
    assert replaced.find("depth4", "lean").batch == 8
    assert replaced.default("depth4") == replaced.find("depth4", "lean")
    assert replaced.default("depth2") is None
    with pytest.raises(SelectionError, match="no calibrated exits 'fast' of submodel depth4; it has lean, other"):
        kept.find("depth4", "fast")


@pytest.mark.parametrize("name", ["mean_latency_ms<=5", "mean_latency_ms<=12.5%", "lean", "A.b-c+1e9"])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "off", "OFF", "0.3", "nan", "two words", "-1", "a" * 81, "a\nb"])
def test_names_that_would_read_as_something_else(name: str) -> None:
    with pytest.raises(SelectionError, match="expected a letter, then up to 79 of letters, digits and"):
        check_name(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(schema_version=3), "schema_version '3', expected 1; use the nestforge release"),
        (lambda data: data.update(schema_version=True), "schema_version 'True', expected 1"),
        (lambda data: data.update(polices=[]), "unknown key 'polices'; did you mean 'policies'?"),
        (lambda data: data["policies"][0].pop("budget"), "policies[0]: missing key 'budget'"),
        (lambda data: data["policies"][0].update(compare=">"), "policies[0]: compare: got '>'"),
        (lambda data: data["policies"][0].update(thresholds=[0.1]), "1 thresholds, expected 2"),
        (lambda data: data["policies"][0].update(thresholds=["0.3", 0.2]), "expected a number, got str '0.3'"),
        (lambda data: data["policies"][0].update(rule="row"), "rule: got 'row'; did you mean 'per_row'?"),
        (lambda data: data["policies"][0].update(histogram=[0, 0, 0]), "histogram [0, 0, 0], expected counts of 3"),
        (lambda data: data["policies"][0].update(histogram=[1, -1, 0]), "expected at least 0, got -1"),
        (lambda data: data["policies"][0]["measured"].update(quality=1.5), "quality: expected at most 1, got 1.5"),
        (lambda data: data["policies"][0].update(correction=-1), "correction: expected at least 0, got -1"),
        (lambda data: data["policies"][0].update(engines=["depth8@b1-s8"]), "engine 'depth8@b1-s8' is not in this"),
        (lambda data: data["policies"][0].update(submodel="depth9"), "no such submodel in this bundle"),
        (lambda data: data["policies"][0].update(name="off"), "not a name that a policy may have"),
        (lambda data: data["policies"].append(data["policies"][0]), "stands twice"),
        (lambda data: data.update(defaults={"depth4": "fast"}), "defaults: no policy 'fast' of submodel 'depth4'"),
        (lambda data: data.update(defaults={"depth3": "lean"}), "defaults: no policy 'lean' of submodel 'depth3'"),
    ],
)
def test_what_is_malformed_is_refused(bundle: Bundle, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    write_edited(bundle, edit)
    with pytest.raises(BundleFormatError) as failure:
        Calibration.read(bundle)
    assert message in str(failure.value)
    assert str(failure.value).startswith(f"{bundle.path / CALIBRATION_NAME}: ")
    assert "calibrate again" in str(failure.value)


def test_a_model_without_exits_has_no_calibration(bundle: Bundle) -> None:
    write_edited(bundle, lambda data: None)
    plain = replace(bundle, manifest=replace(bundle.manifest, exits=None))
    with pytest.raises(BundleFormatError, match="this bundle's model has no exits"):
        Calibration.read(plain)


def test_policies_that_others_kept_meanwhile_stay(bundle: Bundle) -> None:
    """Two calibrations that began on the same folder, each with its own minutes of work."""
    first, second = policy(), policy("other")
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(lambda each: save_policy(bundle, each, default=True), (first, second)))
    found = Calibration.read(bundle)
    assert found in kept
    assert {each.name for each in found.policies} == {first.name, second.name}


def test_a_folder_that_cannot_be_locked_is_written_all_the_same(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert save_policy(bundle, policy(), default=False) == Calibration.read(bundle)
