"""check_attention_module: each wrong module fails the check that is about its mistake, in the shortest case."""

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import Calls, check_attention_module, examine_attention_module
from tests.support import oracle, wrong_attention

COMPILING = ("compile", "recompilation", "ranks")
WINDOW = masks.local_window(left=2, right=0), [oracle.local_window(2, 0)]
SPARSE = masks.longnet([4, 8], [1, 3]), [oracle.dilated(4, 1, "interleaved"), oracle.dilated(8, 3, "interleaved")]
SEGMENTS = masks.chunked(5), [oracle.dilated(5, 1, 0)]
GAPS = masks.dilated(6, 2), [oracle.dilated(6, 2, 0)]
CAUSAL = masks.causal(), [oracle.causal()]


# module, what it claims to be, the checks that must fail among others, those that must pass, and words of a report
WRONG = {
    "softmax over heads": ("SoftmaxOverHeads", WINDOW, {"agreement", "coverage"}, {"lengths"}, "runs over the heads"),
    "blocks apart": ("BlocksApart", CAUSAL, {"agreement", "coverage"}, {"causality"}, "add up to 2"),
    "causal leak": (
        "CausalLeak",
        WINDOW,
        {"agreement", "causality", "coverage"},
        {"determinism"},
        "position query +1 counts once more",
    ),
    "divided by all": ("DividedByAll", WINDOW, {"agreement", "causality"}, {"determinism"}, "is hidden from query"),
    "unwritten heads": (
        "UnwrittenHeads",
        WINDOW,
        {"agreement", "coverage"},
        {"causality"},
        "nothing is written: zeros",
    ),
    "zero padding": ("ZeroPadding", SEGMENTS, {"agreement"}, {"isolation"}, "keys more, of score 0 and value 0"),
    "detached merge": ("DetachedMerge", SPARSE, {"gradients"}, {"agreement", "coverage"}, "dq is wrong"),
    "summed merge": ("SummedMerge", SPARSE, {"agreement"}, {"isolation"}, "results are summed"),
    "causal forgotten": ("Dense", (CAUSAL[0], [oracle.every()]), {"causality"}, {"lengths"}, "is hidden from query"),
    "other shards": ("OtherShards", CAUSAL, {"coverage"}, {"causality"}, "is allowed and takes no part"),
    "averaged merge": ("AveragedMerge", SPARSE, {"agreement"}, {"isolation"}, "results are averaged"),
    "NaN on empty rows": ("NaNOnEmptyRows", GAPS, {"empty rows"}, {"agreement", "coverage"}, "must be 0; got nan"),
    "cycled heads": ("CycledHeads", WINDOW, {"agreement", "coverage"}, {"causality"}, "head h % G, not h // (H / G)"),
    "stale mask": ("StaleMask", SEGMENTS, {"lengths"}, {"agreement", "coverage"}, "something of the other length"),
    "mixed batch": ("MixedBatch", WINDOW, {"batch"}, {"determinism"}, "another one than alone"),
    "in place": ("InPlace", WINDOW, {"determinism"}, {"gradients"}, "the call changes q"),
    "noisy": ("Noisy", WINDOW, {"determinism"}, set(), "two calls with the same inputs"),
    "wide half": ("WideHalf", WINDOW, {"half precision"}, {"agreement"}, "must have the dtype of q"),
    "growing state": ("GrowingState", WINDOW, {"state dict"}, {"agreement"}, "names in state_dict: mask"),
    "frozen weight": ("FrozenWeight", WINDOW, {"state dict"}, {"agreement"}, "after load_state_dict"),
}


# Mistakes that one check alone can see.
ONE_CHECK = ("detached merge", "NaN on empty rows", "stale mask", "frozen weight", "wide half")
SMALL = {"max_tokens": 14, "examples": 4, "skip": COMPILING}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_fails_its_check(mistake) -> None:
    name, (pattern, rules), failing, passing, words = WRONG[mistake]
    kind = getattr(wrong_attention, name)
    heads = {"num_kv_heads": 2} if name == "CycledHeads" else {}
    checks = None if mistake in ONE_CHECK else [*failing, *passing]
    report = examine_attention_module(lambda: kind(*rules), pattern, **SMALL, **heads, checks=checks)
    failed = {result.name for result in report.failures}
    assert failed >= failing, str(report)
    assert all(report[check].verdict == "passed" for check in passing), str(report)
    assert words in str(report)
    if mistake in ONE_CHECK:
        assert failed - ({"gradients"} if mistake == "NaN on empty rows" else set()) == failing, str(report)


@pytest.mark.parametrize(("claim", "heads"), [(WINDOW, {"num_kv_heads": 2}), (SPARSE, {}), (SEGMENTS, {}), (GAPS, {})])
def test_dense_attention_without_a_mistake_passes(claim, heads) -> None:
    pattern, rules = claim
    assert check_attention_module(lambda: wrong_attention.Dense(*rules), pattern, **SMALL, **heads).passed


def test_a_failed_check_raises_with_the_report() -> None:
    options = {"max_tokens": 6, "checks": ["agreement", "coverage"]}
    report = examine_attention_module(lambda: wrong_attention.CausalLeak(*WINDOW[1]), WINDOW[0], **options)
    with pytest.raises(AssertionError, match="checks failed") as caught:
        check_attention_module(lambda: wrong_attention.CausalLeak(*WINDOW[1]), WINDOW[0], **options)
    assert str(caught.value) == str(report)


def no_mask(module, q, k, v, hidden):
    return module(q, k, v)


def no_offset(module, q, k, v):
    steps = range(q.shape[2])
    return torch.cat([module(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in steps], 2)


def of_the_first(module, q, k, v, hidden):
    return module(q, k, v, key_padding_mask=hidden[:1].expand_as(hidden))


def left_padding_forgotten(module, q, k, v, hidden):
    tail = hidden.clone()
    tail[:, : hidden.shape[1] // 2] = False
    return module(q, k, v, key_padding_mask=tail)


@pytest.mark.parametrize(
    ("check", "call"),
    [
        ("padding", {"padded": no_mask}),
        ("padding", {"padded": left_padding_forgotten}),
        ("padding", {"padded": of_the_first}),
        ("packing", {"packed": no_mask}),
        ("decoding", {"decoded": no_offset}),
    ],
)
def test_a_wrong_call_fails_its_check(check, call) -> None:
    pattern = WINDOW[0]
    report = examine_attention_module(
        lambda: fd.BlockSparseAttention(pattern),
        pattern,
        calls=Calls(**call),
        max_tokens=12,
        checks=[check, "agreement"],
    )
    assert [result.name for result in report.failures] == [check]
    assert report[check].detail[:8] in ("2 tokens", "3 tokens")


def test_documents_may_cut_or_restart() -> None:
    pattern = masks.chunked(3)

    def cut(module, q, k, v, ids):
        return fd.attend(q, k, v, pattern & masks.documents(ids))

    options = {"max_tokens": 12, "checks": ["packing"]}
    factory = lambda: fd.BlockSparseAttention(pattern)  # noqa: E731
    check_attention_module(factory, pattern, calls=Calls(packed=cut, documents="cut"), **options)
    assert not examine_attention_module(factory, pattern, calls=Calls(packed=cut), **options).passed


@pytest.mark.slow
def test_mistakes_under_compile() -> None:
    rules = [oracle.causal()]
    options = {"max_tokens": 20, "checks": ["compile", "recompilation", "agreement"]}
    report = examine_attention_module(lambda: wrong_attention.BreaksGraphs(*rules), masks.causal(), **options)
    assert [result.name for result in report.failures] == ["compile", "recompilation"]
    assert "torch.compile(fullgraph=True) raises" in report["compile"].detail
    report = examine_attention_module(lambda: wrong_attention.GraphEachLength(*rules), masks.causal(), **options)
    assert "recompilation" in [result.name for result in report.failures]
    assert "graphs for" in report["recompilation"].detail


def test_what_fails_is_the_shortest_case() -> None:
    """Wrong from 7 tokens on: 7 is no length that is tried at first."""

    class LateLeak(wrong_attention.Dense):
        def times(self, q, k):
            times = super().times(q, k)
            return times if q.shape[2] < 6 else torch.ones_like(times)

    rules = WINDOW[1]
    report = examine_attention_module(
        lambda: LateLeak(*rules), WINDOW[0], max_tokens=32, examples=3, checks=["agreement", "causality", "coverage"]
    )
    assert all(result.detail.startswith("6 tokens") for result in report.failures), str(report)
    assert len(report.failures) == 3


def test_a_module_that_raises_fails() -> None:
    def no_long_ones(q, k, v):
        if q.shape[2] > 4:
            raise ValueError("too long")
        return fd.attend(q, k, v, WINDOW[0])

    report = examine_attention_module(lambda: no_long_ones, WINDOW[0], max_tokens=12, checks=["agreement", "lengths"])
    assert report["agreement"].detail == "5 tokens: raises ValueError: too long"
    assert report["lengths"].detail == "1 and 5 tokens: raises ValueError: too long"
    assert str(report).startswith("no_long_ones, claimed to be local_window(left=2, right=0), H=4")


def test_coverage_looks_at_every_key() -> None:
    """Beyond the first head_dim keys too, which one call of the module can show."""

    class LastKeyToo(wrong_attention.Dense):
        def times(self, q, k):
            return super().times(q, k) | (torch.arange(k.shape[2]) == 18)

    report = examine_attention_module(
        lambda: LastKeyToo(*WINDOW[1]), WINDOW[0], lengths=[19], checks=["coverage", "recompilation"]
    )
    assert report["coverage"].detail.startswith("19 tokens: head 0, query 0, key 18 is not allowed and takes part")
    assert report["recompilation"].verdict == "does not apply"
