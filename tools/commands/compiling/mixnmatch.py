"""``nestforge mixnmatch``: a budget's rung on held-out text, beside other promotion orders and a search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....profiles.compile_request import CompileRequest
from ...console import print_facts, print_json, print_table, working
from ...options import BudgetType, field_options, json_option, model_argument

if TYPE_CHECKING:
    from ....compiler.mix_n_match import Comparison
    from ....profiles.budget import BudgetSpec

EXAMPLES = """\b
Examples:
  nestforge mixnmatch MODEL --text held-out.txt --budget 'non_embedding_parameters<=60 %'
  nestforge mixnmatch MODEL --text held-out.txt --budget 'ffn_parameters<=94.4M' --evaluations 200 --seed 1 --json
"""


@click.command(epilog=EXAMPLES)
@model_argument
@click.option(
    "--text",
    required=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text, one example a line, that the model was not trained on.",
)
@click.option("--budget", required=True, type=BudgetType(), help="One limit, such as 'ffn_parameters<=94.4M'.")
@field_options(CompileRequest, "profile", "levels")
@click.option(
    "--evaluations",
    type=click.IntRange(min=4),
    default=64,
    show_default=True,
    help="Assignments that the search evaluates, the four promotion orders among them.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@json_option
def command(
    model: Path,
    text: Path,
    budget: tuple[str, BudgetSpec],
    profile: str,
    levels: dict[str, tuple[float, ...]],
    evaluations: int,
    seed: int,
    as_json: bool,
) -> None:
    """Compare ways to assign levels to layers within one budget.

    Loss of the submodel that the ladder gives the budget, in each of the four promotion orders, and of the best
    assignment that an evolutionary search finds. In PyTorch; nothing is compiled. The search chooses on half of the
    held-out texts, and the table shows the loss on the other half.
    """
    from ....compiler.mix_n_match import compare_assignments

    request = CompileRequest(model, profile, levels=levels, budgets=dict([budget]))
    with working() as progress:
        compared = compare_assignments(request, text, evaluations=evaluations, seed=seed, progress=progress)
    if as_json:
        print_json(compared)
    else:
        _print(compared)


def _print(compared: Comparison) -> None:
    print_facts(
        [
            ("model", compared.model),
            ("budget", f"{compared.metric} <= {compared.limit:,.10g}"),
            ("loss", f"{compared.loss_unit}, on {compared.texts} held-out texts"),
            (
                "search",
                f"{compared.evaluations} assignments on {compared.search_texts} other texts, {compared.seconds:.1f} s",
            ),
        ]
    )
    click.echo()
    rows = [[a.way, f"{a.size:,.10g}", f"{a.loss:.4f}"] for a in compared.assignments]
    print_table(["assignment", compared.metric, "loss"], rows)
    click.echo()
    print_table(["assignment", "id"], [[a.way, a.submodel] for a in compared.assignments])
