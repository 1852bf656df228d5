"""A tiny multi-exit model whose every part matters, and batches for it."""

import pytest
import torch
from nestforge.examples.cost_eff.texts import Batch, Rows
from nestforge.exporters.families.cost_eff.config import CostEffArchitecture, ExitSpec, Widths
from nestforge.exporters.families.cost_eff.model import CostEffModel

DEPTH, HEADS, HEAD_SIZE, FFN, CLASSES = 3, 4, 4, 12, 3


@pytest.fixture
def model() -> CostEffModel:
    """3 layers of hidden 16, 4 heads of 4, 12 channels, a dense embedding of 20 words, 3 classes."""
    layers = (Widths(HEADS, FFN),) * DEPTH
    architecture = CostEffArchitecture(
        hidden=HEADS * HEAD_SIZE,
        head_size=HEAD_SIZE,
        vocabulary=20,
        positions=10,
        types=2,
        pad=0,
        rank=None,
        activation="gelu",
        norm_eps=1e-12,
        layers=layers,
        exits=ExitSpec(tuple(range(1, DEPTH + 1)), pool="mean", activation="tanh", classes=CLASSES),
        has_entropy=True,
        stored=layers,
        kept={},
    )
    torch.manual_seed(0)
    model = CostEffModel(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture
def rows() -> Rows:
    """24 texts of 3 to 8 tokens."""
    chance = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (24,), generator=chance).tolist()
    ids = [torch.randint(1, 20, (length,), generator=chance).tolist() for length in lengths]
    return Rows(ids, torch.randint(0, CLASSES, (24,), generator=chance).tolist(), pad=0)


@pytest.fixture
def batch(rows: Rows) -> Batch:
    return rows.batch(range(6))
