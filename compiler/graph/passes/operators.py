"""Operators by name, for passes and precisions. Imports nothing: a device that builds plans reads it too."""

MICROSOFT = "com.microsoft"
# Attention over a cache, whose further outputs are that cache.
CACHED_ATTENTION = "GroupQueryAttention"
NORM = "SimplifiedLayerNormalization"
NORMS = frozenset({NORM, "SkipSimplifiedLayerNormalization"})
# Functions of one tensor, as FFNs have them between their two layers.
ACTIVATIONS = frozenset(
    [
        *("Celu", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "QuickGelu", "Relu", "Selu"),
        *("Sigmoid", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu"),
    ]
)
# Functions of one tensor or several, which broadcast.
ELEMENTWISE = ACTIVATIONS | frozenset(
    [
        *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual"),
        *("Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
        *("Pow", "Reciprocal", "Round", "Sign", "Sqrt", "Sub", "Where", "Xor"),
    ]
)
