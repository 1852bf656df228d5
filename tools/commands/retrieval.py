"""``nestforge index`` and ``search``: a corpus embedded by the universal model, queries by any submodel."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ...runtime.engines.residency import RESIDENCIES, Residency
from ...runtime.summary import ShortNames
from ...whole_file import require_new
from ..console import in_options, print_facts, print_json, print_table, say, working
from ..options import (
    bundle_argument,
    json_option,
    overwrite_option,
    prompt_name_option,
    prompt_option,
    read_text_lines,
    refuse_prompts,
)

if TYPE_CHECKING:
    from ...runtime.inputs.arrays import Array
    from ...runtime.model import ElasticModel
    from ...runtime.retrieval import Comparison, Found
    from ...runtime.rows import Corpus


_INDEX_EXAMPLES = """\b
Examples:
  nestforge index my.bundle --text corpus.txt --output corpus.index
  nestforge index my.bundle --text corpus.txt --prompt-name document --output corpus.index
  nestforge index my-vit.bundle --data images.npz --output images.index
"""


@click.command("index", epilog=_INDEX_EXAMPLES)
@bundle_argument
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 file, one text a line.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="NPZ file with one array per input, by name, rows first, and perhaps 'labels' of the rows.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="New file to write the index to.")
@overwrite_option
@click.option("--embedding", metavar="NAME", help="Output to index. Default: the bundle's embedding.")
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
def index_command(
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
    from ...runtime.inputs.files import read_array_file
    from ...runtime.load import load
    from ...runtime.retrieval.index import MAX_BYTES
    from ..functions import index as build_index

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


_SHOWN = 100  # characters of a text in a table

_SEARCH_EXAMPLES = """\b
Examples:
  nestforge search my.bundle corpus.index --query "how do I rank neurons?" --latency-ms 4
  nestforge search my.bundle corpus.index --queries questions.txt --submodel S --k 3 --json
  nestforge search my.bundle corpus.index --queries questions.txt --compare
"""


@click.command("search", epilog=_SEARCH_EXAMPLES)
@bundle_argument
@click.argument("index", type=click.Path(path_type=Path))
@click.option("--query", "texts", multiple=True, help="Text to search for; repeatable.")
@click.option("--queries", "file", type=click.Path(path_type=Path), help="UTF-8 file, one query a line.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="NPZ file of queries: an array per input, and perhaps 'labels'."
)
@click.option("--k", type=click.IntRange(min=1), default=10, show_default=True, help="Rows to find per query.")
@click.option("--budget", help="Named budget of the bundle.")
@click.option("--latency-ms", type=click.FloatRange(min=0, min_open=True), help="Latency limit of a query, in ms.")
@click.option("--submodel", metavar="ID", help="Submodel, by label or id.")
@click.option("--compare", is_flag=True, help="Search with every submodel and compare it with the universal model.")
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the largest bucket; else refused.")
@prompt_option
@prompt_name_option
@click.option(
    "--residency",
    type=click.Choice(["auto", *RESIDENCIES]),
    help="How engines hold weights. Default: shared, which opens at once; auto with --compare.",
)
@json_option
def search_command(
    bundle: Path,
    index: Path,
    texts: tuple[str, ...],
    file: Path | None,
    data: Path | None,
    k: int,
    budget: str | None,
    latency_ms: float | None,
    submodel: str | None,
    compare: bool,
    truncate: bool,
    prompt: str | None,
    prompt_name: str | None,
    residency: Residency | Literal["auto"] | None,
    as_json: bool,
) -> None:
    """Find the rows of INDEX that are nearest to each query.

    Without --budget, --latency-ms or --submodel the largest submodel encodes the queries. With --compare every
    submodel does, and a table shows what it finds beside what it saves.
    """
    from ...runtime.load import load
    from ...runtime.retrieval import Index
    from ..functions import compare as compare_submodels
    from ..functions import search

    if bool(texts) + (file is not None) + (data is not None) != 1:
        raise click.UsageError("expected one of --query, --queries and --data")
    if sum(limit is not None for limit in (budget, latency_ms, submodel)) > (0 if compare else 1):
        raise click.UsageError("expected at most one of --budget, --latency-ms and --submodel, and none with --compare")
    if truncate and data is not None:
        raise click.UsageError("--truncate is for texts")
    refuse_prompts(prompt, prompt_name, data is None)
    opened = Index.load(index)
    with load(bundle, residency=residency or ("auto" if compare else "shared")) as model:
        opened.check(model.bundle)
        queries, labels = _queries(model, texts, file, data)
        if compare:
            with working() as progress:
                comparison = compare_submodels(
                    model,
                    opened,
                    queries,
                    k=k,
                    labels=labels,
                    truncate=truncate,
                    progress=progress,
                    prompt=prompt,
                    prompt_name=prompt_name,
                )
            if as_json:
                print_json(comparison)
            else:
                _print_comparison(comparison)
            return
        names = ShortNames.of(model.bundle.manifest)
        found = search(
            model,
            opened,
            queries,
            k=k,
            budget=budget,
            latency_ms=latency_ms,
            submodel=submodel,
            truncate=truncate,
            prompt=prompt,
            prompt_name=prompt_name,
        )
    shown = list(queries) if isinstance(queries, tuple) else None
    if as_json:
        print_json(_found_data(found, shown))
    else:
        _print_found(found, shown, names)


def _queries(
    model: ElasticModel, texts: tuple[str, ...], file: Path | None, data: Path | None
) -> tuple[Corpus, Array | None]:
    """The queries, and their labels if they have any."""
    from ...runtime.inputs.files import read_array_file

    if data is not None:
        read = read_array_file(data, model.bundle.manifest.inputs)
        return read.feeds, read.labels
    return (texts if file is None else read_text_lines(file).texts), None


def _found_data(found: Found, queries: list[str] | None) -> dict[str, Any]:
    rows = []
    for number, (ids, scores) in enumerate(zip(found.ids.tolist(), found.scores.tolist(), strict=True)):
        hits = [{"id": row, "score": score} for row, score in zip(ids, scores, strict=True)]
        if found.entries is not None:
            hits = [{**hit, "entry": entry} for hit, entry in zip(hits, found.entries[number], strict=True)]
        rows.append({"query": queries[number] if queries else number, "hits": hits})
    return {
        "submodel": found.submodel,
        "reason": found.reason,
        "engines": found.engines,
        "truncated": found.truncated,
        "prompt": found.prompt,
        "timings_ms": {"encode": found.encode_ms, "search": found.search_ms},
        "queries": rows,
    }


def _print_found(found: Found, queries: list[str] | None, names: ShortNames) -> None:
    print_facts(
        [
            ("submodel", names(found.submodel)),
            ("because", in_options(found.reason)),
            ("engines", ", ".join(map(names, found.engines))),
            *([("prompt", repr(found.prompt))] if found.prompt else []),
            *([("truncated", f"{found.truncated} queries")] if found.truncated else []),
            ("timings", f"encode {found.encode_ms:.2f} ms, search {found.search_ms:.2f} ms"),
        ]
    )
    for row in _found_data(found, queries)["queries"]:
        say(f"\nquery {_shown(str(row['query']))}")
        cells = [[str(hit["id"]), f"{hit['score']:.4f}", _shown(hit.get("entry", ""))] for hit in row["hits"]]
        if found.entries is None:
            print_table(["row", "cosine"], [line[:2] for line in cells])
        else:
            print_table(["row", "cosine", "entry"], cells)


def _shown(text: str) -> str:
    """One short line."""
    return textwrap.shorten(text, _SHOWN, placeholder="...")


def _print_comparison(comparison: Comparison) -> None:
    k = comparison.k
    columns = ["submodel", "M params", "params saved", "MFLOPs a query", "FLOPs saved", f"recall@{k}"]
    columns += ["same nearest", "accuracy", "ms a query"]
    labelled = comparison.submodels[0].accuracy is not None
    rows = []
    for each in comparison.submodels:
        cells = [
            "/".join(each.labels) or each.submodel,
            f"{each.parameters / 1e6:.2f}",
            f"{100 * each.parameters_saved:.1f} %",
            f"{each.flops / 1e6:.1f}",
            f"{100 * each.flops_saved:.1f} %",
            f"{each.recall_at_k:.3f}",
            f"{100 * each.nearest_agreement:.1f} %",
            "-" if each.accuracy is None else f"{100 * each.accuracy:.1f} %",
            f"{each.ms_per_query:.3f}",
        ]
        rows.append(cells if labelled else [*cells[:7], cells[8]])
    print_table(columns if labelled else [*columns[:7], columns[8]], rows)
    cut = f"; {comparison.truncated} of them truncated" if comparison.truncated else ""
    say(f"\n{comparison.queries} queries{cut}; recall and nearest rows are compared with the first line's")
