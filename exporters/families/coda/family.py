"""Encoders with conditional adapters: only k of n tokens pass through a layer. See docs/coda.md.

Axes: ``ffn`` of every layer (rows of ``ffn.up`` and ``ffn.gate``, columns of ``ffn.down``) and ``coda.reduction``, the
r of ``k = ceil(n / r)``, offered at the values that the configuration lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import RoutingEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....elastic import Submodel
from ...architecture import ROUTES, Architecture, Replay, Routing, TaskSpec
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.own_folder import read_config
from ...family import Deferred, own_family
from ...signature import TOKENS, Signature, text_signature
from .config import PIXELS, SCHEDULE, CodaConfig, KeysOf
from .ops import (
    TABLES,
    elastic_spec,
    forward_ops,
    is_of_task,
    layer_tokens,
    parameter_group,
    parameters,
    reduction_of,
    selected_counts,
    temperature_names,
    token_bucket,
    variant_ops,
)

if TYPE_CHECKING:
    import torch

    from . import model, tasks
else:
    model, tasks = Deferred(".model", __package__), Deferred(".tasks", __package__)


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, CodaConfig)
    shapes = parameters(config).shapes
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, shapes)
    return Architecture(
        spec=elastic_spec(config),
        signature=_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=partial(forward_ops, config),
        load=lambda: model.answering(checkpoint, config),
        narrow=lambda module, submodel: model.narrow(module, reduction_of(config, submodel)),
        is_embedding=lambda parameter, _: parameter in TABLES,
        routing=TokenRoutes(config) if config.conditional else None,
        variants=partial(variant_ops, config),
        lower=model.lower,
        tasks=coda_task_spec(config),
        group_of=parameter_group,
    )


def _signature(checkpoint: Checkpoint, config: CodaConfig) -> Signature:
    image, static = config.image, static_reason(config)
    row = TOKENS if image is None else ("batch", image.tokens)
    if config.num_labels is None:
        output = TensorSpec("last_hidden_state", "float32", (*row, config.hidden_size))
    else:
        output = TensorSpec("logits", "float32", ("batch", config.num_labels), role="classes")
    if image is not None:
        pixels = TensorSpec(PIXELS, "float32", ("batch", image.channels, image.height, image.width), pad=0)
        return Signature((pixels,), (output,), static=static)
    assert config.vocab_size is not None
    sizes, kinds = (config.most_tokens, config.vocab_size), config.type_vocab_size
    return text_signature(checkpoint, [output], *sizes, needs="token", types=kinds, static=static)


def static_reason(config: CodaConfig) -> str | None:
    """Why a model with these layers is another one at every shape, or None."""
    return "k, the tokens that its layers select, is one number for each length" if config.conditional else None


@dataclass(frozen=True)
class TokenRoutes(Routing):
    """The selected tokens of every conditional layer, where ``config`` has one."""

    config: CodaConfig

    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """The tokens of every row by falling rank; none where nothing is compared."""
        return self._entries(bucket.batch, selected_counts(self.config, submodel, bucket))

    def of_any_length(self, submodel: Submodel, longest: int) -> tuple[RoutingEntry, ...]:
        """The same of one row of up to ``longest`` tokens."""
        return self._entries(1, layer_tokens(self.config, longest, reduction_of(self.config, submodel), True))

    def _entries(self, rows: int, counts: Mapping[int, int]) -> tuple[RoutingEntry, ...]:
        if not self.config.has_scores:
            return ()
        return tuple(RoutingEntry(f"{ROUTES}{layer}", (rows, count)) for layer, count in counts.items())

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        config, counts = self.config, selected_counts(self.config, submodel, bucket)
        tokens = token_bucket(config, bucket).sequence
        selected = {*counts.values()} or {tokens}
        stated: dict[str, int | str] = {
            "reduction": reduction_of(config, submodel),
            "tokens per row": tokens,
            "tokens selected": max(selected) if len(selected) == 1 else ", ".join(map(str, counts.values())),
            "router": config.router if counts else "none",
            "keys and values of": config.keys_of,
            "padding is routed": "yes" if config.route_padding else "no",
        }
        if counts and config.soft_top_k is not None:
            schedule = config.soft_top_k
            stated["soft top-k"] = (
                f"{schedule.rounds} rounds from epsilon {schedule.epsilon_start:g} by {schedule.epsilon_decay:g} to "
                f"{schedule.epsilon:g}, b from {schedule.initial}"
            )
        return stated

    def orders(self, name: str) -> Mapping[int, str]:  # noqa: ARG002  (tokens are never permuted)
        return {}

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        return model.replay(module.model, inputs, given)


def coda_task_spec(config: CodaConfig, prefix: str = "") -> TaskSpec | None:
    """Form of the tasks of a model whose encoder ``config`` describes, with the encoder's names behind ``prefix``. None
    where no layer is conditional."""
    if not config.conditional:
        return None
    own = [name for name in parameters(config).shapes if is_of_task(name)]
    names = frozenset(f"{prefix}{name}" for name in (*own, *temperature_names(config)))
    return TaskSpec("coda", names, lambda folder: tasks.read_task(config, folder, prefix))


# The published T5 v1.1 shapes, made conditional as the paper analyses them: adapters of 64, all layers conditional,
# soft top-k of 20 rounds. The sizes of its own final models are not known. Layers, width, FFN, heads.
_SHAPES = {"base": (12, 768, 2048, 12), "large": (24, 1024, 2816, 16), "xl": (24, 2048, 5120, 32)}


def _encoder(shape: tuple[int, int, int, int], keys_of: KeysOf, key_value_heads: int | None) -> CodaConfig:
    layers, width, ffn, heads = shape
    return CodaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=64,
        softmax_scale=1.0,
        vocab_size=32_128,
        max_position_embeddings=512,
        activation="gelu_tanh",
        gated_ffn=True,
        norm="rms",
        position="relative",
        adapter_size=64,
        adapter_activation="relu",
        router="soft_top_k",
        soft_top_k=SCHEDULE,
        keys_of=keys_of,
        ffn_residual="raw",
        reduction=3,
        reductions=(8, 5, 4, 3, 2, 1),
    )


PRESETS: Mapping[str, CodaConfig] = {
    name: config
    for size, shape in _SHAPES.items()
    for name, config in {
        f"coda-t5-{size}-k-to-k": _encoder(shape, "selected", None),
        f"coda-t5-{size}-k-to-all": _encoder(shape, "all", None),
        f"coda-t5-{size}-k-to-all-mq": _encoder(shape, "all", 1),
    }.items()
}
FAMILY = own_family("coda", read, PRESETS, "coda_encoder")
