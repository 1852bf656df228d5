from __future__ import annotations

import onnxruntime
import torch
from nestforge.exporters.tracing.add_rows import add_rows
from nestforge.exporters.tracing.onnx_translations import TRANSLATIONS
from nestforge.exporters.tracing.trace import quiet_export


class AddTwice(torch.nn.Module):
    def forward(self, answer: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return add_rows(add_rows(answer, rows, values), rows, values)


def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(5, 3), torch.tensor([4, 0]), torch.tensor([[1.0, 2, 3], [10, 20, 30]])


def test_adds_to_the_rows_and_leaves_its_input() -> None:
    answer, rows, values = arrays()
    result = add_rows(answer, rows, values)
    assert result.tolist() == [[11, 21, 31], [1, 1, 1], [1, 1, 1], [1, 1, 1], [2, 3, 4]]
    assert torch.equal(answer, torch.ones(5, 3))


def test_engines_scatter_without_a_reduction() -> None:
    """A reduction would add rows that meet; ONNX Runtime 1.31 loses such updates, TensorRT has none."""
    with quiet_export():
        program = torch.onnx.export(
            AddTwice(), arrays(), dynamo=True, opset_version=20, custom_translation_table=TRANSLATIONS, verbose=False
        )
    assert program is not None
    proto = program.model_proto
    scatters = [node for node in proto.graph.node if node.op_type == "ScatterND"]
    assert len(scatters) == 2
    assert not any(
        attribute.name == "reduction" and attribute.s != b"none" for s in scatters for attribute in s.attribute
    )
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (tensor.numpy() for tensor in arrays()), strict=True)))
    assert found.tolist() == AddTwice()(*arrays()).tolist()
