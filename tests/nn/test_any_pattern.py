"""Modules with any pattern: dense oracle, run-time tensors, configurations, caches and token orders."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.nn.test_multihead import E, H, assert_same_function, inputs
from tests.support import longnet_oracle, oracle
from tests.support.agreement import TIGHT
from tests.support.strategies import Case, expressions, whole_cases, written_expressions

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


def logit_mask(counts: Tensor) -> Tensor:
    """Float mask (B * H, N, M) for torch's module from counts (B, H, N, M): the log of each count."""
    return counts.double().log().flatten(0, 1)


@given(whole_cases(patterns=expressions), st.booleans(), st.booleans())
def test_multihead_is_the_dense_one(case: Case, causal: bool, padded: bool) -> None:
    """For any pattern or mixture, causal=True or False, and any padding mask; rows without keys get 0."""
    heads, tokens = case.num_heads, case.num_queries
    torch.manual_seed(0)
    options: dict[str, Any] = {"pattern": case.twin.pattern, "causal": causal, "dtype": torch.float64}
    module = fd.MultiheadDilatedAttention(2 * heads, heads, batch_first=True, **options)
    counts = case.counts().expand(2, -1, -1, -1)
    if causal:
        counts = counts * oracle.counts(oracle.causal(), range(heads), heads, *[torch.arange(tokens)] * 2)
    padding = torch.rand(2, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.3 if padded else None
    if padding is not None:
        counts = counts * ~padding[:, None, None]
    x = torch.randn(2, tokens, 2 * heads, dtype=torch.float64)
    out, _ = module(x, x, x, key_padding_mask=padding, is_causal=causal)
    q, k, v = module.heads_of(x, x, x)
    assert_close(out, module.joined(oracle.attention(q, k, v, counts)[0], 3), **TIGHT)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_attention_with_log_counts(causal: bool) -> None:
    """Outputs and gradients of inputs and parameters equal those of nn.MultiheadAttention with equal weights."""
    pattern = masks.longnet((3, 8), (1, 2)) + masks.local_window(left=2, right=1)
    ours = fd.MultiheadDilatedAttention(E, H, pattern=pattern, causal=causal, dtype=torch.float64)
    torchs = nn.MultiheadAttention(E, H, dtype=torch.float64)
    torchs.load_state_dict(ours.state_dict())
    rule = oracle.total(oracle.longnet((3, 8), (1, 2)), oracle.local_window(2, 1))
    rule = oracle.both(rule, oracle.causal()) if causal else rule
    tensors = inputs(E, E, E)
    positions = torch.arange(len(tensors[0]))
    counts = oracle.counts(rule, range(H), H, positions, positions).expand(tensors[0].shape[1], -1, -1, -1)
    assert_same_function(ours, torchs, tensors, mask=logit_mask(counts))
    assert ours.pattern == (pattern & masks.causal() if causal else pattern)


def test_positions_of_arguments_are_what_they_were() -> None:
    module = fd.MultiheadDilatedAttention(8, 2, (4, 8), (1, 2))
    assert module.pattern == masks.longnet((4, 8), (1, 2))
    with pytest.raises(TypeError, match="needs segment_lengths and dilation_rates, or pattern="):
        fd.MultiheadDilatedAttention(8, 2, (4, 8))


def test_a_causal_call_needs_causal_true_beside_a_causal_pattern() -> None:
    x = torch.randn(2, 6, 8)
    for causal in (True, False):
        module = fd.MultiheadDilatedAttention(8, 2, pattern=WINDOW & masks.causal(), causal=causal, batch_first=True)
        if causal:
            assert_close(module(x, x, x, is_causal=True)[0], module(x, x, x)[0], rtol=0, atol=0)
        else:
            with pytest.raises(ValueError, match="made with causal=True"):
                module(x, x, x, is_causal=True)


def test_multihead_takes_run_time_tensors() -> None:
    """Tensors passed by name equal tensors held by the pattern; missing and unknown names raise."""
    torch.manual_seed(0)
    named = fd.MultiheadDilatedAttention(8, 2, pattern=DOCUMENTS, batch_first=True).double()
    held = masks.longnet((8, 16), (1, 2)).per_document(BINDINGS["packing"]) & masks.visible_keys(BINDINGS["shown"])
    holding = fd.MultiheadDilatedAttention(8, 2, pattern=held, batch_first=True).double()
    holding.load_state_dict(named.state_dict())
    x = torch.randn(2, N, 8, dtype=torch.float64)
    out, _ = named(x, x, x, bindings=BINDINGS)
    assert_close(out, holding(x, x, x)[0], **TIGHT)
    alone = x[:1, 10:]
    branches = fd.MultiheadDilatedAttention(8, 2, (8, 16), (1, 2), batch_first=True).double()
    branches.load_state_dict(named.state_dict())
    hidden = ~BINDINGS["shown"][None, 10:]
    assert_close(out[:1, 10:], branches(alone, alone, alone, key_padding_mask=hidden)[0], **TIGHT)
    with pytest.raises(ValueError, match="needs the run-time tensor 'packing'"):
        named(x, x, x)
    with pytest.raises(ValueError, match="bindings must name run-time tensors of the pattern"):
        named(x, x, x, bindings=BINDINGS | {"ids": BINDINGS["packing"]})


@settings(max_examples=15)
@given(
    whole_cases(patterns=written_expressions),
    st.sampled_from(["natural", "residue", "auto"]),
    st.booleans(),
    st.sampled_from([lambda pattern: pattern, masks.to_json]),
)
def test_longnet_is_the_dense_one(case: Case, layout: str, causal: bool, written: Any) -> None:
    """Features and a gradient, for each token order, with the pattern as a value or as JSON."""
    sizes = {"embed_dim": 4 * case.num_heads, "num_heads": case.num_heads, "vocab_size": None}
    model = model_of(**sizes, pattern=written(case.twin.pattern), causal=causal, layout=layout)
    weights = dict(model.named_parameters())
    x = torch.randn(1, case.num_queries, sizes["embed_dim"], dtype=torch.float64)
    out, truth = model(x), longnet_oracle.longnet(model.config, weights, x, rule=case.twin.rule)
    assert_close(out, truth, rtol=1e-8, atol=1e-9)
    weight, cotangent = weights["blocks.0.qkv.weight"], torch.randn_like(truth)
    (found,), (wanted,) = (torch.autograd.grad(y, weight, cotangent, allow_unused=True) for y in (out, truth))
    assert_close(found, wanted, rtol=1e-7, atol=1e-8)


def test_branches_by_name_or_by_pattern() -> None:
    """A model with branches equals one with their pattern, also with checkpointing and a padding mask."""
    branches = model_of(segment_lengths=(8, 16), dilation_rates=(1, 2))
    pattern = model_of(pattern=masks.longnet((8, 16), (1, 2)), checkpoint=True)
    padding = torch.arange(N) >= torch.tensor([[N], [20]])
    outs = [model(tokens_of(), key_padding_mask=padding) for model in (branches, pattern)]
    assert_close(*outs, **TIGHT)
    gradients = [
        torch.autograd.grad(out.sin().sum(), tuple(model.parameters()))
        for out, model in zip(outs, (branches, pattern), strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("layout", ["natural", "residue", "auto"])
@pytest.mark.parametrize("checkpoint", [False, True])
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


def test_a_classifier_passes_values_on() -> None:
    torch.manual_seed(0)
    config = fd.LongNetConfig(**SIZES, pattern="documents('packing')", causal=False)
    model, first = fd.LongNetClassifier(config, 3, pooling="first").double(), tokens_of()
    changed = first.clone()
    changed[:, 10] = (changed[:, 10] + 1) % SIZES["vocab_size"]
    outs = [model(tokens, bindings={"packing": BINDINGS["packing"]}) for tokens in (first, changed)]
    assert_close(outs[0][0], outs[1][0], rtol=0, atol=0)  # the token is in another document
    assert (outs[0][1] - outs[1][1]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("bindings", "error", "message"),
    [
        (None, ValueError, "the pattern needs the run-time tensor 'packing'"),
        ({"packing": [0] * N}, TypeError, "bindings must hold tensors; got list for 'packing'"),
        ({"ids": BINDINGS["packing"]}, ValueError, "must name run-time tensors of the pattern, which needs 'packing'"),
        ({"packing": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, "must hold one id for each of the 37"),
    ],
)
def test_values_are_checked(bindings: Any, error: type[Exception], message: str) -> None:
    model = model_of(pattern="documents('packing')")
    with pytest.raises(error, match=message):
        model(tokens_of(), bindings=bindings)
    with pytest.raises(ValueError, match="needs no run-time tensor; got 'packing'"):
        model_of(pattern=WINDOW)(tokens_of(), bindings={"packing": BINDINGS["packing"]})


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


@torch.no_grad()
def test_it_goes_into_a_folder_and_a_checkpoint(tmp_path: Path) -> None:
    model = model_of(pattern=WINDOW).eval()
    model.save_pretrained(tmp_path)
    again = fd.LongNet.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.pattern == WINDOW & masks.causal()
    assert_close(again(tokens_of()), model(tokens_of()), **TIGHT)
    torch.save({"config": asdict(model.config), "model": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    loaded = fd.LongNet(fd.LongNetConfig(**saved["config"]), dtype=torch.float64)
    loaded.load_state_dict(saved["model"])
    assert_close(loaded(tokens_of()), model(tokens_of()), **TIGHT)


@torch.no_grad()
def test_caches_attend_by_the_pattern() -> None:
    """Pieces equal one pass, also in `generate`; patterns that cannot have a cache raise."""
    model, tokens = model_of(pattern=WINDOW), tokens_of()
    caches = model.new_caches()
    steps = torch.cat([model(part, caches=caches) for part in tokens.split((20, 1, 1, 15), dim=1)], dim=1)
    assert_close(steps, model(tokens), **TIGHT)
    drawn = model.generate(tokens, max_new_tokens=3, temperature=0)
    assert_close(drawn[:, N], model(tokens)[:, -1].argmax(-1))
    with pytest.raises(ValueError, match="a cache needs a causal pattern"):
        model_of(pattern=masks.local_window(left=3, right=3), causal=False).new_caches()
    with pytest.raises(ValueError, match="a cache needs a pattern without run-time tensors"):
        model_of(pattern="documents('packing')").new_caches()


def test_the_order_is_planned_where_one_length_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for 8,192 tokens; natural order for run-time tensors and for a grid, which limits the tokens."""
    asked = []

    def recommended_layout(pattern: Any, num_tokens: int, **options: Any) -> masks.Layout:
        asked.append((pattern, num_tokens))
        return masks.layout(pattern, num_tokens)

    monkeypatch.setattr(masks, "recommended_layout", recommended_layout)
    strided = masks.strided(4) | masks.local_window(left=1, right=1)
    grid = masks.neighborhood((6, 8), 1, rate=2)
    for pattern, planned in ((strided, True), (grid, False), (strided & masks.documents("packing"), False)):
        model = model_of(pattern=pattern, causal=False, vocab_size=None)
        seen: list[Any] = []
        model.blocks[0].register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[3]))
        bindings = {"packing": BINDINGS["packing"]} if model.pattern.varies else None
        model(torch.randn(2, N, 24, dtype=torch.float64), bindings=bindings)
        assert asked == ([(pattern, 8192)] if planned else [])
        assert seen == [masks.Layout(N, 4) if planned else None]
        asked.clear()


def test_an_encoder_and_a_decoder_by_patterns() -> None:
    """A change of a source token reaches exactly the encoder features within the windows of the layers."""
    encoder = fd.LongNetConfig(**SIZES, pattern=masks.local_window(left=2, right=2), causal=False)
    decoder = fd.LongNetConfig(**SIZES, pattern=WINDOW)
    torch.manual_seed(0)
    model = fd.LongNetEncoderDecoder(encoder, decoder).double()
    source = tokens_of()
    changed = source.clone()
    changed[:, 20] = (changed[:, 20] + 1) % SIZES["vocab_size"]
    moved = (model.encoder(changed) - model.encoder(source)).abs().amax((0, 2)) > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(16, 25))  # 2 layers of 2 tokens to each side
    assert model(source, tokens_of(9)).shape == (2, 9, 19)
    for name, pair in {"encoder": ("documents('ids')", None), "decoder": (None, "documents('ids')")}.items():
        first, second = (
            each if text is None else replace(each, pattern=text)
            for each, text in zip((encoder, decoder), pair, strict=True)
        )
        with pytest.raises(ValueError, match=f"the {name} must have a pattern without run-time tensors"):
            fd.LongNetEncoderDecoder(first, second)


def compiled_and_eager(**options: Any) -> tuple[Any, Any]:
    torch.compiler.reset()
    model = model_of(**options, depth=1)
    return torch.compile(model, fullgraph=True, backend="aot_eager"), model


@pytest.mark.slow
def test_it_compiles() -> None:
    """With run-time tensors in the call, and in residue order."""
    for options in ({"pattern": "documents('packing')"}, {"pattern": masks.strided(4), "layout": "residue"}):
        compiled, eager = compiled_and_eager(**options)
        given = {"bindings": {"packing": BINDINGS["packing"]}} if "packing" in str(options) else {}
        assert_close(compiled(tokens_of(), **given), eager(tokens_of(), **given), **TIGHT)
