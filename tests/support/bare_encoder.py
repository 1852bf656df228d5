"""A model known by its sizes alone, for tests of the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nestforge.bucket import Bucket
from nestforge.elastic import Axis, ElasticSpec, Submodel
from nestforge.exporters.architecture import ParameterGroups
from nestforge.exporters.source import WeightBytes
from nestforge.workload import Op


@dataclass(frozen=True)
class Encoder:
    """Attention and feed-forward without biases; ``tables`` parameters of embeddings and ``fixed`` others on top."""

    hidden: int
    head_dim: int
    spec: ElasticSpec
    name: str = "encoder"
    fixed: int = 0
    tables: int = 0
    variant_problems: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    onnxruntime_variants: frozenset[str] = frozenset()

    def parameters(self, submodel: Submodel) -> int:
        return self.parameter_groups(submodel).total

    def parameter_groups(self, submodel: Submodel) -> ParameterGroups:
        ffn = sum(2 * self.hidden * value for axis, value in submodel.values if axis.kind == "ffn")
        heads = sum(value for axis, value in submodel.values if axis.kind == "heads")
        attention = 4 * self.hidden * self.head_dim * heads
        return ParameterGroups(self.tables + self.fixed + attention + ffn, self.tables, ffn)

    def weight_bytes(self, submodel: Submodel, backend: str) -> WeightBytes:
        return WeightBytes(4 * self.parameters(submodel))

    def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        return {}

    def workload(
        self,
        submodel: Submodel,
        bucket: Bucket,
        variants: Mapping[str, str] | None = None,
    ) -> list[Op]:
        ops = []
        for axis, value in submodel.values:
            if axis.layer is None:
                continue
            inner = value if axis.kind == "ffn" else value * self.head_dim
            weights = self.hidden * inner * (2 if axis.kind == "ffn" else 4)
            moved = 4 * bucket.tokens * (self.hidden + inner)
            ops.append(Op(axis.name, "gemm", 2 * bucket.tokens * weights, 4 * weights, moved))
            ops.append(Op(f"{axis.name}.norm", "elementwise", 0, 0, 8 * bucket.tokens * self.hidden))
        return ops


def encoder(layers: int = 3, ffn: int = 256, heads: int = 4, nested: bool = False) -> Encoder:
    sizes = {"ffn": ffn, "heads": heads}
    axes = tuple(Axis(f"layers.{i}.{kind}", size) for i in range(layers) for kind, size in sizes.items() if size)
    return Encoder(64, 16, ElasticSpec(axes, (), nested))
