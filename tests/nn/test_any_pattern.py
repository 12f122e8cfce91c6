"""Modules with any pattern: dense oracle, run-time tensors, configurations, caches and token orders."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import longnet_oracle
from tests.support.agreement import TIGHT
from tests.support.strategies import Case, whole_cases, written_expressions

N = 37
SIZES: dict[str, Any] = {"vocab_size": 19, "embed_dim": 24, "depth": 2, "num_heads": 4}
WINDOW = masks.local_window(left=5, right=0) | masks.first_tokens(1)
DOCUMENTS = masks.longnet((8, 16), (1, 2)).per_document("packing") & masks.visible_keys("shown")
BINDINGS = {
    "packing": torch.tensor([[0] * 10 + [1] * 27, [0] * 30 + [1] * 4 + [-1] * 3]),
    "shown": torch.arange(N) % 5 != 3,
}


def model_of(cls: Any = fd.LongNet, **changes: Any) -> Any:
    torch.manual_seed(0)
    return cls(fd.LongNetConfig(**(SIZES | changes)), dtype=torch.float64)


def tokens_of(num_tokens: int = N) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, num_tokens), generator=torch.Generator().manual_seed(1))


def test_multihead_takes_run_time_tensors() -> None:
    """Tensors passed by name equal tensors held by the pattern."""
    torch.manual_seed(0)
    named = fd.MultiheadDilatedAttention(8, 2, pattern=DOCUMENTS, batch_first=True).double()
    held = masks.longnet((8, 16), (1, 2)).per_document(BINDINGS["packing"]) & masks.visible_keys(BINDINGS["shown"])
    holding = fd.MultiheadDilatedAttention(8, 2, pattern=held, batch_first=True).double()
    holding.load_state_dict(named.state_dict())
    x = torch.randn(2, N, 8, dtype=torch.float64)
    out, _ = named(x, x, x, bindings=BINDINGS)
    assert_close(out, holding(x, x, x)[0], **TIGHT)


@settings(max_examples=15)
@given(
    whole_cases(patterns=written_expressions),
    st.sampled_from(["natural", "residue", "auto"]),
    st.booleans(),
    st.sampled_from([lambda pattern: pattern, masks.to_json]),
    st.sampled_from([None, "reference"]),
)
def test_longnet_is_the_dense_one(case: Case, layout: str, causal: bool, written: Any, engine: str | None) -> None:
    """Features and a gradient, for each token order and length, with the pattern as a value or as JSON."""
    sizes = {"embed_dim": 4 * case.num_heads, "num_heads": case.num_heads, "vocab_size": None}
    model = model_of(**sizes, pattern=written(case.twin.pattern), causal=causal, layout=layout, engine=engine)
    weights = dict(model.named_parameters())
    x = torch.randn(1, case.num_queries, sizes["embed_dim"], dtype=torch.float64)
    out, truth = model(x), longnet_oracle.longnet(model.config, weights, x, rule=case.twin.rule)
    assert_close(out, truth, rtol=1e-8, atol=1e-9)
    weight, cotangent = weights["blocks.0.qkv.weight"], torch.randn_like(truth)
    (found,), (wanted,) = (torch.autograd.grad(y, weight, cotangent, allow_unused=True) for y in (out, truth))
    assert_close(found, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("layout", "checkpoint"), [("natural", False), ("residue", True), ("auto", False)])
def test_longnet_packs_documents(layout: str, checkpoint: bool) -> None:
    """Packed documents get the features of each document alone, in a model without positions."""
    pattern = masks.longnet((8, 16), (1, 2)).per_document("packing")
    model = model_of(pattern=pattern, position=None, layout=layout, checkpoint=checkpoint)
    alone = model_of(segment_lengths=(8, 16), dilation_rates=(1, 2), position=None)
    tokens, ids = tokens_of(), BINDINGS["packing"]
    out = model(tokens, bindings={"packing": ids})
    for row, spans in ((0, (range(10), range(10, N))), (1, (range(30), range(30, 34)))):
        for span in spans:
            assert_close(out[row, span], alone(tokens[row, None, span])[0], **TIGHT)
    (gradient,) = torch.autograd.grad(out[:1].sum(), model.blocks[0].qkv.weight)
    parts = alone(tokens[:1, :10]).sum() + alone(tokens[:1, 10:]).sum()
    assert_close(gradient, torch.autograd.grad(parts, alone.blocks[0].qkv.weight)[0], **TIGHT)


@given(whole_cases(patterns=written_expressions))
def test_a_configuration_is_plain_data(case: Case) -> None:
    """A pattern given as a value, JSON or an expression is stored as JSON, so configurations are equal and hashable."""
    sizes = SIZES | {"num_heads": case.num_heads, "embed_dim": 4 * case.num_heads}
    pattern = case.twin.pattern
    config = fd.LongNetConfig(**sizes, pattern=pattern, causal=False)
    assert config.attention_pattern == pattern
    assert config.pattern == masks.to_json(pattern)
    again = fd.LongNetConfig(**json.loads(json.dumps(asdict(config))))
    assert (again, hash(again)) == (config, hash(config))
    assert replace(config, causal=True).attention_pattern == pattern & masks.causal()
    if len(text := repr(pattern)) <= 4096:
        assert fd.LongNetConfig(**sizes, pattern=text, causal=False) == config


def test_the_order_is_planned_where_one_length_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for 8,192 tokens; natural order for run-time tensors and for a grid, which limits the tokens."""
    asked = []

    def recommended_layout(pattern: Any, num_tokens: int, *, num_heads: int, device: Any) -> masks.Layout:
        asked.append((pattern, num_tokens, num_heads, str(device)))
        return masks.layout(pattern, num_tokens)

    monkeypatch.setattr(masks, "recommended_layout", recommended_layout)
    strided = masks.strided(4) | masks.local_window(left=1, right=1)
    grid = masks.neighborhood((6, 8), 1, rate=2)
    for pattern, planned in ((strided, 8192), (grid, None), (strided & masks.documents("packing"), None)):
        model = model_of(pattern=pattern, causal=False, vocab_size=None)
        seen: list[Any] = []
        model.blocks[0].register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[3]))
        bindings = {"packing": BINDINGS["packing"]} if model.pattern.varies else None
        model(torch.randn(2, N, 24, dtype=torch.float64), bindings=bindings)
        assert asked == ([(pattern, planned, 4, "cpu")] if planned else [])
        assert seen == [masks.Layout(N, 4) if planned else None]
        asked.clear()


@pytest.mark.slow
def test_run_time_tensors_in_a_graph() -> None:
    torch.compiler.reset()
    model, bindings = model_of(pattern="documents('packing')", depth=1), {"packing": BINDINGS["packing"]}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(tokens_of(), bindings=bindings), model(tokens_of(), bindings=bindings), **TIGHT)
