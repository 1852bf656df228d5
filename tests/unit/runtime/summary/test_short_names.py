"""Labels in the place of ids."""

from __future__ import annotations

from nestforge.bundle.manifest import Manifest
from nestforge.runtime.summary.short_names import ShortNames
from nestforge.runtime.summary.table import Table

NAMES = ShortNames({"ffn16": "S", "ffn16x1_32x1": "S+1", "ffn32": "XL", "ffn32-bits8": "XL.int8"})


def test_whole_ids_become_labels_also_in_those_of_engines_and_in_sentences() -> None:
    assert NAMES("ffn16x1_32x1@b1-s8") == "S+1@b1-s8"
    assert NAMES("ffn32-bits8.layers0_3@b1-s8") == "XL.int8.layers0_3@b1-s8"
    assert NAMES("in the next, ffn32, latency exceeds") == "in the next, XL, latency exceeds"
    assert NAMES("ffn16-heads2 and ffn168 are others") == "ffn16-heads2 and ffn168 are others"


def test_a_table_says_which_label_is_which_id(manifest: Manifest) -> None:
    assert ShortNames.of(manifest).ids == Table(["submodel", "id"], [["S", "ffn16"], ["XL", "ffn32"]])
    assert ShortNames({})("ffn16") == "ffn16"
