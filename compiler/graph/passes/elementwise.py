"""Operators that work on each element alone, whatever the shape: what every pass may move or slice across."""

from __future__ import annotations

# Of one tensor, as FFNs have them between their two layers.
ACTIVATIONS = frozenset(
    [
        *("Celu", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "QuickGelu", "Relu", "Selu"),
        *("Sigmoid", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu"),
    ]
)
# Of one tensor or several, which broadcast.
ELEMENTWISE = ACTIVATIONS | frozenset(
    [
        *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual"),
        *("Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
        *("Pow", "Reciprocal", "Round", "Sign", "Sqrt", "Sub", "Where", "Xor"),
    ]
)
