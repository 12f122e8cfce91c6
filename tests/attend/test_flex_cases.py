"""`flexdilated.flex_attention` on drawn cases of bench/cases/flex, and on calls drawn of their parts, by a formula.

`python -m bench flex_cases` runs all cases, also compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_own
from torch.nn.attention.flex_attention import AuxRequest

from bench.cases.flex import BUILT_IN, GROUPS, LAYOUTS, LEARNED, RULES, SCORES, Case, Size
from bench.cases.flex.verdicts import EQUAL, verdicts
from flexdilated.flex_attention import create_block_mask

CASES = {f"{group}: {case.name}": case for group, cases in GROUPS.items() for case in cases}
# Parts of the names of cases that are answered by an error, which names what is not computed.
REFUSED = ("a block twice", "a block partial and full", "narrower dtype", "lists for more entries")
NOT_MASKED: dict[str, Any] = {"rule": None}


def kinds(case: Case) -> dict[str, str]:
    """Verdicts on the output, also on its dtype and order in memory beside torch's, and on the gradients."""
    found = verdicts(case, ("forward", "backward", "torch"))
    assert not found["torch"].startswith("failed"), found
    return {way: text for way, text in found.items() if way != "torch"}


@given(name=st.sampled_from(sorted(CASES)))
def test_drawn_cases_of_torch(name: str) -> None:
    kind = "refused" if CASES[name].refused or any(part in name for part in REFUSED) else EQUAL
    found = kinds(CASES[name])
    assert {text.partition(":")[0] for text in found.values()} == {kind}, found


drawn_calls = st.builds(
    Case,
    name=st.just("drawn"),
    score=st.sampled_from([None, *(BUILT_IN | SCORES | LEARNED).values()]),
    size=st.builds(
        Size,
        queries=st.sampled_from([96, 75]),
        keys=st.sampled_from([96, 110]),
        kv_heads=st.sampled_from([1, 2, 4]),
        value_dim=st.sampled_from([16, 24]),
    ),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    block=st.sampled_from([128, 64, (32, 64)]),
    maker=st.sampled_from([create_block_mask, torch_own.create_block_mask]),
    layouts=st.sampled_from([None, *LAYOUTS.values()]).map(lambda lies: dict.fromkeys("qkv", lies) if lies else {}),
    how=st.fixed_dictionaries(
        {
            "scale": st.sampled_from([None, 0.3]),
            "enable_gqa": st.just(True),
            "return_aux": st.builds(AuxRequest, lse=st.booleans(), max_scores=st.booleans()),
        }
    ),
)


@given(case=drawn_calls, rule=st.sampled_from([None, *RULES]))
def test_drawn_calls_match_the_definition(case: Case, rule: str | None) -> None:
    masked = NOT_MASKED if rule is None else dict(zip(("rule", "lists"), RULES[rule], strict=True))
    found = kinds(replace(case, **masked))
    assert set(found.values()) == {EQUAL}, found


def test_cases_have_names_of_their_own() -> None:
    assert len(CASES) == sum(map(len, GROUPS.values()))
