"""MultiheadDilatedAttention against `nn.MultiheadAttention`: parameters, values, torch's layers."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.engines import Dropout
from tests.support.longnet_oracle import multiplicity

# float64 against float64: only the order of sums differs.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
E, H, B, N = 12, 2, 3, 11


def pair(segments=(64,), rates=(1,), *, causal=False, **options):
    """Ours and torch's, equal in all parameters."""
    ours = fd.MultiheadDilatedAttention(E, H, segments, rates, causal=causal, dtype=torch.float64, **options)
    torchs = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in ours.parameters():  # biases start at 0, which would hide a lost one
            parameter.normal_()
    torchs.load_state_dict(ours.state_dict())
    return ours, torchs


def inputs(*widths, batch=B, batch_first=False, lengths=(N, N, N)):
    torch.manual_seed(1)
    middle = () if batch is None else (batch,)
    tensors = [torch.randn(n, *middle, width, dtype=torch.float64) for n, width in zip(lengths, widths, strict=True)]
    if batch is not None and batch_first:
        tensors = [x.transpose(0, 1).contiguous() for x in tensors]
    return [x.requires_grad_() for x in tensors]


def assert_same_function(ours, torchs, tensors, *, mask=None, is_causal=False, padding=None):
    """Outputs, and gradients of inputs and parameters; `tensors` may hold one tensor three times."""
    out, weights = ours(*tensors, is_causal=is_causal, key_padding_mask=padding)
    expected, _ = torchs(*tensors, need_weights=False, attn_mask=mask, key_padding_mask=padding)
    assert weights is None
    assert_close(out, expected, **TOLERANCE)
    cotangent = torch.randn_like(expected)
    leaves = list(dict.fromkeys(tensors))
    got = torch.autograd.grad(out, [*leaves, *ours.parameters()], cotangent)
    want = torch.autograd.grad(expected, [*leaves, *torchs.parameters()], cotangent)
    for ours_grad, torchs_grad in zip(got, want, strict=True):
        assert_close(ours_grad, torchs_grad, **TOLERANCE)


def future():
    return torch.ones(N, N, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [B, None])
def test_one_whole_branch_is_torchs_attention(bias, batch_first, batch):
    ours, torchs = pair(bias=bias, batch_first=batch_first)
    tensors = inputs(E, E, E, batch=batch, batch_first=batch_first)
    assert_same_function(ours, torchs, tensors)
    assert_same_function(ours, torchs, tensors[:1] * 3)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [B, None])
@pytest.mark.parametrize("num_keys", [N, 7])
def test_any_padding_mask_is_torchs(batch_first, batch, num_keys):
    """Booleans and floats; keys left out at either end and in the middle; self and cross attention."""
    ours, torchs = pair(batch_first=batch_first)
    tensors = inputs(E, E, E, batch=batch, batch_first=batch_first, lengths=(N, num_keys, num_keys))
    padding = torch.rand(B, num_keys, generator=torch.Generator().manual_seed(3)) < 0.4
    padding[:, 1], padding[0, :1], padding[1, -2:] = False, True, True
    padding = padding if batch else padding[0]
    assert_same_function(ours, torchs, tensors, padding=padding)
    added = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -torch.inf)
    assert_same_function(ours, torchs, tensors, padding=added)


def test_many_sequences_of_few_tokens_are_likely_to_be_swapped():
    """It warns: they may be meant."""
    x = torch.randn(2, 300, 16)
    with pytest.warns(UserWarning, match=r"query has 2 tokens in each of 300 batch entries.* need batch_first=True"):
        fd.MultiheadDilatedAttention(16, 4, [8], [1])(x, x, x)
    fd.MultiheadDilatedAttention(16, 4, [8], [1], batch_first=True)(x, x, x)
    few = x[:, :64]
    fd.MultiheadDilatedAttention(16, 4, [8], [1])(few, few, few)


def test_padding_with_branches_and_causal_order():
    """A key that is left out is out of every branch; a query without any gets zeros into its projection."""
    segments, rates = (3, 8, 64), (1, 2, 3)
    ours, torchs = pair(segments, rates)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 4:], padding[1, ::3] = True, True
    counts = multiplicity(segments, rates, num_heads=H, num_queries=N, num_keys=N, causal=False)
    mask = counts.double().log().repeat(B, 1, 1).view(B, H, N, N)
    mask = mask.masked_fill(padding[:, None, None, :], -torch.inf)
    seen = (mask > -torch.inf).any(-1).all(1)  # rows that see a key in every head: torch makes NaN of others
    x = inputs(E, E, E)
    out, _ = ours(*x, key_padding_mask=padding)
    expected, _ = torchs(*x, need_weights=False, attn_mask=mask.flatten(0, 1))
    assert seen.any()
    assert not seen.all()
    assert_close(out.transpose(0, 1)[seen], expected.transpose(0, 1)[seen], **TOLERANCE)
    assert out.isfinite().all()


@pytest.mark.parametrize("widths", [{"kdim": 7}, {"vdim": 5}, {"kdim": 7, "vdim": 5}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_other_key_and_value_widths(widths, batch_first):
    ours, torchs = pair(batch_first=batch_first, **widths)
    sizes = (E, widths.get("kdim", E), widths.get("vdim", E))
    assert_same_function(ours, torchs, inputs(*sizes, batch_first=batch_first))


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("beside", [None, "booleans", "floats"])
def test_a_causal_module_takes_torchs_causal_mask(called, beside):
    """torch wants the mask beside is_causal=True; here it says the same once more, as booleans or as floats."""
    ours, torchs = pair(causal=True)
    square = nn.Transformer.generate_square_subsequent_mask(N)
    mask = {None: None, "booleans": future(), "floats": square}[beside]
    x = inputs(E, E, E)
    expected, _ = torchs(*x, need_weights=False, attn_mask=square.double(), is_causal=True)
    assert_close(ours(*x, attn_mask=mask, is_causal=called)[0], expected, **TOLERANCE)
    if called and beside != "booleans":
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager" if beside else "eager")
        assert_close(compiled(*x, attn_mask=mask, is_causal=True)[0], expected, **TOLERANCE)


@given(
    place=st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)), kind=st.sampled_from(["booleans", "floats", "bias"])
)
def test_a_mask_that_is_not_causal_is_refused(place, kind):
    """Off by one pair in any place is another function."""
    ours, _ = pair(causal=True)
    mask = future()
    if kind != "booleans":
        mask = torch.zeros(N, N).masked_fill(mask, -torch.inf)
    mask[place] = ~mask[place] if kind == "booleans" else 0.5 if kind == "bias" or mask[place] else -torch.inf
    x = inputs(E, E, E)
    with pytest.raises(ValueError, match=r"exactly torch's causal mask.*`pattern & other`"):
        ours(*x, attn_mask=mask, is_causal=True)


@given(sizes=st.tuples(st.integers(1, N), st.integers(1, N)), diagonal=st.integers(1 - N, N), as_floats=st.booleans())
def test_a_causal_mask_of_any_lengths_begins_at_the_first_token(sizes, diagonal, as_floats):
    """As torch's does, whichever side is longer; one that ends with the last token is another function."""
    ours, torchs = pair(causal=True)
    x = inputs(E, E, E, lengths=(sizes[0], sizes[1], sizes[1]))
    for begins in (diagonal, 1 + sizes[1] - sizes[0], 1):
        mask = torch.ones(sizes, dtype=torch.bool).triu(begins)
        given_mask = torch.zeros(sizes).masked_fill(mask, -torch.inf) if as_floats else mask
        if torch.equal(mask, torch.ones_like(mask).triu(1)):
            expected, _ = torchs(*x, need_weights=False, attn_mask=mask)
            assert_close(ours(*x, attn_mask=given_mask)[0], expected, **TOLERANCE)
        else:
            with pytest.raises(ValueError, match="exactly torch's causal mask"):
                ours(*x, attn_mask=given_mask)


def test_a_compiled_graph_refuses_another_mask_when_it_runs():
    ours, _ = pair(causal=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="exactly torch's causal mask"):
        compiled(*inputs(E, E, E), attn_mask=~future(), is_causal=True)


@pytest.mark.parametrize(
    "call", [{"is_causal": True}, {"attn_mask": future()}, {"attn_mask": future(), "is_causal": True}]
)
def test_a_causal_call_needs_a_causal_module(call):
    ours, _ = pair(causal=False)
    with pytest.raises(ValueError, match="needs a module that is made with causal=True"):
        ours(*inputs(E, E, E), **call)


def test_branches_are_torchs_attention_with_log_counts_as_mask():
    segments, rates = (3, 8, 64), (1, 2, 3)
    for causal in (False, True):
        ours, torchs = pair(segments, rates, causal=causal)
        counts = multiplicity(segments, rates, num_heads=H, num_queries=N, num_keys=N, causal=causal)
        mask = counts.double().log().repeat(B, 1, 1)
        assert_same_function(ours, torchs, inputs(E, E, E), mask=mask, is_causal=causal)


@pytest.mark.parametrize("rules", [{"offsets": "contiguous"}, {"heads": "grouped"}])
def test_offset_and_head_rules_reach_the_pattern(rules):
    module = fd.MultiheadDilatedAttention(E, H, (4, 8), (2, 4), **rules)
    assert module.pattern == fd.masks.longnet((4, 8), (2, 4), **rules)
    causal = fd.MultiheadDilatedAttention(E, H, (4, 8), (2, 4), causal=True, **rules)
    assert causal.pattern == module.pattern & fd.masks.causal()


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}, {"kdim": 7, "bias": False}])
def test_equal_seeds_give_equal_parameters_both_ways(options):
    torch.manual_seed(3)
    ours = fd.MultiheadDilatedAttention(E, H, (4,), (1,), **options)
    torch.manual_seed(3)
    torchs = nn.MultiheadAttention(E, H, **options)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()), rtol=0, atol=0)
    torchs.load_state_dict({name: value + 1 for name, value in ours.state_dict().items()})
    ours.load_state_dict(torchs.state_dict())
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()), rtol=0, atol=0)


def encoder_layer(self_attn=None, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        E, H, dim_feedforward=16, dropout=0.0, batch_first=True, dtype=torch.float64, **options
    )
    if self_attn is not None:
        self_attn.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = self_attn
    return layer


def replacement(segments=(3,), **options):
    options = {"batch_first": True, "dtype": torch.float64, **options}
    return fd.MultiheadDilatedAttention(E, H, segments, (1,), **options)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_calls_it_in_every_mode(norm_first):
    layer = encoder_layer(replacement(), norm_first=norm_first)
    (x,) = inputs(E, lengths=(N,), batch_first=True)
    expected = layer.train()(x)  # the ordinary path; no dropout
    for training, gradients in ((False, False), (False, True), (True, False)):
        with torch.set_grad_enabled(gradients):
            assert_close(layer.train(training)(x), expected, **TOLERANCE)
    dense = encoder_layer(norm_first=norm_first).eval()
    with torch.no_grad():
        assert (layer.eval()(x) - dense(x)).abs().max() > 1e-2
        whole = encoder_layer(replacement((64,)), norm_first=norm_first).eval()
        assert_close(whole(x), dense(x), **TOLERANCE)


def test_encoder_calls_it_in_eval():
    def encoder(layer):
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    x = inputs(E, lengths=(N,), batch_first=True)[0].detach()
    with torch.no_grad():
        expected = encoder(encoder_layer())(x, mask=future(), is_causal=True)
        causal = encoder(encoder_layer(replacement((64,), causal=True)))
        assert_close(causal(x, mask=future(), is_causal=True), expected, **TOLERANCE)
        assert_close(causal(x, mask=future()), expected, **TOLERANCE)
        sparse = encoder(encoder_layer(replacement()))
        assert_close(sparse(x), sparse.train()(x), **TOLERANCE)


def test_encoder_hands_its_padding_on():
    def encoder(layer):
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    (x,) = inputs(E, lengths=(N,), batch_first=True)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, -2:], padding[1, -7:] = True, True
    expected = encoder(encoder_layer())(x, src_key_padding_mask=padding)
    found = encoder(encoder_layer(replacement((64,))))(x, src_key_padding_mask=padding)
    assert_close(found[~padding], expected[~padding], **TOLERANCE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_an_encoder_built_around_dense_attention_raises():
    encoder = nn.TransformerEncoder(encoder_layer(), 1).eval()
    encoder.layers[0].self_attn = replacement()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, -2:] = True
    with torch.no_grad(), pytest.raises(ValueError, match=r"got a nested one.*use_nested_tensor = False"):
        encoder(torch.randn(B, N, E, dtype=torch.float64), src_key_padding_mask=padding)
    encoder.use_nested_tensor = False
    with torch.no_grad():
        assert encoder(torch.randn(B, N, E, dtype=torch.float64), src_key_padding_mask=padding).isfinite().all()


def test_decoder_layer_takes_it_for_self_and_cross_attention():
    torch.manual_seed(0)
    dense = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer = copy.deepcopy(dense)
    for name in ("self_attn", "multihead_attn"):
        ours = replacement((64,), causal=name == "self_attn")
        ours.load_state_dict(getattr(dense, name).state_dict())
        setattr(layer, name, ours)
    x, memory = inputs(E, E, lengths=(N, 7), batch_first=True)
    expected = dense(x, memory, tgt_mask=future(), tgt_is_causal=True)
    assert_close(layer(x, memory, tgt_mask=future(), tgt_is_causal=True), expected, **TOLERANCE)


def test_autocast_is_as_exact_as_torchs():
    ours, torchs = pair()
    (x,) = inputs(E, lengths=(N,))
    exact = torchs(x, x, x)[0]
    ours, torchs, x = ours.float(), torchs.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = ours(x, x, x)[0], torchs(x, x, x)[0]
    assert got.dtype == expected.dtype == torch.bfloat16
    assert (got - exact).norm() <= 2 * (expected - exact).norm()


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles(remake):
    module, x = replacement((4, 4)[:1]), torch.randn(B, N, E, dtype=torch.float64)
    expected, _ = module(x, x, x)
    assert_close(remake(module)(x, x, x)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("converted", [False, True])
def test_dropout_is_of_the_weights(converted):
    """Softmax, dropout, values, for the pairs that the call draws; none in inference."""
    ours, torchs = pair((N,), dropout=0.4, batch_first=True)
    if converted:
        fd.convert(torchs, fd.masks.every())
    module, (x, *_) = torchs if converted else ours, inputs(E, E, E, batch_first=True)
    assert_same_function(ours.eval(), torchs.eval(), [x] * 3)
    torch.manual_seed(1)
    found, _ = module.train()(x, x, x)
    torch.manual_seed(1)
    b, h, tokens = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None], torch.arange(N)
    kept = Dropout.drawn(0.4, x.device).kept(0, b, h, tokens[:, None], tokens)
    q, k, v = ours.heads_of(x, x, x)
    weights = (q @ k.mT / (E // H) ** 0.5).softmax(-1) * kept / 0.6
    assert_close(found, ours.out_proj((weights @ v).transpose(1, 2).flatten(2)), **TOLERANCE)


def test_repr_names_sizes_pattern_and_engine():
    text = repr(fd.MultiheadDilatedAttention(E, H, (4, 8), (2, 4), kdim=7, engine="reference"))
    assert all(part in text for part in ("embed_dim=12", "kdim=7", "longnet((4, 8), (2, 4))", "engine='reference'"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": "0"}, TypeError, "dropout must be a real number"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1"),
        ({"kdim": 0}, ValueError, "kdim must be at least 1"),
        ({"batch_first": None}, TypeError, "batch_first must be True or False"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"bias": 1}, TypeError, "bias must be True or False"),
        ({"engine": "dense"}, ValueError, "got engine='dense'"),
        (
            {"heads": "grouped", "segment_lengths": (4, 4, 4), "dilation_rates": (1, 1, 1)},
            ValueError,
            "at least the number of head groups, 3; got num_heads=2",
        ),
    ],
)
def test_bad_arguments(options, error, message):
    arguments = {"embed_dim": E, "num_heads": H, "segment_lengths": (4,), "dilation_rates": (1,)}
    with pytest.raises(error, match=message):
        fd.MultiheadDilatedAttention(**{**arguments, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key_padding_mask": torch.ones(B, N)}, ValueError, "must hold 0 or -inf; got 1.0"),
        ({"key_padding_mask": [True]}, TypeError, "must hold booleans, .*; got list"),
        ({"is_causal": None}, TypeError, "is_causal must be True or False"),
    ],
)
def test_unavailable_calls(options, error, message):
    module, x = fd.MultiheadDilatedAttention(E, H, (4,), (1,)), torch.randn(N, B, E)
    with pytest.raises(error, match=message):
        module(x, x, x, **options)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (
            torch.zeros(N, B, E + 1),
            None,
            ValueError,
            r"key must have shape \(tokens, 12\), .* got \(11, 3, 13\)",
        ),
        (torch.zeros(1, N, B, E), None, ValueError, "key must have shape"),
        (
            torch.zeros(N, B, E),
            torch.zeros(N + 1, B, E),
            ValueError,
            "key and value must agree in tokens and batch",
        ),
        (torch.zeros(N, B, E, dtype=torch.float64), None, ValueError, "key must have the module's dtype"),
        (torch.zeros(N, B, E, device="meta"), None, ValueError, "key must be on the module's device"),
        (None, None, TypeError, "key must be a tensor; got NoneType"),
    ],
)
def test_bad_inputs(key, value, error, message):
    module = fd.MultiheadDilatedAttention(E, H, (4,), (1,))
    with pytest.raises(error, match=message):
        module(torch.zeros(N, B, E), key, key if value is None else value)
