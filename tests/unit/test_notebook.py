from __future__ import annotations

from nestforge.notebook import as_html

HOSTILE = '<script>alert("1")</script>\x1b[2J\n</table>'


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
