"""Which tokens the conditional layers of the encoder compute, in every pass that begins with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import RoutingEntry
from ....elastic import Submodel
from ....errors import ParityError
from ...routing import Replay, Routing
from ..coda.routes import TokenRoutes
from .config import CodaEncoderDecoderConfig, of_encoder

if TYPE_CHECKING:  # plans are made without torch
    import torch


@dataclass(frozen=True)
class PairRoutes(Routing):
    """The encoder's ``TokenRoutes``, where it has a conditional layer."""

    config: CodaEncoderDecoderConfig

    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """Those of the encoder."""
        return self._own.entries(of_encoder(submodel), bucket)

    def of_prompts(self, submodel: Submodel) -> tuple[RoutingEntry, ...]:
        """Those of one prompt of any length, each as long as that of the longest."""
        return self._own.of_any_length(of_encoder(submodel), self.config.encoder.most_tokens)

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        return self._own.metadata(of_encoder(submodel), bucket)

    def orders(self, name: str) -> Mapping[int, str]:
        return self._own.orders(name)

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        from ..coda.model.replay import replay
        from .passes import NO_TOKEN, ReadingPass

        assert isinstance(module, ReadingPass)
        encoder, read = module.model.encoder, module.read(inputs)
        most = max(encoder.counts(read[0].shape[1]).values(), default=0)
        for name, places in given.items():
            if (places[:, most:] != NO_TOKEN).any():
                raise ParityError(f"{name}: expected {NO_TOKEN} behind {most} tokens")
        shown = {name: places[:, :most] for name, places in given.items()}
        return replay(encoder, read, shown, lambda source: module.behind(source, inputs))

    @property
    def _own(self) -> TokenRoutes:
        return TokenRoutes(self.config.encoder)
