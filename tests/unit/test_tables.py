from nestforge.tables import Table, as_html

HOSTILE = '<script>alert("1")</script>\x1b[2J\n</table>'


def test_a_row_an_item_and_a_cell_a_heading() -> None:
    table = Table.of([1.5, 2.0], {"whole": int, "half | of it": lambda number: f"{number / 2:.2f}"})
    assert table == Table(["whole", "half | of it"], [["1", "0.75"], ["2", "1.00"]])
    assert table.markdown() == "| whole | half \\| of it |\n| --- | --- |\n| 1 | 0.75 |\n| 2 | 1.00 |"
    assert Table.facts([("a", "1")]).markdown() == "|  |  |\n| --- | --- |\n| a | 1 |"


def test_text_of_others_is_escaped_wherever_it_stands() -> None:
    shown = as_html(HOSTILE, [(HOSTILE, HOSTILE)], [HOSTILE], [[HOSTILE]])
    assert "<script" not in shown
    assert "\x1b" not in shown
    assert shown.count("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\\x1b[2J\\n&lt;/table&gt;") == 5
    assert shown.count("</table>") == 2


def test_long_tables_and_cells_are_cut() -> None:
    shown = as_html("rows", columns=["n"], rows=[["x" * 10_000]] * 70)
    assert shown.count("<tr>") == 65
    assert "<p>and 6 more</p>" in shown
    assert len(shown) < 40_000
    assert as_html("alone") == "<div><strong>alone</strong>\n</div>"
