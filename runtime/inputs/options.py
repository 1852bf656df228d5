"""Options that several requests and commands share, each stated once: its help, default, bounds and unit."""

from __future__ import annotations

from ...argument_types import option
from ...progress import silent

BUDGET = option("Named budget of the bundle.", metavar="NAME")
SUBMODEL = option("Submodel, by label or id.", metavar="ID")
SUBMODELS = option("Submodel, by label or id. Default: all of them.", (), option="submodel", metavar="ID")
TASK = option("Task of the bundle. Default: the base model.", metavar="NAME")
LATENCY_MS = option("Latency limit of a run, in ms.", above=0, unit="ms")
DEADLINE_MS = option("Time limit from the call to the answer, in ms, text encoding included.", above=0, unit="ms")
MEMORY_MB = option("Memory limit of the engine, in MB.", above=0, unit="MB")
TRUNCATE = option("Cut texts that are longer than the largest bucket; else they are refused.", False)
PROMPT = option("Text before each text; '' for none. Default: the model's default prompt.", metavar="TEXT")
PROMPT_NAME = option("Named prompt of the model, before each text.", metavar="NAME")
DIMENSIONS = option(
    "Numbers of the embedding to keep, the first so many, of a model whose prefixes are embeddings. Default: all.",
    min=1,
    metavar="N",
)
THREADS = option("Number of cores per run. Default: all that this process may use.", min=1)
PROGRESS = option("Called as work proceeds: stage, done, total.", silent)
