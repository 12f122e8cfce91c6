"""A family of transformers is served, or refused by set_pattern at once; a few of each kind of the sweep over all."""

from __future__ import annotations

import re

import pytest

from flexdilated import masks
from flexdilated.integrations.transformers import set_pattern

from .sweep import CALLS, PAGE, examine, page, results
from .tiny import families, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
COMPILED = ("BertLMHeadModel", "Gemma4ForCausalLM")  # tracing takes longer than all the rest
_BY_CLASS = {class_name: (model_type, kind) for model_type, kind, class_name in families()}


@pytest.mark.parametrize(
    "class_name",
    [
        "Qwen2MoeForCausalLM",  # a window of 0 that no layer uses
        "DeepseekV3ForCausalLM",  # values narrower than keys
        "Gemma2ForCausalLM",  # capped scores
        "T5ForConditionalGeneration",  # a learned bias for each head and distance
        "InklingForCausalLM",  # a bias for each query
        "BertLMHeadModel",  # a mask made once more of one that is there
        "LayoutLMForMaskedLM",  # a padding mask of its own
        "Gemma4ForCausalLM",  # rows taken from its mask
        "BartForConditionalGeneration",
    ],
)
def test_served(class_name: str) -> None:
    model_type, kind = _BY_CLASS[class_name]
    calls = [each for each in CALLS if each != "compiled" or class_name in COMPILED]
    found = examine(model_type, class_name, kind, calls)
    assert found["outcome"] == "serves", found
    ways = ["plain", "padded", "pattern", "training", *(["dynamic", "static"] if kind == "causal" else [])]
    assert {way: found[way] for way in ways} == dict.fromkeys(ways, "yes")
    assert found["changes"] == "yes"


@pytest.mark.parametrize(
    ("class_name", "said"),
    [
        ("DogeForCausalLM", r"DogeAttention, makes or changes the mask.*attn_implementation='sdpa' or 'eager' serves"),
        ("DeepseekV32ForCausalLM", "DeepseekV32Attention, makes or changes the mask"),
        ("Inkling2ForCausalLM", "Inkling2SlidingAttention, gives each query a sink logit of its own"),
        ("GitForCausalLM", "GitSelfAttention, computes with a mask of queries and keys"),
        ("T5Gemma2ForConditionalGeneration", "T5Gemma2MergedAttention, makes or changes the mask"),
        (
            "BloomForCausalLM",
            "BloomForCausalLM has no layer that asks .* own code: attn_implementation='sdpa' or 'eager' keeps it, "
            "or call flexdilated.attend",
        ),
        ("LongformerForMaskedLM", r"masks\.recipes\.longformer\(radius, num_global\) makes its pattern for any model"),
        ("BigBirdForCausalLM", r"masks\.recipes\.bigbird\(num_tokens\) makes its pattern for any model"),
    ],
)
def test_refused_at_once(class_name: str, said: str) -> None:
    model_type, kind = _BY_CLASS[class_name]
    model = tiny_model(model_type, class_name, kind).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=said):
        set_pattern(model, masks.local_window(left=3, right=0))
    assert model.config._attn_implementation == before


def test_no_family_raises_later() -> None:
    late = {name: row["why"] for name, row in results().items() if row["outcome"] == "raises later"}
    assert late == {}


def test_the_page_shows_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (version,) = re.findall(r"of transformers ([\d.]+\d)", text)
    assert text == page(results(), version)
