from __future__ import annotations

import torch
from nestforge.exporters.tracing.token_rows import one_hot, table_rows

PLACES = torch.tensor([[6, 0], [3, 4], [1, 2]])


def test_places_of_groups_are_rows_of_one_table() -> None:
    assert table_rows(PLACES, 7).tolist() == [[6, 0], [10, 11], [15, 16]]
    assert table_rows(PLACES[:, None], 7)[:, 0].tolist() == table_rows(PLACES, 7).tolist()
    assert torch.equal(table_rows(PLACES[:1], 7), PLACES[:1])


def test_a_product_with_ones_reads_places() -> None:
    tokens = torch.randn(3, 7, 4)
    read = one_hot(PLACES, 7) @ tokens
    assert torch.equal(read, torch.stack([tokens[group][PLACES[group]] for group in range(3)]))
