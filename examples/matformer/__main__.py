"""``make demo-matformer``: train universal models, compile two for eight budgets, show quality over latency; and let
a third write.

Training is done once, and so is each compile.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ...bundle.open_bundle import open_bundle
from ...errors import OutputError
from ...profiles.budget import BudgetSpec
from ...profiles.load_profile import dump_profile
from ...profiles.probe_host import host_profile
from ...runtime.consistency.measure import consistency
from ...runtime.load import load
from ...tables import Table
from ...tools.console import print_table, working
from ..budget_curve import BudgetPoint, budget_points, draw_curves, points_table
from ..commands import compile_once, demonstrate, run
from .writing import PROMPTS, agreement, levels_of, ways_of_writing, ways_table

FOLDER = Path("demo/matformer")
PROFILE = FOLDER / "eight-budgets.yaml"
# Per model: what it is, the bucket, the held-out data, and the figure of its quality.
MODELS = {
    "lm": ("MatLM on Python sources", "1x128", ("--text", "lm.txt"), "loss"),
    "vit": ("MatViT on handwritten digits", "1x1", ("--data", "vit.npz"), "accuracy"),
}
BUDGETS = 8
WRITER = "writer"
# Levels trained alone, as drafts beside its own.
ALONE = ("S", "M")
_TEXTS = 200  # for the agreement of drafts


def steps() -> None:
    run(sys.executable, "-m", "nestforge.examples.matformer.train", "--output", str(FOLDER))
    _write_profile()
    curves: dict[str, tuple[str, list[BudgetPoint]]] = {}
    for name, (what, bucket, (option, file), figure) in MODELS.items():
        bundle = FOLDER / f"{name}.bundle"
        data = (option, str(FOLDER / file))
        compile_once(FOLDER / name, bundle, "--profile", str(PROFILE), "--bucket", bucket, *data)
        opened = open_bundle(bundle)
        with working() as progress:
            texts, rows = (FOLDER / file, None) if option == "--text" else (None, FOLDER / file)
            found = consistency(opened, text=texts, data=rows, progress=progress)
        curves[what] = figure, budget_points(opened, found)
    sections = ["# Eight budgets from one universal model"]
    for what, (figure, points) in curves.items():
        table = points_table(points, figure)
        print(f"\n{what}: budgets in FFN parameters, largest submodel within each\n", flush=True)
        print_table(table.columns, table.rows)
        sections += [f"## {what}", table.markdown()]
    sections += ["# A nested model writes", *_write()]
    picture, report = FOLDER / "curve.png", FOLDER / "report.md"
    draw_curves(curves, picture)
    report.write_text("\n\n".join(sections) + "\n")
    print(f"\nThe curves: {picture.resolve()}\nThe tables as a page: {report.resolve()}")


def _write() -> list[str]:
    """Compiles the model that is there to generate, shows how it writes, and returns that as sections of a page."""
    quiet = ("--profile", "host-cpu", "--no-measure", "--text", str(FOLDER / f"{WRITER}.txt"))
    compile_once(FOLDER / WRITER, FOLDER / f"{WRITER}.bundle", *quiet, "--include", "levels", "--generate")
    for level in ALONE:
        name = f"{WRITER}-{level}-alone"
        compile_once(FOLDER / name, FOLDER / f"{name}.bundle", *quiet)
    texts = (FOLDER / f"{WRITER}.txt").read_text().splitlines()[:_TEXTS]
    with load(FOLDER / f"{WRITER}.bundle") as model:
        largest = levels_of(model.bundle.manifest)[0]
        ways = ways_of_writing(model)
        drafts = []
        for level in ALONE:
            with load(FOLDER / f"{WRITER}-{level}-alone.bundle") as other:
                nested, alone = agreement(model, model, level, texts), agreement(model, other, None, texts)
            drafts.append([level, f"{nested:.1%}", f"{alone:.1%}"])
        drawn = model.generate(PROMPTS[1], max_tokens=200, temperature=0.7, seed=0).text
    table = ways_table(ways, largest)
    accepted = Table(["draft", f"next token of {largest}, nested", "of a model trained alone"], drafts)
    greedy = next(way for way in ways if way.name == largest).texts[1]
    shown = f"{PROMPTS[1]}{greedy}\n\nand drawn at temperature 0.7:\n\n{PROMPTS[1]}{drawn}"
    print(f"\nMatLM that writes, {len(PROMPTS)} prompts, greedy, ways in turns\n", flush=True)
    print_table(table.columns, table.rows)
    print()
    print_table(accepted.columns, accepted.rows)
    print(f"\n{largest} writes:\n\n{shown}")
    return [table.markdown(), accepted.markdown(), f"```\n{shown}\n```"]


def _write_profile() -> None:
    """This machine, with a budget for every eighth of the FFN parameters."""
    shares = [100 * step / BUDGETS for step in range(1, BUDGETS + 1)]
    budgets = {f"ffn-{share:g}": BudgetSpec(ffn_parameters=f"{share:g}%") for share in shares}
    text = dump_profile(replace(host_profile(), name="eight-budgets", budgets=budgets))
    try:
        PROFILE.write_text(text)
    except OSError as failure:
        raise OutputError(f"{PROFILE}: cannot be written ({failure.strerror})") from failure


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
