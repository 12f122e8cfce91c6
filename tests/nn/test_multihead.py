"""MultiheadDilatedAttention against `nn.MultiheadAttention`: parameters, values, torch's layers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Dropout
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.strategies import Case, expressions, whole_cases

# float64 against float64: only the order of sums differs.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
E, H, B, N = 12, 2, 3, 11


def pair(segments=(64,), rates=(1,), *, causal=False, pattern=None, **options):
    """Ours and torch's, equal in all parameters."""
    branches = () if pattern is not None else (segments, rates)
    options["dtype"] = torch.float64
    ours = fd.MultiheadDilatedAttention(E, H, *branches, causal=causal, pattern=pattern, **options)
    torchs = nn.MultiheadAttention(E, H, **options)
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
    assert_close(got, want, **TOLERANCE)


def future():
    return torch.ones(N, N, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [B, None])
@settings(max_examples=12)
@given(data=st.data())
def test_it_is_torchs_attention(batch, batch_first, data) -> None:
    """With one branch over all tokens: any widths, self and cross attention, with and without bias and causal order.

    Padding in booleans and floats, at either end and in the middle. Other patterns are in the test below.
    """
    causal, bias, padding = data.draw(st.booleans()), data.draw(st.booleans()), None
    widths = data.draw(st.sampled_from([{}, {}, {"kdim": 7}, {"vdim": 5}, {"kdim": 7, "vdim": 5}]))
    ours, torchs = pair(causal=causal, batch_first=batch_first, bias=bias, **widths)
    M = data.draw(st.sampled_from([N, 7]))
    how = {"batch": batch, "batch_first": batch_first, "lengths": (N, M, M)}
    tensors = inputs(E, widths.get("kdim", E), widths.get("vdim", E), **how)
    if not widths and N == M and data.draw(st.booleans()):
        tensors = tensors[:1] * 3
    mask = torch.ones(N, M, dtype=torch.bool).triu(1) if causal else None
    if not causal and data.draw(st.booleans()):
        padding = torch.rand(B, M, generator=torch.Generator().manual_seed(3)) < 0.4
        padding[:, 1], padding[0, :1], padding[1, -2:] = False, True, True
        padding = padding if batch else padding[0]
        if data.draw(st.booleans()):
            padding = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -torch.inf)
    assert_same_function(ours, torchs, tensors, mask=mask, is_causal=causal, padding=padding)


@given(whole_cases(patterns=expressions), st.booleans(), st.booleans())
def test_it_is_the_dense_one(case: Case, causal: bool, padded: bool) -> None:
    """For any pattern or mixture, causal=True or False, and any padding mask; rows without keys get 0."""
    heads, tokens = case.num_heads, case.num_queries
    torch.manual_seed(0)
    options = {"pattern": case.twin.pattern, "causal": causal, "dtype": torch.float64}
    module = fd.MultiheadDilatedAttention(2 * heads, heads, batch_first=True, **options)
    assert module.pattern == (case.twin.pattern & masks.causal() if causal else case.twin.pattern)
    counts = case.counts().expand(2, -1, -1, -1)
    if causal:
        counts = counts * oracle.counts(oracle.causal(), range(heads), heads, *[torch.arange(tokens)] * 2)
    padding = torch.rand(2, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.3 if padded else None
    if padding is not None:
        counts = counts * ~padding[:, None, None]
    x = torch.randn(2, tokens, 2 * heads, dtype=torch.float64)
    out, _ = module(x, x, x, key_padding_mask=padding, is_causal=causal)
    q, k, v = module.heads_of(x, x, x)
    assert_close(out, module.output_of(oracle.attention(q, k, v, counts)[0], 3), **TIGHT)


def test_many_sequences_of_few_tokens_are_likely_to_be_swapped() -> None:
    """It warns: they may be meant."""
    x = torch.randn(2, 300, 16)
    with pytest.warns(UserWarning, match=r"query has 2 tokens in each of 300 batch entries.* need batch_first=True"):
        fd.MultiheadDilatedAttention(16, 4, [8], [1])(x, x, x)
    fd.MultiheadDilatedAttention(16, 4, [8], [1], batch_first=True)(x, x, x)
    few = x[:, :64]
    fd.MultiheadDilatedAttention(16, 4, [8], [1])(few, few, few)


def test_a_compiled_causal_module_takes_torchs_causal_mask() -> None:
    ours, torchs = pair(causal=True)
    square, x = nn.Transformer.generate_square_subsequent_mask(N), inputs(E, E, E)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    expected, _ = torchs(*x, need_weights=False, attn_mask=square.double(), is_causal=True)
    assert_close(compiled(*x, attn_mask=square, is_causal=True)[0], expected, **TOLERANCE)
    with pytest.raises(RuntimeError, match="exactly torch's causal mask"):
        compiled(*x, attn_mask=-square, is_causal=True)


@given(
    sizes=st.tuples(st.integers(1, N), st.integers(1, N)),
    place=st.one_of(st.none(), st.tuples(st.integers(0, N - 1), st.integers(0, N - 1))),
    kind=st.sampled_from(["booleans", "floats", "bias"]),
    diagonal=st.integers(1 - N, N),
    called=st.booleans(),
)
def test_another_mask_is_refused(sizes, place, kind, diagonal, called) -> None:
    """torch's begins at the first token, whichever side is longer: off by a diagonal, or by one pair, it is another."""
    ours, torchs = pair(causal=True)
    x = inputs(E, E, E, lengths=(sizes[0], sizes[1], sizes[1]))
    for begins in (diagonal, 1 + sizes[1] - sizes[0], 1):
        hidden = torch.ones(sizes, dtype=torch.bool).triu(begins)
        if place is not None and place[0] < sizes[0] and place[1] < sizes[1]:
            hidden[place] ^= True
        mask = torch.zeros(sizes).masked_fill(hidden, -torch.inf) if kind != "booleans" else hidden
        if kind == "bias":
            mask[-1, 0] = 0.5
        if kind != "bias" and torch.equal(hidden, torch.ones_like(hidden).triu(1)):
            expected, _ = torchs(*x, need_weights=False, attn_mask=hidden)
            assert_close(ours(*x, attn_mask=mask, is_causal=called)[0], expected, **TOLERANCE)
        else:
            with pytest.raises(ValueError, match=r"exactly torch's causal mask.*`pattern & other`"):
                ours(*x, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}, {"kdim": 7, "bias": False}])
def test_equal_seeds_give_equal_parameters_both_ways(options) -> None:
    torch.manual_seed(3)
    ours = fd.MultiheadDilatedAttention(E, H, (4,), (1,), **options)
    torch.manual_seed(3)
    torchs = nn.MultiheadAttention(E, H, **options)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()), rtol=0, atol=0)
    torchs.load_state_dict({name: value + 1 for name, value in ours.state_dict().items()})
    ours.load_state_dict(torchs.state_dict())
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()), rtol=0, atol=0)


def replacement(segments=(3,), **options):
    options = {"batch_first": True, "dtype": torch.float64, **options}
    return fd.MultiheadDilatedAttention(E, H, segments, (1,), **options)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_layers_call_it_in_every_mode(norm_first):
    """An encoder and a decoder, self- and cross-attention, with padding and causal masks: all pairs are torch's own."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    dense = nn.Transformer(E, H, 1, 1, 16, **options)
    model = copy.deepcopy(dense)
    model.encoder.use_nested_tensor = False
    for path in ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"):
        own = replacement((64,), causal=path.startswith("decoder.layers.0.self"))
        own.load_state_dict(dense.get_submodule(path).state_dict())
        model.set_submodule(path, own)
    tensors = inputs(E, E, lengths=(7, N), batch_first=True)
    padding = torch.zeros(B, 7, dtype=torch.bool)
    padding[0, -2:], padding[1, -5:] = True, True
    how = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": future()}
    expected = dense(*tensors, **how)  # the ordinary path; no dropout
    for training, gradients, named in ((False, False, True), (False, True, False), (True, False, True)):
        with torch.set_grad_enabled(gradients):
            found = model.train(training)(*tensors, **how, **({"tgt_is_causal": True} if named else {}))
        assert_close(found, expected, **TOLERANCE)
    narrow = replacement((3,))
    narrow.load_state_dict(dense.encoder.layers[0].self_attn.state_dict())
    model.encoder.layers[0].self_attn = narrow
    with torch.no_grad():
        assert (model.eval()(*tensors, **how) - expected).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_an_encoder_built_around_dense_attention_raises():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True).double(), 1).eval()
    encoder.layers[0].self_attn = replacement()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, -2:] = True
    with torch.no_grad(), pytest.raises(ValueError, match=r"got a nested one.*use_nested_tensor = False"):
        encoder(torch.randn(B, N, E, dtype=torch.float64), src_key_padding_mask=padding)
    encoder.use_nested_tensor = False
    with torch.no_grad():
        assert encoder(torch.randn(B, N, E, dtype=torch.float64), src_key_padding_mask=padding).isfinite().all()


def test_autocast_is_as_exact_as_torchs():
    ours, torchs = pair()
    (x,) = inputs(E, lengths=(N,))
    exact = torchs(x, x, x)[0]
    ours, torchs, x = ours.float(), torchs.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = ours(x, x, x)[0], torchs(x, x, x)[0]
    assert got.dtype == expected.dtype == torch.bfloat16
    assert (got - exact).norm() <= 2 * (expected - exact).norm()


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
