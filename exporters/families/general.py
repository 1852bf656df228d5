"""Any class of transformers that no other family names, as a whole, and any ``torch.nn.Module`` of the user's, in
memory: read by passes on shapes alone. See docs/architectures.md and docs/own-modules.md.

All that is known of a class comes of itself, made from its configuration without weights
(exporters/hugging_face/survey.py), and so do its axes (exporters/hugging_face/found_axes.py). That needs torch:
planning without is what other families add, as are exits and routes. It runs in one pass, in the code of the installed
transformers; code of a folder's own is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...bucket import Bucket
from ...elastic import ElasticSpec
from ...errors import CheckpointError, UnsupportedModelError
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import offline_transformers, refuse_foreign
from ..checkpoints.generation_defaults import read_decoder_start
from ..family import Deferred, Family
from ..hugging_face.describe import describe
from ..hugging_face.interface import HIDDEN, Loading, corners_in_order, single_choices
from ..hugging_face.tensors import Parameters
from ..in_memory.checkpoint import MODEL_TYPE, ModuleInMemory
from ..parts import CachedSpec, EncoderSpec
from ..signature import IDS, MASK, with_texts

if TYPE_CHECKING:  # known types alone are read without torch
    import torch

    from ..hugging_face import survey, transformers_internals
    from ..hugging_face.kept_layers import KeptLayers
    from ..in_memory import module
    from ..modules import layers
else:
    names = ("..hugging_face.transformers_internals", "..modules.layers", "..hugging_face.survey", "..in_memory.module")
    transformers_internals, layers, survey, module = (Deferred(name, __package__) for name in names)

# Behind which a step is counted.
_PROMPT_TOKENS = 64


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether.

    Raises UnsupportedModelError for a type that transformers does not know, and for a class that is not understood.
    """
    refuse_foreign(checkpoint)
    _require_known(checkpoint)
    if checkpoint.config.get("add_cross_attention") and not checkpoint.config.get("is_encoder_decoder"):
        raise checkpoint.misfit("add_cross_attention: a second sequence to attend to is not supported")
    model_type = checkpoint.config.get("model_type")
    if model_type == "falcon" and checkpoint.config.get("alibi"):
        raise checkpoint.misfit(
            "alibi: Falcon multiplies it in bfloat16, for which ONNX Runtime has no kernel; take a Falcon with rotary "
            "positions (alibi: false)"
        )
    pools = not checkpoint.has_weights or any(".pooler." in f".{name}" for name in checkpoint.tensors)
    among_choices = offline_transformers().models.auto.modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
    given = single_choices if checkpoint.architecture in among_choices else corners_in_order
    # T5's kin have no head to tie where config.json says so, and transformers asks whether its numbers are the table's,
    # whatever config.json says.
    untied = checkpoint.config.get("tie_word_embeddings") is False or "shared.weight" in checkpoint.tensors
    untied &= not checkpoint.has_weights or "lm_head.weight" in checkpoint.tensors
    loading = Loading(without_pooler=not pools, given=given, surveyed=True, untied=untied)
    found = survey.survey(checkpoint, loading)
    parameters, axes = Parameters(), found.axes
    parameters.shapes, parameters.axes, parameters.slices = dict(found.shapes), [*axes.axes], [*axes.slices]
    hidden = {spec.name: spec.dims[-1] for spec in found.signature.outputs}.get(HIDDEN)
    cached = _cached(checkpoint, found, found.signature.max_sequence or 1)
    start = cached.encoder.start if cached and cached.encoder else None
    signature = with_texts(found.signature, checkpoint, start)
    width = hidden if isinstance(hidden, int) and signature.mask == MASK else None
    workload = survey.workload_of(checkpoint, found)
    loading = replace(loading, finish=lambda model: layers.part_layers(model, axes.parted))
    whole = describe(checkpoint, parameters, {}, signature, workload, loading, width)
    return replace(
        whole,
        spec=replace(whole.spec, depth=found.depth, widths=axes.widths),
        narrow=lambda module, submodel: axes.narrow(module.get_submodule("model"), submodel),
        stacked=axes.stacked,
        kept_whole=axes.refused,
        surveyed=True,
        cached=cached,
    )


def _cached(checkpoint: Checkpoint, found: survey.Survey, positions: int) -> CachedSpec | None:
    """How a class generates that keeps layers of each token."""
    kept, encoder = found.kept, None
    if kept is None:
        return None
    try:
        if not isinstance(kept, str) and kept.reads:
            encoder = _encoder(checkpoint, found, kept, positions)
    except CheckpointError as failure:
        kept = str(failure)
    if isinstance(kept, str):
        return CachedSpec(found.vocabulary, positions, (), _as_it_is, _as_it_is, family_problem=kept)
    return CachedSpec(
        found.vocabulary,
        positions,
        kept.layers,
        lambda module: kept.decoder(module.model).eval(),
        lambda module: kept.recorded(module.model).eval(),
        encoder=encoder,
        cache_axes=kept.cache_axes,
        is_buffered=not kept.is_fused,
        states=tuple(state.shape for state in kept.states),
    )


def _encoder(checkpoint: Checkpoint, found: survey.Survey, kept: KeptLayers, positions: int) -> EncoderSpec:
    """Raises CheckpointError where nothing says with which token the decoder begins."""
    first = found.signature.inputs[0]
    start = read_decoder_start(checkpoint, found.vocabulary, begin_for_it=True)

    def read(model: Any, source: torch.Tensor) -> Any:
        return kept.encoder(model)(source)

    step = survey.step_workload(checkpoint, found, read, lambda model, source: kept.encoder(model).step(source))
    return EncoderSpec(
        start,
        positions if first.name == IDS else kept.places,
        lambda module: kept.encoder(module.model),
        survey.workload_of(checkpoint, found, read),
        lambda submodel: step(submodel, Bucket(1, min(_PROMPT_TOKENS, positions))),
        cache_axes=kept.read_axes,
        layers=None if kept.reads == kept.layers else kept.reads,
        input=None if first.name == IDS else first,
        begin_ids=transformers_internals.first_tokens(checkpoint, found.module.model, start, found.vocabulary),
    )


def _as_it_is(whole: torch.nn.Module) -> torch.nn.Module:
    return whole


def read_module(checkpoint: Checkpoint) -> Architecture:
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


FAMILY = Family("general", (), read, reads_config_alone=True)
MODULE = Family("module", (MODEL_TYPE,), read_module)
FAMILIES = (FAMILY, MODULE)


def _require_known(checkpoint: Checkpoint) -> None:
    from ..family import families

    known: Mapping[str, Any] = offline_transformers().models.auto.CONFIG_MAPPING
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        own = ", ".join(name for family in families() for name in family.model_types)
        raise UnsupportedModelError(
            f"{checkpoint.folder / 'config.json'}: model_type {model_type!r:.80} is not supported; supported are "
            f"{own} and every type of the installed transformers; docs/writing-a-family.md shows how to add one"
        )
