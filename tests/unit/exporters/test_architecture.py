"""Axes of an architecture, the steps that it takes in its own lines of code, and slices."""

from traceback import FrameSummary

import pytest
from nestforge import exporters
from nestforge.elastic import Axis, ElasticSpec, PrefixSlice
from nestforge.exporters.architecture import ParameterGroups, is_table, parameter_groups
from nestforge.exporters.own_lines import line_of, own_line
from nestforge.exporters.source import ModelSource

SPEC = ElasticSpec(
    (Axis("depth", 2, (1, 2)), Axis("layers.0.ffn", 8), Axis("layers.0.heads", 2), Axis("layers.1.ffn", 8)),
    (
        PrefixSlice("layers.0.up.weight", 0, "layers.0.ffn"),
        PrefixSlice("layers.0.up.bias", 0, "layers.0.ffn"),
        PrefixSlice("layers.0.down.weight", 1, "layers.0.ffn"),
        PrefixSlice("layers.0.query.weight", 0, "layers.0.heads", 2),
        PrefixSlice("layers.1.up.weight", 0, "layers.1.ffn"),
    ),
    min_depth={"layers.1.up.weight": 2},
)
SHAPES = {
    "embed_tokens.weight": (100, 4),
    "layers.0.up.weight": (8, 4),
    "layers.0.up.bias": (8,),
    "layers.0.down.weight": (4, 8),
    "layers.0.down.bias": (4,),
    "layers.0.query.weight": (4, 4),
    "layers.1.up.weight": (8, 4),
}


def test_groups_follow_the_slices() -> None:
    whole = parameter_groups(SPEC, SHAPES, SPEC.universal())
    assert whole == ParameterGroups(total=400 + 32 + 8 + 32 + 4 + 16 + 32, embedding=400, ffn=32 + 8 + 32 + 32)
    half = parameter_groups(SPEC, SHAPES, SPEC.parse("ffn4x1_8x1-heads1"))
    assert half == ParameterGroups(total=400 + 16 + 4 + 16 + 4 + 8 + 32, embedding=400, ffn=16 + 4 + 16 + 32)
    assert half.non_embedding == half.total - 400


def test_layers_behind_the_depth_do_not_count() -> None:
    assert parameter_groups(SPEC, SHAPES, SPEC.parse("depth1")).ffn == 32 + 8 + 32


def test_a_family_may_name_the_tables_itself() -> None:
    groups = parameter_groups(SPEC, SHAPES, SPEC.universal(), lambda name, _: name.endswith("query.weight"))
    assert (groups.embedding, groups.ffn) == (16, 104)


def test_untied_matrix_to_the_vocabulary_does_not_change_the_non_embedding_size() -> None:
    tied = parameter_groups(SPEC, SHAPES, SPEC.universal())
    untied = parameter_groups(SPEC, {**SHAPES, "lm_head.weight": (100, 4)}, SPEC.universal())
    assert untied.total == tied.total + 400
    assert untied.non_embedding == tied.non_embedding


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("bert.embeddings.word_embeddings.weight", (64, 32), True),
        ("embeddings.position_embeddings", (1, 17, 32), True),
        ("model.embed_tokens_per_layer.weight", (64, 32), True),
        ("transformer.wte.weight", (64, 32), True),
        ("wpe.weight", (64, 32), True),
        ("lm_head.weight", (64, 32), True),
        ("lm_head.bias", (64,), False),
        ("lm_head.dense.weight", (32, 32), False),
        ("embeddings.LayerNorm.weight", (32,), False),
        ("embeddings_project.weight", (32, 16), False),
        ("embeddings.patch_embeddings.projection.weight", (32, 3, 16, 16), False),
        ("encoder.layer.0.output.dense.weight", (32, 64), False),
    ],
)
def test_tables_by_name(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_table(name, shape) is expected


def test_a_real_encoder(source: ModelSource) -> None:
    groups = source.parameter_groups(source.spec.universal())
    assert groups.total == source.parameters(source.spec.universal())
    assert groups.embedding == (64 + 40 + 2) * 32  # words, positions, types
    assert groups.ffn == 3 * (64 * 32 + 64 + 32 * 64)


def frame(file: str, line: int = 3, code: str = "x = y") -> FrameSummary:
    return FrameSummary(file, line, "forward", line=code)


def test_the_last_line_of_the_users_own_code() -> None:
    packages = "/env/lib/python3.11/site-packages"
    torch, ours = frame(f"{packages}/torch/nn/modules/linear.py"), frame(exporters.__file__)
    model = frame(f"{packages}/transformers/models/bert/modeling_bert.py", 7, "")
    helper = frame(f"{packages}/transformers/integrations/sdpa_attention.py")
    assert own_line([ours, frame("/users/net.py"), frame("/users/parts.py", 5), torch]) == " at parts.py:5 (x = y)"
    assert own_line([ours, model, helper, torch]) == " at modeling_bert.py:7"
    assert own_line([frame("/users/net.py"), model]) == " at net.py:3 (x = y)"
    assert own_line([helper]) == " at sdpa_attention.py:3 (x = y)"
    assert own_line([ours, torch, frame("<frozen importlib>")]) == ""


def test_of_an_error() -> None:
    with pytest.raises(ValueError, match="mine") as caught:
        raise ValueError("mine")
    assert line_of(caught.value).startswith(" at test_architecture.py:")
