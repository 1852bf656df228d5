"""``nestforge add-task``: one more task for a bundle whose engines take tasks."""

from __future__ import annotations

from pathlib import Path

import click

from ....bundle.open_bundle import open_bundle
from ...bundle_view import bundle_data, print_tasks
from ...console import let_waiting_threads_sleep, print_json, say, working
from ...options import TaskType, bundle_argument, json_option

EXAMPLES = """\b
Examples:
  nestforge add-task my.bundle reviews=TASK_FOLDER --against MODEL
  nestforge add-task my.bundle reviews=ADAPTER_FOLDER --against MODEL --json
"""


@click.command(epilog=EXAMPLES)
@bundle_argument
@click.argument("task", type=TaskType())
@click.option(
    "--against",
    metavar="MODEL",
    required=True,
    type=click.Path(path_type=Path),
    help="Model folder of the bundle's base: PyTorch's side of the gate.",
)
@json_option
def command(bundle: Path, task: tuple[str, Path], against: Path, as_json: bool) -> None:
    """Add a task to a bundle that was compiled with --task.

    TASK is NAME=FOLDER. Every engine that may answer for it is run with its tensors and compared with PyTorch; what the
    bundle has stays untouched, and where anything is refused nothing is added.
    """
    let_waiting_threads_sleep()
    from ....compiler.add_task import add_task

    name, folder = task
    with working() as progress:
        path = add_task(bundle, name, folder, against, progress)
    opened = open_bundle(path)
    if as_json:
        print_json(bundle_data(opened))
        return
    print_tasks(opened)
    say(f"\nadded {name} to {bundle}")
