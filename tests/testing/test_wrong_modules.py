"""check_attention_module: each wrong module fails the check that is about its mistake, in the shortest case."""

import multiprocessing

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import Calls, check_attention_module, examine_attention_module
from tests.support import oracle, ranks, wrong_attention
from tests.support.wrong_attention import WithoutGradients, over_ranks, raises_on_a_rank, without_ranks

WINDOW = masks.local_window(left=2, right=0), [oracle.local_window(2, 0)]
SPARSE = masks.longnet([4, 8], [1, 3]), [oracle.dilated(4, 1, "interleaved"), oracle.dilated(8, 3, "interleaved")]
SEGMENTS = masks.chunked(5), [oracle.dilated(5, 1, 0)]
GAPS = masks.dilated(6, 2), [oracle.dilated(6, 2, 0)]
CAUSAL = masks.causal(), [oracle.causal()]
FORGOTTEN = masks.causal(), [oracle.every()]

# Class, what it claims to be, the checks that must fail among others, those that must pass, and words of a report.
WRONG = {
    "softmax over heads": ("SoftmaxOverHeads", WINDOW, {"agreement", "coverage"}, {"lengths"}, "add up to"),
    "causal leak": ("CausalLeak", WINDOW, {"agreement", "causality", "coverage"}, {"determinism"}, "is not allowed"),
    "divided by all": ("DividedByAll", WINDOW, {"agreement", "causality"}, {"determinism"}, "is hidden from query"),
    "zero padding": ("ZeroPadding", SEGMENTS, {"agreement"}, {"isolation"}, "out is wrong"),
    "detached merge": ("DetachedMerge", SPARSE, {"gradients", "half precision"}, set(), "dq is wrong"),
    "causal forgotten": ("Dense", FORGOTTEN, {"causality"}, {"lengths"}, "is hidden from query"),
    "other shards": ("OtherShards", CAUSAL, {"coverage"}, {"causality"}, "is allowed and takes no part"),
    "NaN on empty rows": ("NaNOnEmptyRows", GAPS, {"empty rows"}, {"agreement", "coverage"}, "must be 0; got nan"),
    "stale mask": ("StaleMask", SEGMENTS, {"lengths"}, set(), "a used module gives"),
    "mixed batch": ("MixedBatch", WINDOW, {"batch"}, {"determinism"}, "differs from the same entry alone"),
    "in place": ("InPlace", WINDOW, {"determinism"}, {"gradients"}, "the call changes q"),
    "wide half": ("WideHalf", WINDOW, {"half precision"}, set(), "must have the dtype of q"),
    "growing state": ("GrowingState", WINDOW, {"state dict"}, {"agreement"}, "names in state_dict: mask"),
}
# Mistakes that the checks above alone can see: all others must pass, apart from those named here.
ALONE = {
    **{"detached merge": set(), "stale mask": set(), "wide half": set()},
    "NaN on empty rows": {"gradients", "half precision"},
}
SMALL = {"max_tokens": 14, "examples": 4, "skip": ("compile", "recompilation", "ranks")}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_fails_its_check(mistake) -> None:
    name, (pattern, rules), failing, passing, words = WRONG[mistake]
    kind = getattr(wrong_attention, name)
    checks = None if mistake in ALONE else [*failing, *passing]
    report = examine_attention_module(lambda: kind(*rules), pattern, **SMALL, checks=checks)
    failed = {result.name for result in report.failures}
    assert failed >= failing, str(report)
    assert failed - ALONE.get(mistake, failed) <= failing, str(report)
    assert all(report[check].verdict == "passed" for check in passing), str(report)
    assert words in str(report)


@pytest.mark.parametrize(("claim", "heads"), [(WINDOW, {"num_kv_heads": 2}), (SPARSE, {}), (SEGMENTS, {}), (GAPS, {})])
def test_dense_attention_without_a_mistake_passes(claim, heads) -> None:
    pattern, rules = claim
    assert check_attention_module(lambda: wrong_attention.Dense(*rules), pattern, **SMALL, **heads).passed


def test_sums_in_half_precision_fail() -> None:
    """Right in float32."""
    module, checks = wrong_attention.HalfDenominators(*CAUSAL[1]), ["agreement", "half precision"]
    report = examine_attention_module(lambda: module, CAUSAL[0], checks=checks, lengths=[150])
    assert [result.name for result in report.failures] == ["half precision"], str(report)


def no_mask(module, q, k, v, hidden):
    return module(q, k, v)


def no_offset(module, q, k, v):
    steps = range(q.shape[2])
    return torch.cat([module(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in steps], 2)


def left_padding_forgotten(module, q, k, v, hidden):
    tail = hidden.clone()
    tail[:, : hidden.shape[1] // 2] = False
    return module(q, k, v, key_padding_mask=tail)


@pytest.mark.parametrize(
    ("check", "call"),
    [
        ("padding", {"padded": no_mask}),
        ("padding", {"padded": left_padding_forgotten}),
        ("packing", {"packed": no_mask}),
        ("decoding", {"decoded": no_offset}),
    ],
)
def test_a_wrong_call_fails_its_check(check, call) -> None:
    options = {"calls": Calls(**call), "max_tokens": 12, "checks": [check, "agreement"]}
    report = examine_attention_module(lambda: fd.BlockSparseAttention(WINDOW[0]), WINDOW[0], **options)
    assert [result.name for result in report.failures] == [check]
    assert report[check].detail[:8] in ("2 tokens", "3 tokens")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing", "words"),
    [
        ("BreaksGraphs", {"compile", "recompilation"}, "torch.compile(fullgraph=True): raises"),
        ("GraphEachLength", {"recompilation"}, "graphs for"),
    ],
)
def test_mistakes_under_compile(name, failing, words) -> None:
    options = {"max_tokens": 10, "checks": ["compile", "recompilation", "agreement"]}
    report = examine_attention_module(lambda: getattr(wrong_attention, name)(*CAUSAL[1]), CAUSAL[0], **options)
    failed = {result.name: result.detail for result in report.failures}
    assert failing <= set(failed) <= {"compile", "recompilation"}
    assert all(words in failed[check] for check in failing)


def found_over_ranks(made, monkeypatch: pytest.MonkeyPatch) -> str:
    """By processes forked from one that has imported torch, as those of other tests are."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: ranks.context)
    options = {"num_kv_heads": 2, "lengths": [30], "calls": Calls(over_ranks=made), "checks": ["ranks"]}
    factory = lambda: fd.BlockSparseAttention(WINDOW[0], enable_gqa=True)  # noqa: E731
    return examine_attention_module(factory, WINDOW[0], **options)["ranks"].detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (over_ranks, "30 tokens: 2 ranks that equal one"),
        (without_ranks, "30 tokens on 2 ranks: out is wrong"),
        (WithoutGradients, "30 tokens on 2 ranks: dk is wrong"),
        (raises_on_a_rank, "30 tokens on 2 ranks: rank 1 of 2 raises ZeroDivisionError: by this rank\nand no other"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_over_ranks(made, found, monkeypatch) -> None:
    """Right; without the other rank's keys, without its gradients; one raises while the other waits."""
    assert found_over_ranks(made, monkeypatch).startswith(found)


def test_a_module_over_ranks_that_cannot_be_sent(monkeypatch) -> None:
    said = found_over_ranks(lambda mesh: mesh, monkeypatch)
    assert "over_ranks and plain are pickled, so define them at the top level of a file: " in said
