"""``nestforge index`` and ``search``: a corpus embedded by the universal model, queries by any submodel."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from ...runtime.engines.residency import Residency
from ...runtime.inputs.arrays import Array
from ...runtime.inputs.files import read_array_file
from ...runtime.load import load
from ...runtime.model import ElasticModel
from ...runtime.retrieval.compare import Comparison, SubmodelFigures, compare
from ...runtime.retrieval.index import MAX_BYTES, Found, Index, index
from ...runtime.rows import Corpus
from ...runtime.summary import ShortNames
from ...tables import Table
from ...whole_file import require_new
from ..console import Block, in_options, show, working
from ..functions import search
from ..options import (
    bundle_argument,
    field_options,
    json_option,
    overwrite_option,
    path_option,
    read_text_lines,
    require_text_options,
    texts_option,
)

_INDEX_EXAMPLES = """\b
Examples:
  nestforge index my.bundle --text corpus.txt --output corpus.index
  nestforge index my.bundle --text corpus.txt --prompt-name document --output corpus.index
  nestforge index my.bundle --text corpus.txt --dimensions 256 --output corpus.index
  nestforge index my-vit.bundle --data images.npz --output images.index
"""


@click.command("index", epilog=_INDEX_EXAMPLES)
@bundle_argument
@texts_option
@path_option("--data", "NPZ file with an array per input, rows first, and perhaps 'labels' of the rows.")
@path_option("--output", "New file to write the index to.", required=True)
@overwrite_option
@field_options(Index.build, "embedding", "dimensions", "truncate", "prompt", "prompt_name", "residency")
@json_option
def index_command(
    bundle: Path,
    text: Path | None,
    data: Path | None,
    output: Path,
    overwrite: bool,
    embedding: str | None,
    dimensions: int | None,
    residency: Residency | Literal["auto"],
    as_json: bool,
    **texts: Any,
) -> None:
    """Embed a corpus, for search with any submodel.

    The index belongs to this bundle's weights; it is refused by any other universal model.
    """
    if (text is None) == (data is None):
        raise click.UsageError("expected either --text or --data")
    require_text_options(text is not None, **texts)
    require_new(output, overwrite)
    blank = 0
    with load(bundle, residency=residency) as model, working() as progress:
        build = partial(index, model, embedding=embedding, dimensions=dimensions, progress=progress)
        if text is not None:
            lines = read_text_lines(text)
            blank = lines.blank
            built = build(lines.texts, **texts)
        else:
            assert data is not None
            file = read_array_file(data, model.bundle.manifest.inputs, MAX_BYTES, MAX_BYTES)
            built = build(file.feeds, labels=file.labels)
    built.save(output)
    identity = built.identity
    built_by = ", ".join(f"{identity.submodel}@{engine.bucket.label}" for engine in identity.engines)
    facts = Table.facts(
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
    found = {"path": str(output), "blank": blank, "labels": built.labels is not None, "identity": identity}
    show(as_json, found, lambda: [facts])


_SHOWN = 100  # characters of a text in a table

_SEARCH_EXAMPLES = """\b
Examples:
  nestforge search my.bundle corpus.index --query "how do I rank neurons?" --latency-ms 4
  nestforge search my.bundle corpus.index --queries questions.txt --submodel S --k 3 --json
  nestforge search my.bundle corpus.index --queries questions.txt --compare
"""


@click.command("search", epilog=_SEARCH_EXAMPLES)
@bundle_argument
@click.argument("index_path", metavar="INDEX", type=click.Path(path_type=Path))
@click.option("--query", "texts", multiple=True, metavar="TEXT", help="Text to search for. Repeatable.")
@path_option("--queries", "UTF-8 file of queries, one a line.", "file")
@path_option("--data", "NPZ file of queries: an array per input, rows first, and perhaps 'labels'.")
@field_options(search, "k", "budget", "latency_ms", "submodel")
@click.option("--compare", "compares", is_flag=True, help="Search with every submodel, beside the universal model.")
@field_options(search, "dimensions", "truncate", "prompt", "prompt_name")
@field_options(search, residency="shared, which opens at once; auto with --compare")
@json_option
def search_command(
    bundle: Path,
    index_path: Path,
    texts: tuple[str, ...],
    file: Path | None,
    data: Path | None,
    k: int,
    compares: bool,
    residency: Residency | Literal["auto"] | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the rows of an index nearest to each query.

    Without --budget, --latency-ms or --submodel the largest submodel encodes the queries. With --compare every
    submodel does, and a table shows what it finds beside what it saves.
    """
    if bool(texts) + (file is not None) + (data is not None) != 1:
        raise click.UsageError("expected one of --query, --queries and --data")
    of_texts = {name: options.pop(name) for name in ("truncate", "prompt", "prompt_name")}
    dimensions = options.pop("dimensions")
    if sum(limit is not None for limit in options.values()) > (0 if compares else 1):
        raise click.UsageError("expected at most one of --budget, --latency-ms and --submodel, and none with --compare")
    require_text_options(data is None, **of_texts)
    opened = Index.load(index_path)
    with load(bundle, residency=residency or ("auto" if compares else "shared")) as model:
        opened.check(model.bundle, dimensions)
        queries, labels = _queries(model, texts, file, data)
        if compares:
            with working() as progress:
                comparison = compare(model, opened, queries, k=k, labels=labels, progress=progress, **of_texts)
            show(as_json, comparison, lambda: _comparison_report(comparison))
            return
        names = ShortNames.of(model.bundle.manifest)
        found = search(model, opened, queries, k=k, **options, **of_texts)
    shown = list(queries) if isinstance(queries, tuple) else None
    show(as_json, _found_data(found, shown), lambda: _found_report(found, shown, names))


def _queries(
    model: ElasticModel, texts: tuple[str, ...], file: Path | None, data: Path | None
) -> tuple[Corpus, Array | None]:
    """The queries, and their labels if they have any."""
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


def _found_report(found: Found, queries: list[str] | None, names: ShortNames) -> Iterator[Block]:
    yield Table.facts(
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
        columns = ["row", "cosine", *(["entry"] if found.entries is not None else [])]
        cells = [[str(hit["id"]), f"{hit['score']:.4f}", _shown(hit.get("entry", ""))] for hit in row["hits"]]
        yield [f"query {_shown(str(row['query']))}", Table(columns, [line[: len(columns)] for line in cells])]


def _shown(text: str) -> str:
    """One short line."""
    return textwrap.shorten(text, _SHOWN, placeholder="...")


def _comparison_report(comparison: Comparison) -> Iterator[Block]:
    labelled = comparison.submodels[0].accuracy is not None
    cells: dict[str, Callable[[SubmodelFigures], object]] = {
        "submodel": lambda each: "/".join(each.labels) or each.submodel,
        "M params": lambda each: f"{each.parameters / 1e6:.2f}",
        "params saved": lambda each: f"{100 * each.parameters_saved:.1f} %",
        "MFLOPs a query": lambda each: f"{each.flops / 1e6:.1f}",
        "FLOPs saved": lambda each: f"{100 * each.flops_saved:.1f} %",
        f"recall@{comparison.k}": lambda each: f"{each.recall_at_k:.3f}",
        "same nearest": lambda each: f"{100 * each.nearest_agreement:.1f} %",
        **({"accuracy": lambda each: f"{100 * (each.accuracy or 0):.1f} %"} if labelled else {}),
        "ms a query": lambda each: f"{each.ms_per_query:.3f}",
    }
    yield Table.of(comparison.submodels, cells)
    cut = f"; {comparison.truncated} of them truncated" if comparison.truncated else ""
    yield f"{comparison.queries} queries{cut}; recall and nearest rows are compared with the first line's"
