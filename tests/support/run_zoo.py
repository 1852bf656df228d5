"""Every recipe of the zoo against its model: wrong ones found, right ones passed, and whether the module is named.

``python tests/support/run_zoo.py FOLDER [WORD ...]``: exports are made in FOLDER once; with words, only recipes whose
names contain one.
"""

import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nestforge.parity.check import check_parity
from support.export_recipes import RECIPES
from support.exports import Recipe, Zoo


def names_rightly(recipe: Recipe, module: str) -> bool:
    return module in recipe.at


def main(folder: Path, words: list[str]) -> int:
    zoo, missed, named, wrong = Zoo(folder), [], 0, 0
    recipes = [recipe for recipe in RECIPES if not words or any(word in recipe.name for word in words)]
    for recipe in recipes:
        start = time.perf_counter()
        try:
            export = zoo.export(recipe)
            made = time.perf_counter() - start
            report = check_parity(export, zoo.model(recipe.family))
        except Exception as failure:  # noqa: BLE001  (every recipe is told of)
            missed.append(recipe.name)
            print(f"ERROR  {recipe.name}: {type(failure).__name__}: {str(failure)[:300]}")
            if words:
                traceback.print_exc()
            continue
        took = time.perf_counter() - start
        faults = [graph.fault for graph in report.graphs if graph.fault]
        ok = report.is_right == recipe.is_right
        if not ok:
            missed.append(recipe.name)
        note = ""
        if not recipe.is_right and not report.is_right:
            wrong += 1
            rightly = names_rightly(recipe, faults[0].module)
            named += rightly
            said = recipe.kind in faults[0].kind
            note = ("" if rightly else f" UNNAMED (expected {recipe.at})") + ("" if said else f" KIND {recipe.kind}")
        print(
            f"{'ok    ' if ok else 'MISSED'} {made:5.1f}s {took - made:5.1f}s {recipe.name}: {report.line[:400]}{note}",
            flush=True,
        )
    print(f"{len(recipes)} exports; missed {len(missed)}: {missed}; of {wrong} wrong ones found {named} named rightly")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
