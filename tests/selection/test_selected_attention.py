"""SelectedAttention: what it computes and its gradients, in float64 from the definition; and what it promises."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexdilated as fd
from flexdilated import masks
from tests.selection.cases import Case, assert_selects, cases
from tests.support import selection_oracle as oracle
from tests.support.oracle import attention

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, T tables, R rows, C blocks of keys


class Gate(nn.Module):
    """Scores by a bilinear form, of each pool one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dim, dim, dtype=torch.float64))

    def forward(self, queries, pools):
        heads = queries.shape[1] // pools.mean.shape[1]
        pooled = (queries @ w @ pool.repeat_interleave(heads, 1).mT for w, pool in zip(self.weight, pools, strict=True))
        return sum(pooled)


def table_of(case: Case, blocks: Tensor, *, always: bool = True) -> Tensor:
    """(B, H, N, M) booleans: what is read of a choice; without `always` what is read because it was chosen."""
    own = case.selector
    chosen = masks.selected_blocks("chosen", block=(own.query_block, own.block), most=own.choose.most)
    kept = masks.every() & ~masks.every() if own.always is None else own.always
    read = ((chosen | kept) if always else (chosen & ~kept)) & own.within
    return replace(case, bindings=case.bindings | {"chosen": blocks}).table(read)


def scores_of(case: Case, q: Tensor, k: Tensor, gate: nn.Module | None) -> Tensor:
    """(B, H, N, C): the score of each block for the row of each query, by the mean of its keys or by the gate."""
    own, within = case.selector, case.table(case.selector.within)
    rows = oracle.rows_of(q.shape[2], case.q_offset, own.query_block)
    blocks = oracle.blocks_of(k.shape[2], own.block)
    heads = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(heads, 1)
    found = []
    for row in rows:
        seen = within[:, :, row[0]].double()  # (B, H, M)
        looks = q[:, :, row[0]].masked_fill(seen.sum(-1, keepdim=True) == 0, 0.0)
        each = []
        for block in blocks:
            few, shown = keys[:, :, block], seen[:, :, block]
            if gate is None:
                mean = (few * shown[..., None]).sum(2) / shown.sum(2).clamp(min=1)[..., None]
                each.append((looks * mean).sum(-1) * q.shape[-1] ** -0.5)
            else:
                pools = (few.mean(2), few.amin(2), few.amax(2))
                each.append(sum(((looks @ w) * pool).sum(-1) for w, pool in zip(gate.weight, pools, strict=True)))
        found += [torch.stack(each, -1)] * len(row)
    scores = torch.stack(found, 2)
    tables = {"head": q.shape[1], "group": k.shape[1], "all": 1}[own.share]
    shared = scores.unflatten(1, (tables, -1))
    return shared.sum(2).repeat_interleave(q.shape[1] // tables, 1)


@st.composite
def trained(draw: st.DrawFn, gated: bool = False, **options: Any) -> Case:
    """Calls whose choice could be trained: one query a row, or several that look with the first."""
    case = draw(cases(scorers=("mean",), **options))
    made = case.options | {"query_summary": "first", "future_in_choice": False}
    made["choose"] = fd.TopK(min(made["choose"].most, 4))  # a place of the table is a call
    if gated:
        made |= {"scorer": Gate(case.q.shape[-1]), "within": masks.causal(), "share": "head"}
        # Of a gate's pools every key counts, so all of them are to be seen: by the last query.
        tokens = case.q_offset + case.q.shape[2]
        k = torch.randn(*case.k.shape[:2], tokens, case.k.shape[3], dtype=torch.float64)
        case = replace(case, k=k, bindings={})
    return replace(case, options=made)


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)


@settings(max_examples=30)
@given(cases())
def test_it_attends_to_what_the_definition_chooses(case: Case) -> None:
    """Choice, scores, density and cut are the definition's; output and gradients those of dense attention.

    That is over (chosen | always) & within.
    """
    case.selector._sees_ahead = False  # which is all that forbids gradients
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.k.roll(1, 2)))
    options = {"enable_gqa": True, "q_offset": case.q_offset, "bindings": case.bindings}
    out, found = fd.SelectedAttention(case.selector)(q, k, v, return_selection=True, **options)
    assert not found.scores.requires_grad
    asked = case.asked()
    assert_selects(found, oracle.select(case.q, case.k, asked), asked.most)
    read = table_of(case, found.blocks)
    expected = attention(q, k, v, read.long())[0]
    assert_close(out, expected)
    assert_close(gradients(out, q, k, v), gradients(expected, q, k, v))


@pytest.mark.parametrize("gated", [False, True], ids=["mean", "gate"])
@settings(max_examples=9)
@given(data=st.data())
def test_a_bias_is_added_to_the_logits_of_what_was_chosen(gated: bool, data) -> None:
    """The formula of the docstring as a dense softmax; gradients reach q, k, v and the gate."""
    case = data.draw(trained(gated))
    gate = case.options["scorer"] if gated else None
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.k.roll(1, 2)))
    leaves = (q, k, v, *(() if gate is None else gate.parameters()))
    options = {"enable_gqa": True, "q_offset": case.q_offset, "bindings": case.bindings}
    out, found = fd.SelectedAttention(case.selector, "bias")(q, k, v, return_selection=True, **options)
    bias = scores_of(case, q, k, gate).repeat_interleave(case.selector.block, -1)[..., : k.shape[2]]
    bias = bias.masked_fill(~table_of(case, found.blocks, always=False), 0.0)
    read = table_of(case, found.blocks).long()
    expected = attention(q, k, v, read, modify=lambda scores: scores + bias)[0]
    assert_close(out, expected)
    assert_close(gradients(out, *leaves), gradients(expected, *leaves))


@settings(max_examples=15)
@given(
    trained(gated=True), st.sampled_from(["top_k", "top_p"]), st.sampled_from(["head", "group", "all"]), st.booleans()
)
def test_distillation_is_the_kl_to_the_block_mass(case: Case, kind: str, share: str, taught: bool) -> None:
    """By sums over dense weights, of a teacher's q and k too; a gradient reaches the gate alone."""
    alone = case
    case = replace(
        case, options=case.options | {"share": share} | ({"choose": fd.TopP(0.5, most=2)} if kind == "top_p" else {})
    )
    gate, own, B, H = case.options["scorer"], case.selector, *case.q.shape[:2]
    q, k = (x.clone().requires_grad_() for x in (case.q, case.k))
    given_teacher = {"teacher": (q.flip(-1) + 1, k.flip(-1))} if taught else {}
    options = {"enable_gqa": True, "q_offset": case.q_offset, **given_teacher}
    loss = fd.SelectedAttention(own, "distill").distill_loss(q, k, **options)
    scores, within = scores_of(alone, case.q, case.k, gate), case.table(own.within)
    kept = torch.zeros_like(within) if own.always is None else case.table(own.always)
    q, k = (x.detach() for x in given_teacher.get("teacher", (q, k)))
    logits = q @ k.repeat_interleave(H // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~within, -torch.inf).softmax(-1)
    tables, terms = {"head": H, "group": k.shape[1], "all": 1}[share], []
    for row in oracle.rows_of(q.shape[2], case.q_offset, own.query_block):
        blocks, i = oracle.blocks_of(k.shape[2], own.block), row[0]
        for b in range(B):
            for heads in torch.arange(H).chunk(tables):
                able = [
                    j
                    for j, block in enumerate(blocks)
                    if within[b, heads[0], i, block].all() and not kept[b, heads[0], i, block].all()
                ]
                if able:
                    open_pairs = (within & ~kept)[b, heads[0], i]
                    mass = torch.stack([weights[b, heads, i][:, keys].sum(-1) for keys in blocks], -1)
                    seen = [j for j, keys in enumerate(blocks) if open_pairs[keys].any()]
                    p = (mass / mass[:, seen].sum(-1, keepdim=True)).mean(0)[able]
                    p = p / p.sum()
                    s = scores[b, heads, i][:, able].softmax(-1).mean(0).log()
                    terms.append((p * (p.log() - s)).sum())
    expected = torch.stack(terms).mean() if terms else scores.sum() * 0
    assert_close(loss, expected)
    assert_close(gradients(loss, *gate.parameters()), gradients(expected, *gate.parameters()))


@pytest.mark.parametrize("gradient", ["none", "bias"])
@settings(max_examples=15)
@given(data=st.data())
def test_later_tokens_and_hidden_keys_touch_nothing(gradient: str, data) -> None:
    """Choices and outputs before a changed token stay to the last bit; what `within` hides from all may hold NaN.

    Where no later key is allowed: of rows that begin before the token.
    """
    case = data.draw(trained() if gradient == "bias" else cases(scorers=("mean", "minmax", "mass")))
    within, (N, M) = case.options["within"], (case.q.shape[2], case.k.shape[2])
    positions = case.q_offset + torch.arange(N)
    if (case.table(within) & (torch.arange(M) > positions[:, None])).any():
        within = within & masks.causal()
    options = case.options | {"within": within, "query_summary": "first", "future_in_choice": False}
    case = replace(case, options=options)
    attention = fd.SelectedAttention(case.selector, gradient)
    options = {"enable_gqa": True, "q_offset": case.q_offset, "bindings": case.bindings, "return_selection": True}
    t = data.draw(st.integers(0, case.q_offset + N), label="t")
    before, now = attention(case.q, case.k, case.k, **options), max(0, t - case.q_offset)
    q, k, v = case.q.clone(), case.k.clone(), case.k.clone()
    q[:, :, now:] += 1
    k[:, :, t:] -= 3
    v[:, :, t:] += 5
    after = attention(q, k, v, **options)
    assert after[0][:, :, :now].equal(before[0][:, :, :now])
    rows = [row for row in oracle.rows_of(N, case.q_offset, case.selector.query_block) if row[0] < now]
    for one, other in zip(after[1][:2], before[1][:2], strict=True):
        assert one[:, :, : len(rows)].equal(other[:, :, : len(rows)])
    hidden = ~case.table(case.selector.within).any(2).unflatten(1, (case.k.shape[1], -1)).any(2)
    k = case.k.masked_fill(hidden[..., None], float("nan"))
    assert attention(case.q, k, k, **options)[0].equal(before[0])


def test_a_call_may_narrow_what_is_seen() -> None:
    """within= of a call is as within= of the selector, for the coarse choice too; sinks are those of attend."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 60, 8, dtype=torch.float64)
    shown = masks.visible_keys(torch.arange(60) % 7 > 0)
    made = {"block": 4, "choose": fd.TopK(2), "always": masks.chunked(4)}
    coarse = {"block": 8, "choose": fd.TopK(2)}
    one = fd.BlockSelector(**made, coarse=fd.BlockSelector(**coarse))
    within = masks.causal() & shown
    other = fd.BlockSelector(**made, within=within, coarse=fd.BlockSelector(**coarse, within=within))
    sinks = torch.randn(2, dtype=torch.float64)
    for gradient in ("none", "bias"):
        found, expected = (
            fd.SelectedAttention(selector, gradient)(q, k, v, sinks=sinks, return_selection=True, **options)
            for selector, options in ((one, {"within": shown}), (other, {}))
        )
        assert found[0].equal(expected[0])
        assert found[1].blocks.equal(expected[1].blocks)
    read = (masks.selected_blocks("chosen", block=(1, 4), most=2) | masks.chunked(4)) & within
    plain = fd.SelectedAttention(other)(q, k, v, sinks=sinks)
    chosen = {"chosen": expected[1].blocks}
    assert_close(plain, fd.attend(q, k, v, read, sinks=sinks, bindings=chosen))


@pytest.mark.parametrize("gradient", ["none", "bias"])
@pytest.mark.parametrize("kept", [False, True], ids=["chosen again", "choice kept"])
def test_checkpointing_uses_the_choice_of_the_forward(gradient: str, kept: bool, monkeypatch) -> None:
    """Gradients are those without it; by a policy the first choice is kept, and none is made in the backward."""
    torch.manual_seed(0)
    attention = fd.SelectedAttention(fd.BlockSelector(block=8, choose=fd.TopK(2), always=masks.chunked(8)), gradient)
    q, k, v = torch.randn(3, 1, 2, 70, 8, dtype=torch.float64).requires_grad_().unbind()
    expected = gradients(attention(q, k, v), q, k, v)
    from flexdilated.selection import _select_op

    calls, made = [], _select_op.choose_blocks
    monkeypatch.setattr(_select_op, "choose_blocks", lambda *given: calls.append(1) or made(*given))
    options = {}
    if kept:

        def policy(ctx, op, *args, **kwargs):
            saved = op is torch.ops.flexdilated.select_blocks.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    found = gradients(checkpoint(attention, q, k, v, use_reentrant=False, **options), q, k, v)
    assert len(calls) == (1 if kept else 2)
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    """In one graph, with all gradients: of attention with a bias, and of what teaches its gate."""
    torch.compiler.reset()
    torch.manual_seed(0)
    selector = fd.BlockSelector(block=8, scorer=Gate(8), choose=fd.TopK(1), always=masks.chunked(8))
    biased, taught = fd.SelectedAttention(selector, "bias"), fd.SelectedAttention(selector, "distill")

    def run(q, k, v):
        out, found = biased(q, k, v, return_selection=True)
        return out, found.blocks, out.sin().sum() + taught.distill_loss(q, k)

    leaves = [torch.randn(1, 2, 60, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        *found, loss = function(*leaves)
        wanted = (*leaves, *selector.parameters())
        results.append((*found, loss, *torch.autograd.grad(loss, wanted, materialize_grads=True)))
    assert_close(*results)
    torch.compiler.reset()
