"""What an architecture must say about itself to travel the whole road: one ``Family`` per module in ``families/``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar

from ..elastic import Bucket, ElasticSpec, Submodel
from ..errors import CheckpointError, ExportError, UnsupportedModelError
from ..runtime.bundle.manifest import DecisionEntry, Proof, TensorSpec, TextEntry
from ..workload import Op
from .checkpoints.checkpoint import MODULES_FILE, Checkpoint
from .exits import Exits
from .parameter_groups import is_table
from .sentence_transformers.read_modules import SentenceModules

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a universal model.

    ``mask`` names the input that says which positions count; ``text`` says how text feeds the inputs. ``max_sequence``
    is None where no input has a sequence. ``bound`` names what takes ``max_sequence`` tokens and no others, if a part
    of the model does.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_sequence: int | None = None
    mask: str | None = None
    text: TextEntry | None = None
    bound: str | None = None

    def buckets(self, asked: Sequence[Bucket] | None, usual: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets that were ``asked`` for, else the profile's ``usual`` ones, as this model has them: without a
        sequence only batches differ, and of the usual ones no more where the model is bound to one.

        Raises ExportError for a sequence that is longer than the model takes, or another than it is bound to.
        """
        wanted = asked or usual
        if self.max_sequence is None:
            return tuple(dict.fromkeys(Bucket(bucket.batch, 1) for bucket in wanted))
        if not asked and self.bound is not None:
            wanted = [Bucket(bucket.batch, self.max_sequence) for bucket in usual]
        for bucket in wanted:
            if bucket.sequence > self.max_sequence:
                raise ExportError(f"bucket {bucket.label}: the model takes at most {self.max_sequence} tokens")
            if self.bound is not None and bucket.sequence != self.max_sequence:
                fitting = Bucket(bucket.batch, self.max_sequence).label
                raise ExportError(
                    f"bucket {bucket.label}: {self.bound} is bound to {self.max_sequence} tokens; ask for bucket "
                    f"{fitting}, to which shorter texts are padded"
                )
        return tuple(dict.fromkeys(wanted))


@dataclass(frozen=True)
class Judged:
    """One decision that a pass was made to take, judged by the scores that the pass had where it took it.

    ``margin``: by how much the worst of its ``made`` single choices is worse than the pass's own, in units of the score
    that decides; 0 where equal, infinite where no score explains it. ``where`` names that choice. ``differing`` of them
    are not the pass's own. ``shares`` are figures such as ``tokens_dropped``.
    """

    margin: float
    where: str
    made: int
    differing: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Replay:
    """One pass of a model that was made to take given decisions, each judged by its name."""

    outputs: tuple[torch.Tensor, ...]
    decisions: Mapping[str, Judged]


class Family(ABC):
    """One architecture. ``describe``, ``signature`` and ``workload`` must work without torch."""

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    # Whether config.json alone tells axes and parameters, so that a model can be planned before it is trained.
    reads_config_alone: ClassVar[bool] = False
    # Published configurations by name, each what config.json would hold: ``preset:NAME`` stands for such a model.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @abstractmethod
    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        """Axes of the model, and the parameters that shrink with each. Raises CheckpointError on a misfit."""

    @abstractmethod
    def signature(self, checkpoint: Checkpoint) -> Signature:
        """Names, dtypes and dimensions of what goes in and comes out."""

    @abstractmethod
    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        """The operations of one forward pass, for the analytic cost model."""

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter by name; by default every floating-point tensor of the checkpoint."""
        return {name: header.shape for name, header in checkpoint.tensors.items() if header.dtype[0] in "FB"}

    def sentence_modules(self, checkpoint: Checkpoint) -> SentenceModules | None:
        """The modules of sentence-transformers behind the model, or None for a folder without them.

        A family that takes them has a mask and an output ``last_hidden_state``; its ``signature`` passes through
        ``with_modules`` and its ``load`` gives the wrapper a ``SentenceHead``. ``parameter_shapes`` and ``workload``
        are the transformer's alone. Raises CheckpointError for modules that are not understood.
        """
        if checkpoint.has_modules:
            raise CheckpointError(
                f"{checkpoint.folder / MODULES_FILE}: models of family {self.name} run without modules of "
                "sentence-transformers; remove the file to compile the model alone"
            )
        return None

    def names_in_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:  # noqa: ARG002  (optional)
        """Parameter to tensor of the weight files, for those that files call by another name; by default none."""
        return {}

    def is_embedding(self, parameter: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter (with its full shape) is a table of tokens or positions; by default told by its name."""
        return is_table(parameter, shape)

    @abstractmethod
    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        """The user's own module in eval mode and float32, as attribute ``model`` of a wrapper.

        The wrapper's ``forward`` takes the signature's inputs by position and returns the outputs as a tuple in the
        same order; below ``model.`` parameters carry the names that ``describe`` uses.
        Raises CheckpointError if weights are missing or misfit.
        """

    def exits(self, checkpoint: Checkpoint, wanted: Sequence[int] | None) -> Exits | None:  # noqa: ARG002  (optional)
        """The model's exits, cut at those after the layers ``wanted`` (None is all), or None for a model without exits
        or whose exits have no entropy. Its spec then has an axis ``depth`` with the exits' layers as choices."""
        return None

    def prove_load(self, checkpoint: Checkpoint, feeds: Mapping[str, np.ndarray]) -> Iterator[Proof]:  # noqa: ARG002
        """What ``load`` did to the stored weights, proven against them on ``feeds``; nothing if it only read them."""
        return iter(())

    def variants(
        self,
        checkpoint: Checkpoint,  # noqa: ARG002  (optional)
        submodel: Submodel,  # noqa: ARG002
        bucket: Bucket,  # noqa: ARG002
    ) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        """Equal computations that an engine may choose from: what is computed, to variant, to its operations.

        ``workload`` leaves them out. The compiler takes the variant that costs least on the device; the first is what
        figures without a device count.
        """
        return {}

    def lower(self, module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:  # noqa: ARG002
        """``module`` as the compiler traces it: the same function in the chosen ``variants``, which returns the model's
        decisions after its outputs. By default the module itself."""
        return module

    def facts(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:  # noqa: ARG002
        """Static numbers and rules of an engine that no shape of it shows, for the manifest; by default none."""
        return {}

    def decisions(
        self,
        checkpoint: Checkpoint,  # noqa: ARG002
        submodel: Submodel,  # noqa: ARG002
        bucket: Bucket,  # noqa: ARG002
    ) -> tuple[DecisionEntry, ...]:
        """What the model decides on the way, such as routes: whole numbers that engines return beside the outputs, so
        that an engine can be told from one that is wrong where a decision is close; by default nothing."""
        return ()

    def decision_orders(self, checkpoint: Checkpoint, decision: str) -> Mapping[int, str]:  # noqa: ARG002  (optional)
        """The dimensions of a decision that count steps which may be permuted, each with the name of its order
        (``ElasticSpec.orders``); by default none."""
        return {}

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        """A pass of ``module`` with the decisions ``given`` in place of its own. Only asked of families with decisions.

        Raises ParityError naming a decision that no model of these shapes can make, such as a token out of range.
        """
        raise NotImplementedError(f"family {self.name} has no decisions")

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:  # noqa: B027  (optional, not abstract)
        """Adjusts what of ``module`` (whose parameters are narrowed already) repeats an axis value: attributes, and the
        layers behind the submodel's depth."""


@cache
def families() -> tuple[Family, ...]:
    """Every family, found by looking into the rooms of ``families/``: a module there whose name ends with ``family``
    and that defines ``FAMILY`` is enough."""
    package = import_module(".families", __package__)
    rooms = [import_module(f"{package.__name__}.{info.name}") for info in iter_modules(package.__path__)]
    names = [f"{room.__name__}.{info.name}" for room in rooms for info in iter_modules(room.__path__)]
    return tuple(import_module(name).FAMILY for name in names if name.endswith("family"))


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that reads this checkpoint. Raises UnsupportedModelError listing what is supported."""
    model_type = checkpoint.config.get("model_type")
    for family in families():
        if model_type in family.model_types:
            return family
    raise UnsupportedModelError(
        f"{checkpoint.folder / 'config.json'}: model_type {model_type!r:.80} is not supported; supported are "
        f"{', '.join(_supported(families()))}; docs/writing-a-family.md shows how to add one"
    )


def _supported(known: tuple[Family, ...]) -> Iterator[str]:
    return (name for family in known for name in family.model_types)
