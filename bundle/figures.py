"""The figures by which a submodel is compared with the universal model: their names, headings and units, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NEIGHBOURS = 10


@dataclass(frozen=True)
class Figure:
    """``heading`` names the unit; ``digits`` are those behind the point; ``meaning`` is one line for people."""

    heading: str
    digits: int
    meaning: str

    def text(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


# By name, as manifests and JSON have them. Shares are from 0 to 1.
FIGURES: Mapping[str, Figure] = {
    "mean_cosine": Figure("mean cosine", 4, "cosine between its embedding of an input and the universal model's"),
    "recall_at_10": Figure(
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


def present(figures: Iterable[Mapping[str, float]]) -> list[str]:
    """The names that are in any of ``figures``, in the order of ``FIGURES``; unknown ones last, by name."""
    found = {name for mapping in figures for name in mapping}
    return [*(name for name in FIGURES if name in found), *sorted(found - FIGURES.keys())]


def heading(name: str) -> str:
    return FIGURES[name].heading if name in FIGURES else name


def cell(figures: Mapping[str, float] | None, name: str, errors: Mapping[str, float] | None = None) -> str:
    """A figure as a table shows it, with its standard error where that is among ``errors``; or a dash."""
    if figures is None or name not in figures:
        return "-"
    shown = FIGURES[name].text if name in FIGURES else "{:g}".format
    return f"{shown(figures[name])} ±{shown(errors[name])}" if errors and name in errors else shown(figures[name])
