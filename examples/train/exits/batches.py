"""Token batches: rows of similar length together, so that little of a batch is padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from .texts import Text

_POOL = 32  # batches that are sorted by length together: grouping within a pool, chance between pools


@dataclass(frozen=True)
class Batch:
    """Ids and mask ``[B, S]`` int64, labels ``[B]`` int64."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Tokenised texts of one part, in order."""

    ids: Sequence[Sequence[int]]
    labels: Sequence[int]
    pad: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows, padded to the longest of them."""
        longest = max(len(self.ids[row]) for row in rows)
        ids = torch.full((len(rows), longest), self.pad)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            length = len(self.ids[row])
            ids[place, :length] = torch.tensor(self.ids[row])
            mask[place, :length] = 1
        return Batch(ids, mask, torch.tensor([self.labels[row] for row in rows]))

    def in_order(self, size: int) -> list[Batch]:
        """Every row once, as they stand."""
        return [self.batch(range(at, min(at + size, len(self.ids)))) for at in range(0, len(self.ids), size)]

    def shuffled(self, size: int, steps: int, seed: int) -> list[Batch]:
        """``steps`` batches of ``size`` rows: epoch after epoch, each in another order."""
        chance = random.Random(seed)  # noqa: S311  (order of training, no secret)
        batches: list[Sequence[int]] = []
        while len(batches) < steps:
            rows = list(range(len(self.ids)))
            chance.shuffle(rows)
            epoch: list[Sequence[int]] = []
            for at in range(0, len(rows), size * _POOL):
                pool = sorted(rows[at : at + size * _POOL], key=lambda row: len(self.ids[row]))
                epoch += [pool[start : start + size] for start in range(0, len(pool), size)]
            chance.shuffle(epoch)
            batches += epoch
        return [self.batch(rows) for rows in batches[:steps]]


def tokenise(tokenizer: Tokenizer, texts: Sequence[Text], pad: int) -> Rows:
    """Ids of every text, with the special tokens."""
    encoded = tokenizer.encode_batch([item.text for item in texts])
    return Rows([item.ids for item in encoded], [item.label for item in texts], pad)
