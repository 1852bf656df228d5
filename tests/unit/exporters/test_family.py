from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError
from nestforge.exporters.family import families, preset_checkpoint, presets
from nestforge.exporters.source import open_source


def test_a_name_stands_for_one_model_of_one_family() -> None:
    counts = Counter(name for family in families() for name in family.presets)
    assert counts.most_common(1)[0][1] == 1
    assert presets().keys() == counts.keys()
    assert {"matlm-78m", "matvit-b16", "sparse-mixer-base", "bert-base"} <= presets().keys()


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_described(name: str) -> None:
    source = open_source(f"preset:{name}")
    universal = source.spec.universal()
    longest = source.signature.max_sequence or 1
    (bucket,) = source.signature.buckets([Bucket(1, longest)], [])
    assert source.spec.parse(universal.id) == universal
    assert source.parameters(universal) > 1_000_000
    assert source.workload(universal, bucket)


def test_presets_need_no_torch() -> None:
    """One of each kind of model."""
    program = """
import sys
sys.modules["torch"] = None
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
for name in sys.argv[1:]:
    source = open_source(f"preset:{name}")
    universal, bucket = source.spec.universal(), Bucket(1, source.signature.max_sequence or 1)
    assert source.workload(universal, bucket) and source.parameters(universal)
    for ask in (source.variants, source.metadata, source.routes):
        ask(universal, bucket)
"""
    kinds = {preset_checkpoint(name).config["model_type"]: name for name in presets()}
    assert len(kinds) > 5
    subprocess.run([sys.executable, "-c", program, *kinds.values()], check=True)


def test_an_unknown_name_has_a_nearest_one() -> None:
    with pytest.raises(
        CheckpointError, match=r"^preset:sparse-mixr-base: no preset of this name; did you mean 'sparse-"
    ):
        preset_checkpoint("sparse-mixr-base")


def test_a_preset_has_no_weights() -> None:
    checkpoint = preset_checkpoint("sparse-mixer-base")
    assert (checkpoint.name, checkpoint.has_weights, checkpoint.tensors) == ("preset:sparse-mixer-base", False, {})
    with pytest.raises(
        CheckpointError, match=r"^preset:sparse-mixer-base: a preset has no weights; `nestforge inspect`"
    ):
        checkpoint.require_weights()
