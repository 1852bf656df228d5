"""Google's table of slices of Gemma 3n: read without executing it, and refused where it is of another model."""

from pathlib import Path

import pytest
from nestforge.elastic import DEPTH, Axis, ElasticSpec
from nestforge.errors import CheckpointError, PlanError
from nestforge.exporters.published_slices import TableRow, read_slicing_table, sets_left_out

HEADER = "name, # Layers, # Effective Params (B), MMLU PT accuracy, FFN Hidden Dims, Layers Skipped\n"
SPEC = ElasticSpec(
    (
        Axis(DEPTH, 3, (2, 3)),
        Axis("layers.0.ffn", 32),
        Axis("layers.1.ffn", 32, None, 3),
        Axis("layers.2.ffn", 32, None, 2),
    ),
    (),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "configs.csv"
    path.write_text(text)
    return path


def test_rows_have_a_name_widths_and_what_is_stated(tmp_path: Path) -> None:
    rows = read_slicing_table(
        write(
            tmp_path,
            HEADER
            + 'Official E2B,30,1.91,50.9%,"[2_048 * 4, 2_048*8,\n 16]","[20, 21]"\n'
            + '"E2.5, by hand",35,2.5,,"[1,]",\n'
            + "Third,35,nan,n/a,[2 * 3 * 4],[]\n",
        )
    )
    assert [(row.name, row.widths, row.left_out, dict(row.states)) for row in rows] == [
        ("Official E2B", (8192, 16384, 16), (20, 21), {"# Effective Params (B)": 1.91, "MMLU PT accuracy": 0.509}),
        ("E2.5, by hand", (1,), (), {"# Effective Params (B)": 2.5}),
        ("Third", (24,), (), {}),
    ]
    assert sets_left_out(rows) == ((20, 21),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"configs.csv: no rows; expected a table with columns name, FFN Hidden Dims, Layers Skipped"),
        ("name,widths\na,1\n", r"configs.csv: line 2: no column 'FFN Hidden Dims'"),
        (
            HEADER + 'a,1,1,1,"__import__(""os"").system(""x"")",[]\n',
            r"line 2: FFN Hidden Dims: expected a list such as",
        ),
        (
            HEADER + "a,1,1,1,[2 ** 99],[]\n",
            r"FFN Hidden Dims: expected a list such as \[2_048 \* 4, 2_048 \* 8\], got",
        ),
        (HEADER + "a,1,1,1,[-1],[]\n", "FFN Hidden Dims: expected a list"),
        (HEADER + "a,1,1,1,8192,[]\n", "FFN Hidden Dims: expected a list"),
        (HEADER + "a,1,1,1,[],[]\n", "FFN Hidden Dims: expected a list such as .*, got none"),
        (HEADER + 'a,1,1,1,[8],"[1, two]"\n', "Layers Skipped: expected a list"),
        (HEADER + ",1,1,1,[8],[]\n", "line 2: name: expected a name of one line"),
        (HEADER + "a,1,1,1,[8],[]\na,1,1,1,[9],[]\n", "two rows are called 'a'"),
        (HEADER + 'a,1,1,1,"[8],[]\n', "line 1: unexpected end of data"),
        (HEADER + "a,1,1,1,[8, 9],[]\n", "line 2: more cells than columns; a list with commas needs quotes"),
        (HEADER + "a,two,1,1,[8],[]\n", "line 2: # Layers: expected a whole number, got 'two'"),
        ("name,name,FFN Hidden Dims,Layers Skipped\na,b,[8],[]\n", "two columns are called 'name'"),
        (HEADER + "a,1,1,1,[8],[]\n" * 1001, "more than 1000 rows|two rows"),
    ],
)
def test_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_slicing_table(write(tmp_path, text))


def test_a_row_is_a_submodel_of_the_model_that_it_is_of() -> None:
    whole = TableRow("t: line 2", "a", (8, 16, 32)).submodel(SPEC)
    assert whole.id == "depth3-ffn8x1_16x1_32x1"
    for widths in ((8, 32), (8, 16, 32)):  # of the layers that are left, or of all
        found = TableRow("t: line 2", "a", widths, (1,)).submodel(SPEC)
        assert (found["layers.0.ffn"], found["layers.1.ffn"], found["layers.2.ffn"], found.depth) == (8, 32, 32, 2)


@pytest.mark.parametrize(
    ("widths", "left_out", "message"),
    [
        ((8,), (), "t: line 2: FFN Hidden Dims: 1 widths, expected 3; the table is of another model"),
        ((8,), (1,), "t: line 2: FFN Hidden Dims: 1 widths, expected 2 or 3; the table is of another model"),
        ((8, 33, 8), (), "33 neurons in layer 1, expected 1 to 32; the table is of another model"),
        ((8, 0, 8), (), "0 neurons in layer 1, expected 1 to 32"),
    ],
)
def test_of_another_model(widths: tuple[int, ...], left_out: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TableRow("t: line 2", "a", widths, left_out).submodel(SPEC)


def test_another_number_of_layers() -> None:
    for layers in (2, 3):  # that are left, or of the model
        TableRow("t: line 2", "a", (8, 32), (1,), layers).submodel(SPEC)
    with pytest.raises(PlanError, match="t: line 2: # Layers: 35, expected 2; the table is of another model"):
        TableRow("t: line 2", "a", (8, 32), (1,), 35).submodel(SPEC)
