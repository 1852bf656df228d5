"""A conditional encoder and T5's decoder: two texts to the logits of the token behind each one of the second.

All n tokens leave the encoder, and the decoder reads all of them (section 3 of Conditional Adapters, arXiv 2304.04947).
Shapes: ``B`` rows, ``N`` tokens of the text that is read, ``S`` of the one that is written, ``d`` hidden, ``V`` tokens
of the vocabulary.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ....errors import ParityError
from ...architecture import Replay
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.config import offline_transformers
from ...checkpoints.own_folder import read_config, with_weights
from ...hugging_face import generating
from ...hugging_face.distances import look_up_distances
from ...hugging_face.generating import empty_cache, source_keys
from ...hugging_face.tensors import RELATIVE_BUCKETS, RELATIVE_REACH
from ...modules.layers import View, on_same_weights
from .config import CodaEncoderDecoderConfig
from .model import CodaEncoder, replay, take_variants

# transformers' names.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
# Behind the routes of a prompt that is shorter than the longest.
NO_TOKEN = -1
# Length of the prompt that is traced, where a reduction needs no more.
_EXAMPLE_TOKENS = 7


class CodaEncoderDecoder(torch.nn.Module):
    """``decoder`` is the stack of transformers' T5, without a table of its own: its tokens are the encoder's.
    ``encoder.reduction`` is the r at which conditional layers compute."""

    def __init__(self, config: CodaEncoderDecoderConfig) -> None:
        super().__init__()
        self.config, shape = config, config.decoder
        self.encoder = CodaEncoder(config.encoder, any_length=True)
        self.decoder: Any = _t5_decoder(config)
        head = None if config.tie_word_embeddings else torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.lm_head = head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """``input_ids`` and ``attention_mask`` [B, N] int64, 1 where a token counts, and ``decoder_input_ids`` [B, S]
        to logits [B, S, V]. Position ``t`` of the second text sees its positions ``0..t``. Raises as the encoder."""
        return self.written(self.encoder(input_ids, attention_mask), attention_mask, decoder_input_ids)

    def written(
        self,
        source: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input_ids: torch.Tensor,
        cache: Any | None = None,
        logits_at: Any = slice(None),
    ) -> torch.Tensor:
        """The logits [B, S, V] of ``decoder_input_ids`` [B, S], or of those ``logits_at`` alone, behind what the
        encoder made, ``source`` [B, N, d]. A ``cache`` of transformers keeps keys and values."""
        answer = self.decoder(
            inputs_embeds=self.words(decoder_input_ids),
            encoder_hidden_states=source,
            encoder_attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return self.logits(answer.last_hidden_state[:, logits_at])

    @property
    def words(self) -> torch.nn.Embedding:
        """The table of tokens of both texts."""
        words = self.encoder.embeddings.word
        assert isinstance(words, torch.nn.Embedding)
        return words

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, d] to logits [B, S, V]."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * hidden.shape[-1] ** -0.5
        weight = self.words.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden, weight)


def _t5_decoder(config: CodaEncoderDecoderConfig) -> Any:
    transformers, shape = offline_transformers(), config.decoder
    from transformers.models.t5.modeling_t5 import T5Stack

    stack_config = transformers.T5Config(
        vocab_size=1,  # of the table that is left out
        d_model=shape.hidden,
        d_kv=shape.head_dim,
        d_ff=shape.ffn,
        num_layers=shape.decoder_layers,
        num_heads=shape.heads,
        relative_attention_num_buckets=RELATIVE_BUCKETS,
        relative_attention_max_distance=RELATIVE_REACH,
        dropout_rate=0.0,
        layer_norm_epsilon=config.encoder.norm_eps,
        feed_forward_proj="gated-relu" if shape.gated else "relu",
        is_decoder=True,
        is_encoder_decoder=True,
        pad_token_id=0,
    )
    stack_config.dense_act_fn = _ACTIVATIONS[config.encoder.activation]
    decoder: Any = T5Stack(stack_config)
    decoder.embed_tokens = None
    return decoder


def load_model(folder: Path) -> CodaEncoderDecoder:
    """The model in ``folder``, in eval mode and float32, without gradients, at its trained reduction.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    return model_of(checkpoint, read_config(checkpoint, CodaEncoderDecoderConfig))


def model_of(checkpoint: Checkpoint, config: CodaEncoderDecoderConfig) -> CodaEncoderDecoder:
    """The module that ``load_model`` returns for an open checkpoint with its configuration."""
    model = with_weights(lambda: CodaEncoderDecoder(config), checkpoint)
    look_up_distances(model.decoder)
    return model


class ReadingPass(View):
    """A pass that begins with the encoder of ``model``. One that is traced ``returns_routes`` behind its outputs: the
    tokens that every conditional layer chose."""

    def __init__(self, model: Any, returns_routes: Any = False) -> None:
        super().__init__(model)
        self.returns_routes = returns_routes

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``inputs`` by position to outputs, and perhaps routes."""
        source, found = self.model.encoder.routed(*self.read(inputs))
        routes = [self.route(found[layer].chosen) for layer in sorted(found)] if self.returns_routes else []
        return (*self.behind(source, inputs), *routes)

    @abstractmethod
    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The encoder's ``inputs``: ids and mask [B, N]."""

    @abstractmethod
    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, given what the encoder made of its text, ``source`` [B, N, d]."""

    def route(self, chosen: torch.Tensor) -> torch.Tensor:
        """The ``chosen`` tokens [B, k] as an engine returns them."""
        return chosen


class Answering(ReadingPass):
    """Ids, mask and the decoder's ids to the logits of every position: what families hand over."""

    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return inputs[0], inputs[1]

    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (self.model.written(source, *inputs[1:]),)


class SourceEncoder(ReadingPass):
    """``input_ids`` [1, N] to keys [1, A, D, N] and values [1, A, N, D] of each layer of the decoder in turn, with the
    interface of ``EncoderEntry``."""

    @property
    def example_tokens(self) -> int:
        """Length of a prompt for the trace: so many that a layer computes more than one, for torch.export takes a
        number that is 1 there to be always 1."""
        return max(_EXAMPLE_TOKENS, int(self.model.encoder.reduction) + 1)

    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return inputs[0], None

    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cache = empty_cache()
        self.model.written(source, None, inputs[0][:, :1], cache)  # of which nothing is left in a graph
        return source_keys(cache)

    def route(self, chosen: torch.Tensor) -> torch.Tensor:
        """[1, k] filled up to the k of the longest prompt, so that an engine for any length returns one shape."""
        most = max(self.model.encoder.counts(self.model.config.encoder.most_tokens).values())
        return functional.pad(chosen, (0, most - chosen.shape[1]), value=NO_TOKEN)


class RecordedPass(ReadingPass):
    """The decoder's ``input_ids`` [B, S] behind ``source_ids`` [B, N] to logits [B, S, V], and per layer the keys and
    values [B, A, S, D] of these tokens."""

    def read(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return inputs[1], None

    def behind(self, source: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cache = empty_cache()
        logits = self.model.written(source, None, inputs[0], cache)
        return (logits, *(each for layer in cache.self_attention_cache.layers for each in (layer.keys, layer.values)))


class CachedDecoder(generating.CachedDecoder):
    """That of a ``CodaEncoderDecoder``."""

    def scored(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,  # noqa: ARG002
        logits_at: torch.Tensor,
        **cache: Any,
    ) -> torch.Tensor:
        source = cache["encoder_outputs"].last_hidden_state
        return self.model.written(source, None, input_ids, cache["past_key_values"], logits_at)


def answering(checkpoint: Checkpoint, config: CodaEncoderDecoderConfig) -> Answering:
    """``model_of`` as families hand it over, at the least reduction that it is offered at."""
    module = Answering(model_of(checkpoint, config))
    narrow(module, config.encoder.offered[-1])
    return module


def narrow(module: Any, reduction: int) -> None:
    """Makes the encoder of ``module``, an ``Answering``, compute at ``reduction``."""
    module.model.encoder.reduction = reduction


def replay_pass(module: Any, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]) -> Replay:
    """``replay`` of the encoder in ``module``, a ``ReadingPass``. Raises ParityError also for routes that are not
    filled up with ``NO_TOKEN``."""
    encoder, read = module.model.encoder, module.read(inputs)
    most = max(encoder.counts(read[0].shape[1]).values(), default=0)
    for name, places in given.items():
        if (places[:, most:] != NO_TOKEN).any():
            raise ParityError(f"{name}: expected {NO_TOKEN} behind {most} tokens")
    shown = {name: places[:, :most] for name, places in given.items()}
    return replay(encoder, read, shown, lambda source: module.behind(source, inputs))


def lower(module: Any, variants: Mapping[str, str]) -> Answering:
    """A copy of ``module``, an ``Answering``, on the same weights as a graph has it, in the encoder's ``variants``."""
    model = on_same_weights(module.model)
    take_variants(model.encoder, variants)
    return Answering(model, returns_routes=True)
