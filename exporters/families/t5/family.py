"""T5: an encoder, and a decoder that reads it; or the encoder alone. See docs/models.md.

Axis per layer of both sides: ``ffn``, the neurons that ``wi`` (gated: ``wi_0`` and ``wi_1``) makes and ``wo`` reads.
The whole engine answers a pair of texts at every position of the second; both have the bucket's length, since what pads
the first is masked, and what pads the second on its right changes nothing before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.manifest import TextEntry
from ....elastic import ElasticSpec
from ...architecture import Architecture, is_table
from ...cached_form import CachedForm, EncoderForm
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import read_nesting
from ...family import Family
from ...hugging_face.interface import attention_problems, with_modules
from ...sentence_transformers.read_modules import read_modules
from ...signature import Signature
from .architecture import MOST_TOKENS, TABLE, T5Architecture, ffn_axes, names_in_files, read_t5
from .forward_ops import encoding_ops, forward_ops, step_ops

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``; the encoder alone with modules of sentence-transformers behind it."""
    architecture = read_t5(checkpoint)
    modules = read_modules(checkpoint, architecture.hidden)
    signature = with_modules(_signature(checkpoint, architecture), checkpoint, modules)

    def load() -> torch.nn.Module:
        from .load import load_t5

        return load_t5(checkpoint, architecture, signature, modules)

    return Architecture(
        spec=_spec(checkpoint, architecture),
        signature=signature,
        parameter_shapes=architecture.parameter_shapes,
        workload=partial(forward_ops, architecture),
        load=load,
        names_in_files=names_in_files(checkpoint, architecture),
        is_embedding=lambda name, shape: name == TABLE or is_table(name, shape),
        modules=modules,
        cached=_cached(architecture) if architecture.decoder_layers else None,
        variant_problems=attention_problems(architecture.heads, architecture.heads),
    )


FAMILY = Family("t5", ("t5",), read, reads_config_alone=True)


def _spec(checkpoint: Checkpoint, architecture: T5Architecture) -> ElasticSpec:
    axes, slices = ffn_axes(architecture)
    nesting = read_nesting(checkpoint, ("ffn",))
    return ElasticSpec(tuple(axes), tuple(slices), nesting.nested, depth=len(axes), granularities=nesting.granularities)


_SHORTENED = "relative positions have no end; engines take so many"


def _signature(checkpoint: Checkpoint, architecture: T5Architecture) -> Signature:
    tokens, vocabulary = ("batch", "sequence"), architecture.vocabulary
    ids = TensorSpec("input_ids", "int64", tokens, pad=architecture.pad, high=vocabulary)
    mask = TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="token")
    text = TextEntry("tokenizer.json", ids.name, mask.name, None, None) if checkpoint.tokenizer_files else None
    if not architecture.decoder_layers:
        output = TensorSpec("last_hidden_state", "float32", (*tokens, architecture.hidden))
        return Signature((ids, mask), (output,), MOST_TOKENS, mask.name, text, shortened=_SHORTENED)
    if text is not None:
        text = replace(text, shifted="decoder_input_ids", start=architecture.start)
    follows = TensorSpec("decoder_input_ids", "int64", tokens, pad=architecture.pad, high=vocabulary)
    output = TensorSpec("logits", "float32", (*tokens, vocabulary), role="next_tokens")
    return Signature((ids, mask, follows), (output,), MOST_TOKENS, mask.name, text, shortened=_SHORTENED)


def _cached(architecture: T5Architecture) -> CachedForm:
    def encoder(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import SourceEncoder

        return SourceEncoder(module.model).eval()

    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import CachedT5

        return CachedT5(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .generating import RecordedT5

        return RecordedT5(module.model).eval()

    layers = (CachedLayer(architecture.heads, architecture.head_dim),) * architecture.decoder_layers
    encoding, step = partial(encoding_ops, architecture), partial(step_ops, architecture)
    form = EncoderForm(architecture.start, MOST_TOKENS, encoder, encoding, step)
    return CachedForm(architecture.vocabulary, MOST_TOKENS, layers, cached, recorded, encoder=form)
