"""Of a text whose logits are too many some are judged, and what all of them show these show too: the faults of record
0020, in the last layer, whose keys and values are those of a sound one. So do the fewer cases of a large model."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.engines.cached import _FEWEST_TOKENS as FEWEST
from nestforge.compiler.engines.cached_gate import cached_reference, judge_rows
from nestforge.compiler.parity import cases
from nestforge.compiler.parity.cached_cases import cached_batches, cases_of, judged_specs
from nestforge.compiler.parity.cases import Case, judged_places, parity_cases
from nestforge.compiler.parity.compare import tolerance_for
from nestforge.compiler.parity.judge import JudgedOutputs, judge
from nestforge.compiler.parity.reference import Reference, replayed
from nestforge.compiler.parity.references import References
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.inputs.arrays import Arrays
from support.gated_decoders import save_decoder

VOCABULARY = 48
# Tokens whose logits are judged of a text; texts have 48, the longest 521.
FEW = 16


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> UniversalModel:
    folder = save_decoder(tmp_path_factory.mktemp("m") / "qwen2", "qwen2", max_position_embeddings=600)
    return load_universal(open_source(folder, generates=True))


def bias_dropped(layer: Any) -> None:
    layer.self_attn.q_proj.bias.zero_()


def epsilon_changed(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 1e-5


def heads_swapped(layer: Any) -> None:
    weight, size = layer.self_attn.q_proj.weight, layer.self_attn.head_dim
    weight[: 2 * size] = torch.cat((weight[size : 2 * size], weight[:size]))


def mask_wrong(layer: Any) -> None:
    """The first token is hidden from all others."""

    def hide(_module: Any, args: Any, named: dict[str, Any]) -> Any:
        tokens = named["hidden_states"].shape[1]
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        seen[1:, 0] = False
        return args, {**named, "attention_mask": torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]}

    layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)


def sound(_layer: Any) -> None:
    pass


@pytest.mark.parametrize("fault", [sound, bias_dropped, epsilon_changed, heads_swapped, mask_wrong])
@pytest.mark.parametrize("most", [cases.MOST_JUDGED, FEW * VOCABULARY], ids=["all", "few"])
def test_faults_of_the_last_layer_are_found(
    universal: UniversalModel, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None], most: int
) -> None:
    monkeypatch.setattr(cases, "MOST_JUDGED", most)
    form, signature = universal.source.cached, universal.source.signature
    batches = cached_batches(form.entry, long=True)
    texts, whole = cases_of(batches), parity_cases(signature, Bucket(1, 512, 1, 1), None, True)
    assert len(whole) == 6
    reference, limit = References(universal, {}).of(universal.spec.universal()), tolerance_for("fp32", 2)
    broken = copy.deepcopy(reference.module)
    fault(broken.get_submodule("model.model.layers")[-1])
    heads: list[int] = []
    head = broken.get_submodule("model.lm_head")
    head.register_forward_hook(lambda _module, _inputs, logits: heads.append(logits.shape[1]))
    engine = reference.viewed(lambda _: broken, reference.specs)

    found = answers(cached_reference(engine, form), texts)
    for case, arrays in zip(texts, found, strict=True):
        tokens = case.feeds["input_ids"].shape[1]
        assert arrays["logits"].shape[1] == len(judged_places(tokens, form.vocabulary))
        assert arrays["key_0"].shape[2] == tokens
    verdict = judge_rows(replayed(cached_reference(reference, form), texts), form, batches, found, limit)
    assert ("longer than a run" in verdict.broken_cases) == (fault is not sound)
    assert (verdict.broken is None) == (fault is sound)
    shortest = cases_of(cached_batches(form.entry, long=False, tokens=FEWEST)[1::2])
    found = answers(cached_reference(engine, form), shortest)
    expected = replayed(cached_reference(reference, form), shortest)
    verdict = judge(expected, found, shortest, JudgedOutputs(judged_specs(form.entry)), limit)
    assert (verdict.broken is None) == (fault is sound)

    verdict = judge(replayed(reference, whole), answers(engine, whole), whole, JudgedOutputs(signature.outputs), limit)
    assert (whole[-1].name in verdict.broken_cases) == (fault is not sound)
    assert (verdict.broken is None) == (fault is sound)
    looked = replayed(reference, whole, in_float32={case.name for case in whole})
    first = judge(replace(looked, exact=None), answers(engine, whole), whole, JudgedOutputs(signature.outputs), limit)
    assert first.broken_cases >= verdict.broken_cases
    assert (first.broken is None) == (fault is sound), "no float64 is needed"
    assert max(heads) == (FEW if most == FEW * VOCABULARY else 521)  # no others were made


def answers(reference: Reference, asked: Sequence[Case]) -> list[Arrays]:
    return [reference.run_judged(case, None, None)[0] for case in asked]
