"""``nestforge index``: a corpus, embedded by the universal model of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from ....runtime.engines.residency import RESIDENCIES, Residency
from ....whole_file import require_new
from ...console import print_facts, print_json, working
from ...options import bundle_argument, json_option, overwrite_option, prompt_name_option, prompt_option, refuse_prompts
from ...text_lines import read_text_lines

EXAMPLES = """\b
Examples:
  nestforge index my.bundle --text corpus.txt --output corpus.index
  nestforge index my.bundle --text corpus.txt --prompt-name document --output corpus.index
  nestforge index my-vit.bundle --data images.npz --output images.index
"""


@click.command(epilog=EXAMPLES)
@bundle_argument
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 file, one text a line.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="NPZ file with one array per input, by name, rows first, and perhaps 'labels' of the rows.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="New file to write the index to.")
@overwrite_option
@click.option("--embedding", metavar="NAME", help="The output to index. Default: the one that the bundle names.")
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the largest bucket; else refused.")
@prompt_option
@prompt_name_option
@click.option(
    "--residency",
    type=click.Choice(["auto", *RESIDENCIES]),
    default="auto",
    show_default=True,
    help="How the universal model's engines hold weights.",
)
@json_option
def command(
    bundle: Path,
    text: Path | None,
    data: Path | None,
    output: Path,
    overwrite: bool,
    embedding: str | None,
    truncate: bool,
    prompt: str | None,
    prompt_name: str | None,
    residency: Residency | Literal["auto"],
    as_json: bool,
) -> None:
    """Embed a corpus with the universal model, for `nestforge search` with any submodel.

    The index belongs to this bundle's weights; it is refused by any other universal model.
    """
    from ....runtime.inputs.files import read_array_file
    from ....runtime.load import load
    from ....runtime.retrieval.index_file import MAX_BYTES
    from ...functions import index as build_index

    if (text is None) == (data is None):
        raise click.UsageError("expected either --text or --data")
    if truncate and text is None:
        raise click.UsageError("--truncate is for --text")
    refuse_prompts(prompt, prompt_name, text is not None)
    require_new(output, overwrite)
    blank = 0
    with load(bundle, residency=residency) as model, working() as progress:
        if text is not None:
            lines = read_text_lines(text)
            blank = lines.blank
            index = build_index(
                model,
                lines.texts,
                output=embedding,
                truncate=truncate,
                progress=progress,
                prompt=prompt,
                prompt_name=prompt_name,
            )
        else:
            assert data is not None
            file = read_array_file(data, model.bundle.manifest.inputs, MAX_BYTES, MAX_BYTES)
            index = build_index(model, file.feeds, labels=file.labels, output=embedding, progress=progress)
    index.save(output)
    identity = index.identity
    if as_json:
        print_json({"path": str(output), "blank": blank, "labels": index.labels is not None, "identity": identity})
        return
    built_by = ", ".join(f"{identity.submodel}@{built.bucket.label}" for built in identity.engines)
    print_facts(
        [
            ("rows", f"{identity.rows} x {identity.width}, output {identity.output}"),
            *([("left out", f"{blank} blank lines")] if blank else []),
            *([("prompt", repr(identity.prompt))] if identity.prompt else []),
            *([("truncated", f"{identity.truncated} texts")] if identity.truncated else []),
            ("compared by", f"{identity.similarity}, ties: {identity.ties}"),
            ("built by", built_by),
            ("weights", identity.weights_sha256),
            ("kept in", str(output)),
        ]
    )
