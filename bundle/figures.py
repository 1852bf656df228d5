"""Figures by which a submodel is compared with the universal model (names, headings, units), and their least."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..profiles.precision import PRECISIONS
from .manifest import Manifest, SubmodelEntry

NEIGHBOURS = 10
# The least that a submodel should keep. Cosine: the smallest level of all-MiniLM-L6-v2 keeps 0.916 after eight minutes
# of `nestforge nest` (docs/nest.md), so that less can be mended. Classes: one answer in ten is another. Tokens: a
# greedy text parts from the universal model's after about five. recall@10 has no bar of its own: it depends on how
# close the texts of a corpus are to each other.
LEAST: Mapping[str, float] = {"mean_cosine": 0.9, "class_agreement": 0.9, "token_agreement": 0.8}


@dataclass(frozen=True)
class Figure:
    """``heading`` names the unit; ``digits`` are those behind the point; ``meaning`` is one line for people."""

    heading: str
    digits: int
    meaning: str

    def text(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


RECALL = "recall_at_10"

# By name, as manifests and JSON have them. Shares are from 0 to 1.
FIGURES: Mapping[str, Figure] = {
    "mean_cosine": Figure("mean cosine", 4, "cosine between its embedding of an input and the universal model's"),
    RECALL: Figure(
        "recall@10", 3, "share of each input's ten nearest others, by the universal model, that it finds too"
    ),
    "class_agreement": Figure("class agreement", 4, "share of inputs to which it gives the universal model's class"),
    "accuracy": Figure("accuracy", 4, "share of inputs to which it gives the class of the label"),
    "token_agreement": Figure(
        "token agreement", 4, "share of positions at which its likeliest token is the universal model's, on given text"
    ),
    "kl_small_to_universal": Figure(
        "KL(sub||univ) nats", 5, "mean KL divergence of its distribution from the universal model's: KL(submodel || it)"
    ),
    "kl_universal_to_small": Figure("KL(univ||sub) nats", 5, "the same in the other direction: KL(it || submodel)"),
    "matched_prefix": Figure(
        "matched prefix tokens", 1, "positions of a text before the first at which the likeliest tokens differ, mean"
    ),
    "loss": Figure("loss nats/token", 4, "its own loss on the text: -log probability of the token that follows"),
}


def recall_in(dimensions: int) -> str:
    """Name of the figure like ``RECALL`` of an embedding that is cut."""
    return f"{RECALL}_in_{dimensions}"


def figure(name: str) -> Figure | None:
    """The figure called ``name``; None for one that is not known here."""
    whole, _, cut = name.partition("_in_")
    if not cut or whole not in FIGURES:
        return FIGURES.get(name)
    known = FIGURES[whole]
    return replace(known, heading=f"{known.heading} in {cut}", meaning=f"{known.meaning}, by {cut} of its dimensions")


def present(figures: Iterable[Mapping[str, float]]) -> list[str]:
    """The names that are in any of ``figures``, in the order of ``FIGURES``; others last, short ones first."""
    found = {name for mapping in figures for name in mapping}
    others = sorted(found - FIGURES.keys(), key=lambda name: (len(name), name))
    return [*(name for name in FIGURES if name in found), *others]


def meanings(names: Iterable[str]) -> list[str]:
    """A line for each figure that is known here, ``mean cosine: ...``."""
    return [f"{known.heading}: {known.meaning}" for name in names if (known := figure(name)) is not None]


def heading(name: str) -> str:
    known = figure(name)
    return name if known is None else known.heading


def cell(figures: Mapping[str, float] | None, name: str, errors: Mapping[str, float] | None = None) -> str:
    """A figure as a table shows it, with its standard error where that is among ``errors``; or a dash."""
    if figures is None or name not in figures:
        return "-"
    known = figure(name)
    shown = "{:g}".format if known is None else known.text
    return f"{shown(figures[name])} ±{shown(errors[name])}" if errors and name in errors else shown(figures[name])


def shortfall(entry: SubmodelEntry) -> str | None:
    """The first figure of ``entry`` below its bar, ``mean cosine 0.6331, below 0.9``; None where all are kept, or
    none was measured."""
    figures = entry.quality.figures if entry.quality else {}
    short = (name for name, least in LEAST.items() if name in figures and figures[name] < least)
    return next((f"{heading(name)} {cell(figures, name)}, below {LEAST[name]}" for name in short), None)


def quality_warnings(manifest: Manifest) -> list[str]:
    """One line where submodels keep too little, or where nobody knows: how many, what the budgets chose, what to do.
    Another where integers turn an answer far and nobody knows what that costs."""
    return [*_kept(manifest), *_turned(manifest)]


def _kept(manifest: Manifest) -> list[str]:
    smaller = [entry for entry in manifest.submodels if entry.id != manifest.largest_first[0].id]
    short = {entry.id: said for entry in smaller if (said := shortfall(entry))}
    if short:
        chosen = {budget.name: short[budget.submodel] for budget in manifest.budgets if budget.submodel in short}
        listed = "; ".join(f"budget {name}: {said}" for name, said in chosen.items()) or _first(manifest, short)
        return [
            f"{len(short)} of {len(manifest.submodels)} submodels keep little of the universal model ({listed}): "
            f"{_mending(manifest, [entry for entry in smaller if entry.id in short])}"
        ]
    if smaller and not manifest.trained_nested and not any(entry.quality for entry in smaller):
        given = "`text`" if manifest.text is not None else "`data`"
        may = ", and those of a model that was never nested may keep little" if _narrowed(manifest, smaller) else ""
        return [
            "what its submodels keep of the universal model was not measured, since no examples were given"
            f"{may}: compile with {given} to measure it"
        ]
    return []


def _turned(manifest: Manifest) -> Iterator[str]:
    """A line where integers turn some answer far from the model's, and nobody knows what that costs."""
    found = [
        (output.min_cosine, engine.precision)
        for engine in manifest.every_engine
        if engine.parity and PRECISIONS[engine.precision].is_integer
        for output in engine.parity.outputs
    ]
    if any(entry.quality for entry in manifest.submodels) or not found or min(found)[0] >= LEAST["mean_cosine"]:
        return
    cosine, precision = min(found)
    given, chosen = "`text`" if manifest.text is not None else "`data`", ", and 4 bits are chosen by them"
    yield (
        f"{precision} leaves a cosine of {cosine:.2f} to the model's answers on an input of the gate, and what that "
        f"costs was not measured, since no examples were given: compile with {given} to measure it"
        f"{chosen if precision == 'int4' else ''}"
    )


def _first(manifest: Manifest, short: Mapping[str, str]) -> str:
    name, said = next(iter(short.items()))
    return f"{manifest.submodel(name).label}: {said}"


def _mending(manifest: Manifest, short: list[SubmodelEntry]) -> str:
    """The remedy for ``short``: another precision where nothing else was cut, training, or larger levels."""
    if not _narrowed(manifest, short):
        return "their precision costs it; a higher one keeps more"
    if manifest.trained_nested:
        return "the model was trained nested; larger levels (`levels`) keep more, and so does longer training"
    can_nest = manifest.text is not None and all(axis.choices is None for axis in manifest.axes)
    if not can_nest:
        return "the model was never nested; larger levels (`levels`) keep more"
    return (
        "the model was never nested; `nestforge nest MODEL --text FILE --output nested` teaches them in minutes, then "
        "compile that folder"
    )


def _narrowed(manifest: Manifest, entries: list[SubmodelEntry]) -> bool:
    """Whether more than precision was cut of one of ``entries``."""
    sizes: dict[str, set[int]] = {}
    for axis in manifest.axes:
        sizes.setdefault(axis.kind, set()).add(axis.size)
    return any(set(v) - sizes[kind] for entry in entries for kind, v in entry.values.items())
