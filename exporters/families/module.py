"""Any ``torch.nn.Module`` of the user's, in memory: read by passes on shapes alone, as classes of transformers are."""

from typing import TYPE_CHECKING

from ...elastic import ElasticSpec
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..family import Deferred, Family
from ..in_memory.checkpoint import MODEL_TYPE, ModuleInMemory

if TYPE_CHECKING:
    from ..hugging_face import survey
    from ..in_memory import module
else:
    survey = Deferred("..hugging_face.survey", __package__)
    module = Deferred("..in_memory.module", __package__)


def read(checkpoint: Checkpoint) -> Architecture:
    """Raises UnsupportedModelError for a module that does not run on shapes alone."""
    if not isinstance(checkpoint, ModuleInMemory):
        raise checkpoint.misfit(f"model_type {MODEL_TYPE} is that of a module in memory, which no folder holds")
    found = module.survey_module(checkpoint)
    axes = found.axes
    return Architecture(
        spec=ElasticSpec(axes.axes, axes.slices, depth=found.depth, widths=axes.widths),
        signature=found.signature,
        parameter_shapes=found.shapes,
        workload=survey.workload_of(checkpoint, found),
        load=lambda: module.load_module(checkpoint, found.signature, axes.parted),
        narrow=lambda whole, submodel: axes.narrow(whole.get_submodule("model"), submodel),
        stacked=axes.stacked,
        kept_whole=axes.refused,
        surveyed=True,
    )


FAMILY = Family("module", (MODEL_TYPE,), read)
