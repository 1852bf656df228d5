"""A Sparse Mixer written a second time, from the paper's formulas: numpy, float64, one token after the other.

Nothing of it is shared with the package. Spectral mixing is an FFT here, routing a loop over sorted lists.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Weights = Mapping[str, Array]


def mixer_outputs(settings: Mapping[str, Any], p: Weights, ids: Array, types: Array) -> list[Array]:
    """Outputs of the model that ``settings`` (keys of config.json) and parameters ``p`` make."""
    rows, length = ids.shape
    eps = settings.get("layer_norm_eps", 1e-12)
    total = p["embeddings.word.weight"][ids] + p["embeddings.token_type.weight"][types]
    total = total + p["embeddings.position.weight"][:length]
    x = linear(p, "embeddings.projection", norm(p, "embeddings.norm", total, eps))
    for layer in range(settings["num_hidden_layers"]):
        at = f"layers.{layer}"
        if layer in settings["attention_layers"]:
            real = ids != settings.get("pad_token_id", 0)
            mixed = attend(p, f"{at}.attention", x, real, settings["num_attention_heads"])
        else:
            sequence, hidden = p.get(f"{at}.mixing.sequence"), p.get(f"{at}.mixing.hidden")
            mixed = np.stack([mix(settings["mixing"], row, sequence, hidden) for row in x])
        u = norm(p, f"{at}.mixing_norm", x + mixed, eps)
        if layer in settings["moe_layers"]:
            answer = moe(settings, p, f"{at}.moe", u.reshape(rows * length, -1)).reshape(u.shape)
        else:
            answer = linear(p, f"{at}.ffn.down", gelu(linear(p, f"{at}.ffn.up", u)))
        x = norm(p, f"{at}.ffn_norm", u + answer, eps)
    outputs = []
    if settings["head"] in ("masked_lm", "pretraining"):
        inner = norm(p, "head.norm", gelu(linear(p, "head.transform", x)), eps)
        outputs.append(inner @ p["embeddings.word.weight"].T + p["head.bias"])
    if settings["head"] != "masked_lm":
        pooled = np.tanh(linear(p, "pooler", x[:, 0]))
        outputs += [x, pooled] if settings["head"] == "none" else [linear(p, "classifier", pooled)]
    return outputs


def mix(kind: str, x: Array, sequence: Array | None = None, hidden: Array | None = None) -> Array:
    """One example ``x`` [n, d] mixed along both axes."""
    if kind in ("linear", "circulant", "toeplitz"):
        assert sequence is not None
        assert hidden is not None
        n, d = x.shape
        if kind == "linear":
            return sequence @ x @ hidden
        return _structured(kind, sequence, n) @ x @ _structured(kind, hidden, d).T
    if kind in ("hartley_separable", "hartley_separable_plus"):
        sign = 1 if kind.endswith("plus") else -1
        return _hartley(_hartley(x, 0, sign), 1, sign)
    spectrum = np.fft.fft(np.fft.fft(x, axis=1), axis=0)
    return {
        "fourier": spectrum.real,
        "hartley": spectrum.real - spectrum.imag,
        "hartley_plus": spectrum.real + spectrum.imag,
    }[kind]


def _structured(kind: str, vector: Array, size: int) -> Array:
    """Rows written out: a circulant's are turned to the right, a Toeplitz matrix's are windows moving to the left."""
    if kind == "circulant":  # column s is the vector turned down by s
        return np.stack([np.roll(vector, s) for s in range(size)], axis=1)
    trained = (len(vector) + 1) // 2
    return np.stack([vector[trained - 1 - r : trained - 1 - r + size] for r in range(size)])


def _hartley(x: Array, axis: int, sign: int) -> Array:
    spectrum = np.fft.fft(x, axis=axis)
    return spectrum.real + sign * spectrum.imag


def attend(p: Weights, at: str, x: Array, real: Array, heads: int) -> Array:
    """Rows ``x`` [B, S, d]; a query sees the keys that are ``real`` [B, S], and a pad the mean of all values."""
    out = np.zeros_like(x)
    size = x.shape[2] // heads
    query, key, value = (linear(p, f"{at}.{part}", x) for part in ("query", "key", "value"))
    for row in range(len(x)):
        for head in range(heads):
            cut = slice(head * size, (head + 1) * size)
            for place in range(x.shape[1]):
                scores = key[row, :, cut] @ query[row, place, cut] / np.sqrt(size)
                if real[row, place]:
                    weights = softmax(np.where(real[row], scores, -np.inf))
                else:
                    weights = np.full(len(scores), 1 / len(scores))
                out[row, place, cut] = weights @ value[row, :, cut]
    return linear(p, f"{at}.output", out)


def moe(settings: Mapping[str, Any], p: Weights, at: str, tokens: Array) -> Array:
    """``tokens`` [B * S, d] through groups, router and experts; what no expert takes stays zero."""
    groups = max(1, len(tokens) // settings.get("group_size", 4096))
    while len(tokens) % groups:
        groups += 1
    return np.concatenate([_group(settings, p, at, group) for group in np.split(tokens, groups)])


def _group(settings: Mapping[str, Any], p: Weights, at: str, u: Array) -> Array:
    experts = settings["num_experts"]
    scores = np.stack([softmax(token) for token in linear(p, f"{at}.router", u)])
    slots = round(Fraction(str(settings.get("capacity_factor", 1.0))) * len(u) / experts)
    slots = min(max(slots, settings.get("min_capacity", 4)), len(u))
    out = np.zeros_like(u)
    if settings.get("router", "experts_choose") == "experts_choose":
        for expert, tokens in enumerate(experts_choose(scores, slots)):
            for token in tokens:
                out[token] += scores[token, expert] * expert_ffn(p, at, expert, u[token])
    else:
        for token, expert in enumerate(tokens_choose(scores, slots, settings.get("batch_prioritized", True))):
            if expert >= 0:
                out[token] = scores[token, expert] * expert_ffn(p, at, expert, u[token])
    return out


def experts_choose(scores: Array, slots: int) -> list[list[int]]:
    """Scores [T, E]: of each expert its best tokens, by falling score, the lower token first among equals."""
    tokens = range(len(scores))
    return [sorted(tokens, key=lambda t: (-scores[t, e], t))[:slots] for e in range(scores.shape[1])]


def tokens_choose(scores: Array, slots: int, prioritized: bool) -> list[int]:
    """Scores [T, E]: of each token its expert, or -1 where that expert has served ``slots`` others before."""
    wish = [min(range(scores.shape[1]), key=lambda e: (-token[e], e)) for token in scores]
    order = list(range(len(scores)))
    if prioritized:
        order.sort(key=lambda t: (-scores[t, wish[t]], t))
    served, chosen = [0] * scores.shape[1], [-1] * len(scores)
    for token in order:
        if served[wish[token]] < slots:
            served[wish[token]] += 1
            chosen[token] = wish[token]
    return chosen


def expert_ffn(p: Weights, at: str, expert: int, token: Array) -> Array:
    """One token [d] through one expert."""
    up, up_bias, down, down_bias = (
        p[f"{at}.experts.{part}"][expert] for part in ("up_weight", "up_bias", "down_weight", "down_bias")
    )
    return gelu(token @ up + up_bias) @ down + down_bias


def gelu(x: Array) -> Array:
    """The tanh approximation."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(p: Weights, at: str, x: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * p[f"{at}.weight"] + p[f"{at}.bias"]


def linear(p: Weights, at: str, x: Array) -> Array:
    return x @ p[f"{at}.weight"].T + p[f"{at}.bias"]


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return powers / powers.sum()
