"""LightningIndexer held to dense statements of its score, choice and loss, and to the indexer of transformers."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.memory import LiveBytes
from flexdilated.selection import _index_op, recipes

# B batch, h index heads, H query heads, G key/value heads, N queries, M keys

SIZES = {"query_dim": 5, "num_heads": 3, "head_dim": 6, "rope_dim": 4}


def indexer_of(dtype: torch.dtype = torch.float64, **options: object) -> recipes.LightningIndexer:
    torch.manual_seed(0)
    return recipes.LightningIndexer(7, **{**SIZES, "top": 3, **options}).to(dtype)


def tokens(seed: int, B: int, N: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, queries = (torch.randn(B, N, size, generator=generator, dtype=dtype) for size in (7, 5))
    return x, queries


def dense_scores(indexer: recipes.LightningIndexer, x: Tensor, queries: Tensor) -> Tensor:
    """(B, N, N), the index score of all pairs, as the paper states it; rotations as complex numbers."""
    heads, dim, half = indexer.num_heads, indexer.head_dim, indexer.rope_dim // 2

    def rotated(y: Tensor) -> Tensor:
        turned = torch.complex(y[..., :half], y[..., half : 2 * half])
        rates = indexer.base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(y.shape[-2])[:, None] * rates
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, y[..., 2 * half :]], -1)

    q = rotated((queries @ indexer.wq_b.weight.mT).unflatten(-1, (heads, dim)).transpose(1, 2))
    key = x @ indexer.wk.weight.mT
    key = key - key.mean(-1, keepdim=True)
    key = key / (key.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k = rotated(key * indexer.k_norm.weight + indexer.k_norm.bias)
    w = x @ indexer.weights_proj.weight.mT
    return torch.einsum("bnh,bhnm->bnm", w, (q @ k.mT.unsqueeze(1)).relu()) / (heads * dim) ** 0.5


def dense_loss(scores: Tensor, seen: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Mean of KL(p ‖ softmax of the scores) over the queries with keys; both over the pairs in `seen` (B, N, N)."""
    logits = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    p = logits.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
    kept = seen.any(-1)
    logs = scores.masked_fill(~seen, -torch.inf)[kept].log_softmax(-1)
    lacks = torch.special.xlogy(p[kept], p[kept]) - p[kept].where(seen[kept], 0.0) * logs.where(seen[kept], 0.0)
    return lacks.sum() / max(1, int(kept.sum()))


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, int, masks.Pattern, dict[str, Tensor] | None, Tensor]:
    """(B, N, pattern within, its run-time tensors, mask (B, N, N) of the pairs that it allows)."""
    B, N = draw(st.integers(1, 2)), draw(st.integers(0, 12))
    i, j, causal = torch.arange(N)[:, None], torch.arange(N), masks.causal()
    ids = torch.tensor(draw(st.lists(st.booleans(), min_size=B * N, max_size=B * N))).long().view(B, N).cumsum(1)
    within, seen = draw(
        st.sampled_from(
            [
                (causal, i >= j),
                (masks.local_window(left=2, right=0), (i - j).clamp(0, 2) == i - j),
                (masks.every(), i + j >= 0),
                (causal & ~masks.first_tokens(2), (i >= j) & (j >= 2)),  # the first queries see no key
                (causal & masks.documents("ids"), (i >= j) & (ids[:, :, None] == ids[:, None])),
            ]
        )
    )
    return B, N, within, {"ids": ids} if "ids" in repr(within) else None, seen.expand(B, N, N)


@given(calls(), st.integers(1, 5), st.sampled_from([1, 40, 1 << 20]), st.integers(0, 99))
def test_the_choice_is_the_best_of_dense_scores(call, top, numbers, seed) -> None:
    B, N, within, bindings, seen = call
    indexer, (x, queries) = indexer_of(top=top, within=within), tokens(seed, B, N)
    with patch.object(_index_op, "_ON_HOST", numbers):  # chunks of one query, of a few, of all
        chosen = indexer(x, queries, bindings=bindings)
    assert chosen.shape == (B, 1, N, top)
    scores = dense_scores(indexer, x, queries).masked_fill(~seen, -torch.inf)
    best = scores.topk(min(top, N)).values
    worth = torch.cat([scores, scores.new_full((B, N, 1), -torch.inf)], -1).gather(-1, chosen[:, 0] % (N + 1))
    assert_close(worth[..., : best.shape[-1]], best)  # equal scores, as of pairs that ReLU sets to 0, may be swapped
    assert (worth[..., best.shape[-1] :] == -torch.inf).all()
    counts = torch.zeros(B, N, N + 1).scatter_add(-1, chosen[:, 0] % (N + 1), torch.ones(B, N, top))[..., :N]
    assert (counts <= seen).all()


@given(
    calls(),
    st.booleans(),
    st.sampled_from([(2, 1), (4, 2), (1, 1)]),
    st.sampled_from([1, 200, 1 << 20]),
    st.integers(0, 99),
)
def test_the_loss_and_its_gradients_are_those_of_dense_scores(call, chooses, heads, numbers, seed) -> None:
    (B, N, within, bindings, seen), (H, G) = call, heads
    indexer, (x, queries) = indexer_of(within=within), tokens(seed, B, N)
    generator = torch.Generator().manual_seed(seed + 1)
    q, k = (torch.randn(B, n, N, 4, generator=generator, dtype=torch.float64) for n in (H, G))
    options = {"bindings": bindings}
    chosen = indexer(x, queries, **options) if chooses else None
    if chosen is not None:
        seen = torch.zeros(B, N, N + 1, dtype=torch.bool).scatter(-1, chosen[:, 0] % (N + 1), value=True)[..., :N]
    with patch.object(_index_op, "_ON_HOST", numbers):
        twice = None if chosen is None else torch.cat([chosen, chosen[..., :1]], -1)  # repeated keys count once
        loss = indexer.loss(x, q, k, queries, chosen=twice, scale=0.7, **options)
        got = torch.autograd.grad(loss, list(indexer.parameters()))
    expected = dense_loss(dense_scores(indexer, x, queries), seen, q, k, 0.7)
    assert_close(loss, expected)
    assert_close(got, torch.autograd.grad(expected, list(indexer.parameters())))


@pytest.mark.parametrize("chooses", [False, True])
def test_nan_in_what_no_query_sees_reaches_nothing(chooses) -> None:
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    allowed[4] = allowed[:, 4] = False
    indexer, (x, queries) = indexer_of(within=masks.mask(allowed)), tokens(0, 1, 9)
    q, k = torch.randn(2, 1, 2, 9, 4, dtype=torch.float64)
    at = (torch.arange(9) == 4)[:, None]

    def found(blind: float) -> list[Tensor]:
        with patch.object(indexer.wk, "forward", lambda y: (y @ indexer.wk.weight.mT).masked_fill(at, blind)):
            inputs = (each.masked_fill(at, blind) for each in (q, k))
            chosen = indexer(x, queries)
            loss = indexer.loss(x, *inputs, queries, chosen=chosen if chooses else None)
            return [chosen, loss, *torch.autograd.grad(loss, [indexer.wq_b.weight, indexer.weights_proj.weight])]

    assert_close(found(torch.nan), found(0.5))


@pytest.mark.parametrize("given_rotary", [False, True])
def test_it_chooses_as_the_indexer_of_transformers_with_its_weights(given_rotary) -> None:
    models = pytest.importorskip("transformers.models.deepseek_v32")
    sizes = {"hidden_size": 24, "index_n_heads": 8, "index_head_dim": 16, "qk_rope_head_dim": 8}
    config = models.DeepseekV32Config(**sizes, index_topk=6, q_lora_rank=12)
    torch.manual_seed(0)
    theirs = models.modeling_deepseek_v32.DeepseekV32Indexer(config, 0)
    ours = recipes.LightningIndexer(24, top=6, query_dim=12, num_heads=8, head_dim=16, rope_dim=8)
    ours.load_state_dict(theirs.state_dict())
    x, queries, N = torch.randn(2, 50, 24), torch.randn(2, 50, 12), 50
    angles = torch.arange(N)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    rotary = (torch.cat([angles, angles], -1)[None].cos(), torch.cat([angles, angles], -1)[None].sin())
    expected = theirs(x, queries, rotary, torch.ones(1, N, N, dtype=torch.bool).tril(), None).long()
    expected = expected.masked_fill(expected > torch.arange(N)[:, None], -1)
    got = ours(x, queries, rotary=rotary if given_rotary else None)
    assert got[:, 0].sort(-1).values.equal(expected.sort(-1).values)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=20)
def test_decoding_chooses_as_a_single_pass(chunks, seed) -> None:
    indexer, N = indexer_of(), sum(chunks)
    x, queries = tokens(seed, 2, N)
    whole, cache = indexer(x, queries), indexer.cache()
    parts = [
        indexer(some, of, cache=cache) for some, of in zip(x.split(chunks, 1), queries.split(chunks, 1), strict=True)
    ]
    assert torch.cat(parts, 2).equal(whole)
    cache.crop(N - 1)
    cache.select(torch.tensor([1]))
    assert indexer(x[1:, -1:], queries[1:, -1:], cache=cache).equal(whole[1:, :, -1:])


def test_no_tensor_has_all_pairs() -> None:
    N, indexer = 2000, recipes.LightningIndexer(8, top=4, num_heads=2, head_dim=4, rope_dim=2)
    x, q, k = torch.randn(1, N, 8), *torch.randn(2, 1, 2, N, 4)
    tensors = [each.detach() for each in indexer._index_tensors(x, None, None, 0)]
    how = {"scale": 1.0, "q_offset": 0, "bindings": None, "within": None}
    arguments = [], *indexer.selector.prepared(q[:, :1], k[:, :1], **how)[2].arguments
    with patch.object(_index_op, "_ON_HOST", 1 << 16), LiveBytes() as live:  # of the ops' own functions
        table = _index_op.index_keys._init_fn(*tensors, *arguments)
        for chosen in (None, table):
            _index_op.index_loss_backward._init_fn(torch.ones(()), *tensors, q, k, chosen, *arguments)
    assert 0 < live.peak < N * N  # a quarter of the bytes of all pairs


def test_choice_and_loss_are_one_graph_for_any_length() -> None:
    indexer = indexer_of(torch.float32, query_dim=None)

    def step(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        chosen = indexer(x)
        return chosen, indexer.loss(x, q, k, chosen=chosen)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=graphs, fullgraph=True)
    for N in (20, 13):
        given = torch.randn(1, N, 7), *torch.randn(2, 1, 2, N, 4).unbind()
        for x in given:
            torch._dynamo.mark_dynamic(x, x.dim() - 2)
        (chosen, loss), expected = compiled(*given), step(*given)
        assert_close((chosen, loss), expected)
        assert_close(*(torch.autograd.grad(each, list(indexer.parameters())) for each in (loss, expected[1])))
    assert graphs.frame_count == 1


def test_a_table_changed_before_the_backward_raises() -> None:
    indexer, (x, queries) = indexer_of(), tokens(0, 1, 9)
    q, k = torch.randn(2, 1, 2, 9, 4, dtype=torch.float64)
    chosen = indexer(x, queries)
    loss = indexer.loss(x, q, k, queries, chosen=chosen)
    chosen[..., 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
