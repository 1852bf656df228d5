"""``nestforge profile``: measure this host and write its device profile."""

from __future__ import annotations

from pathlib import Path

import click

from ....profiles.device_profile import profile_data
from ....profiles.host_load import load_warning
from ....profiles.load_profile import dump_profile
from ....profiles.probe_host import measured_profile
from ....whole_file import require_new, write_whole
from ...console import print_json, say, working
from ...options import json_option, overwrite_option


@click.command(epilog="\b\nExamples:\n  nestforge profile --output my.yaml\n  nestforge profile --json")
@click.option("--output", type=click.Path(path_type=Path), help="YAML file to write; without it the YAML is printed.")
@click.option("--force", is_flag=True, help="Also while other programs are busy; such rates are marked.")
@overwrite_option
@json_option
def command(output: Path | None, overwrite: bool, force: bool, as_json: bool) -> None:
    """Measure this host and write its device profile.

    The result is what --profile accepts. Edit the copy: its name, its buckets and above all its budgets are yours
    to choose. Nothing is written where other programs use the processor.
    """
    if output is not None:
        require_new(output, overwrite)
    with working():
        profile = measured_profile(force)
    if (busy := load_warning(profile.rates.others_share)) is not None:
        say(f"warning: {busy} meanwhile: rates are too low", err=True)
    if output is not None:
        text = dump_profile(profile)
        write_whole(output, lambda stream: stream.write(text.encode()), "the profile", new=not overwrite)
        say(f"wrote {output}", err=True)
    if as_json:
        print_json(profile_data(profile))
    elif output is None:
        click.echo(dump_profile(profile), nl=False)
