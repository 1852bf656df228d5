import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.entries.engine_entry import ParityOutput, ParityRouting
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.parity.engine_verdict import EngineVerdict
from nestforge.compiler.verify import VerifyReport
from nestforge.runtime.summary import ShortNames
from nestforge.tables import Table
from nestforge.tools.commands.checks import _parity_report
from support.commands import error_of, json_of, nestforge, shown, usage_of
from support.sealing import edit_manifest, edit_sealed


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"the fox {'jumps ' * n}over the dog" for n in range(30)))
    return path


def test_a_table_with_units_and_what_they_mean(compiled: Any, texts: Path) -> None:
    result = nestforge("consistency", compiled.bundle, "--text", texts)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1:5] == [
        "universal  ffn64-heads4",
        "compared   output sentence_embedding as embedding",
        "samples    30, 28 cut to 8 tokens",
        "bucket     1x8",
    ]
    assert lines[6].split() == ["submodel", "M", "params", "mean", "cosine", "recall@10"]
    assert lines[-5].split()[0] == "XL"
    assert lines[-5].split()[2:] == ["1.0000", "±0.0000", "1.000", "±0.000"]
    assert lines[-3] == "±: standard error of so many samples"
    assert lines[-2].startswith("mean cosine: cosine between ")
    assert lines[-1].startswith("recall@10: share of each input's ten nearest others")
    assert result.stderr.startswith("compare: ")


def test_json_of_one_submodel(compiled: Any, texts: Path) -> None:
    data = json_of("consistency", compiled.bundle, "--text", texts, "--submodel", "XL")
    assert data["bundle"] == str(compiled.bundle)
    assert (data["universal"], data["bucket"]) == ("ffn64-heads4", {"batch": 1, "sequence": 8})
    assert (data["samples"], data["given"], data["truncated"]) == (30, 30, 28)
    (row,) = data["submodels"]
    assert row["figures"] == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}


def test_it_takes_one_kind_of_data(compiled: Any) -> None:
    for arguments in ([], ["--text", "a", "--data", "b"]):
        says = usage_of("consistency", compiled.bundle, *arguments)
        assert "expected exactly one of --text and --data" in says


def test_each_refusal_is_one_line(compiled: Any, texts: Path, tmp_path: Path) -> None:
    few, missing, long = tmp_path / "few.txt", tmp_path / "no.txt", tmp_path / "long.npz"
    few.write_text("the fox\n" * 100)
    feeds = {name: np.ones((30, 9), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    feeds["input_ids"] += np.arange(30)[:, None]
    np.savez(long, **feeds)
    for arguments, says in (
        (["--text", few], f"{few}: 1 different texts, one per line; expected"),
        (["--text", missing], f"{missing}: cannot be read (No such file or directory); expected a UTF-8 text"),
        (["--data", texts], f"{texts}: expected an NPZ file of plain arrays"),
        (["--text", texts, "--submodel", "Q"], "no submodel 'Q' in this bundle"),
        (["--data", long], "rows have 9 positions, the longest bucket takes 8"),
    ):
        assert says in error_of("consistency", compiled.bundle, *arguments)


def keep_only(field: str, key: str, names: list[str]) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update({field: [entry for entry in data[field] if entry[key] in names]})


def test_a_bundle_without_its_universal_model(compiled: Any, texts: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(compiled.bundle, tmp_path / "own.bundle"))
    rest = [entry.id for entry in open_bundle(own).manifest.engines if entry.submodel != "ffn64-heads4"]
    edit_sealed(own / "build.json", keep_only("latencies", "engine", rest))
    edit_manifest(own, keep_only("engines", "id", rest))
    assert "has no engine of the universal model" in error_of("consistency", own, "--text", texts)


def test_a_universal_model_that_is_not_float32_is_named_so(compiled: Any, texts: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(compiled.bundle, tmp_path / "own.bundle"))
    in_int8 = {"precision": "int8"}
    edit_manifest(own, lambda data: [each.update(in_int8) for each in (*data["engines"], *data["submodels"])])
    lines = shown("consistency", own, "--text", texts).splitlines()
    assert lines[1] == "universal  ffn64-heads4 (int8)"
    assert lines[-1] == "note: figures are against the universal model in int8, not in float32"
    assert json_of("consistency", own, "--text", texts)["universal_precision"] == "int8"


NAMES = ShortNames({"ffn8": "S"})
OUTPUTS = (ParityOutput("a", 1e-6, 2e-5, 0.9999999, 1e-7, 0.0, 0.0), ParityOutput("b", 3e-6, 1e-5, 1.0, 1e-7, 0.0, 0.0))
DECISIONS = (ParityRouting("routes.1", 40, 1, 2e-7, {}), ParityRouting("routes.2", 40, 2, 0.0, {}))


def rows(*verdicts: EngineVerdict) -> Sequence[Sequence[str]]:
    report = VerifyReport("b", 1, 1, "m", verdicts)
    _, table, _ids = _parity_report(Path("b"), report, NAMES)
    assert isinstance(table, Table)
    return table.rows


def test_a_row_has_the_worst_of_everything() -> None:
    assert rows(EngineVerdict("ffn8@b1-s8", OUTPUTS, None, DECISIONS)) == [
        ["S@b1-s8", "equal", "3.0e-06", "2.0e-05", "0.9999999", "80", "3", "2.0e-07"]
    ]


def test_a_row_has_dashes_for_what_there_is_not() -> None:
    broken = EngineVerdict("e", (), "decision routes.1: expected 0..31, got 132")
    _, without, first = rows(EngineVerdict("d", OUTPUTS, None, DECISIONS), EngineVerdict("e", OUTPUTS), broken)
    assert without[5:] == ["-", "-", "-"]
    assert first == ["e", "differs", *["-"] * 6]
    assert len(rows(broken)[0]) == 5, "no columns of routes where no engine has some"
