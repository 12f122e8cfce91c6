"""check_attention_module: each wrong module fails the check that is about its mistake, in the shortest case."""

import time

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import (
    Calls,
    _check_module,
    assert_attention_close,
    check_attention_module,
    examine_attention_module,
)
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
    "detached merge": (
        "DetachedMerge",
        SPARSE,
        {"gradients", "half precision"},
        {"agreement", "coverage"},
        "dq is wrong",
    ),
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
        assert failed - ({"gradients", "half precision"} if mistake == "NaN on empty rows" else set()) == failing, str(
            report
        )


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


@pytest.mark.parametrize("name", ["HalfDenominators", "HalfOutputs", "HalfMerge"])
def test_sums_in_half_precision_fail(name) -> None:
    """Each is right in float32. With output alone too, over a few hundred tokens, where plain attention passes."""
    module, checks = getattr(wrong_attention, name)(*CAUSAL[1]), ["agreement", "half precision"]
    report = examine_attention_module(lambda: module, CAUSAL[0], checks=checks)
    assert [result.name for result in report.failures] == ["half precision"], str(report)
    with torch.no_grad():
        q, k, v = torch.randn(3, 1, 2, 700, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert_attention_close(right, q, k, v, CAUSAL[0])
        assert_attention_close(wrong_attention.WideSums(*CAUSAL[1])(q, k, v), q, k, v, CAUSAL[0])
        with pytest.raises(AssertionError, match="out is wrong"):
            assert_attention_close(module(q, k, v), q, k, v, CAUSAL[0])


def by_flex(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf), enable_gqa=True)


def by_sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


RIGHT = {
    "sdpa": by_sdpa,
    "flex": by_flex,
    "attend": lambda q, k, v: fd.attend(q, k, v, CAUSAL[0], enable_gqa=True),
    "wide sums": wrong_attention.WideSums(*CAUSAL[1]),
    "weights in half precision": wrong_attention.Dense(*CAUSAL[1]),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", RIGHT)
def test_right_modules_in_half_precision_pass(name) -> None:
    """By no chance do they fail: few numbers in a row, that cancel, are where a budget may be too small."""
    for seed in range(60):
        dtype, tokens, dim = (torch.bfloat16, torch.float16)[seed % 2], (3, 20, 67)[seed % 3], (1, 4, 16)[seed // 3 % 3]
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, heads, tokens, dim, generator=generator).to(dtype) for heads in (4, 2, 2))
        backward = name != "flex"  # which has none on the CPU
        q, k, v = (x.requires_grad_(backward) for x in (q, k, v))
        assert_attention_close(RIGHT[name](q, k, v), q, k, v, CAUSAL[0], gradients=backward)


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


class LateLeak(wrong_attention.Dense):
    """Sees all keys in sequences of more than 64 tokens, if their number is no multiple of 64."""

    def times(self, q, k):
        times = super().times(q, k)
        return torch.ones_like(times) if q.shape[2] > 64 and q.shape[2] % 64 else times


def test_a_mistake_beyond_64_tokens_is_found_and_said_in_short(monkeypatch) -> None:
    """By default, and where all checks are longer: in bounded time and on one page."""
    report = examine_attention_module(lambda: LateLeak(*CAUSAL[1]), CAUSAL[0], checks=["agreement", "coverage"])
    assert report["agreement"].detail.startswith("65 tokens, ordinary values: out is wrong")
    assert report["coverage"].verdict == "passed"
    assert report.lengths == "lengths drawn: 1, 2, 3, 4, 5, 7, 39, 40; in agreement also 65, 128, 257"
    monkeypatch.setattr(_check_module, "_SHRINK_S", 1.0)
    begin = time.monotonic()
    options = {"max_tokens": 140, "examples": 4, "skip": (*COMPILING, "lengths")}
    report = examine_attention_module(lambda: LateLeak(*CAUSAL[1]), CAUSAL[0], **options)
    assert time.monotonic() - begin < 60
    assert {result.name for result in report.failures} >= {"agreement", "coverage", "causality", "gradients"}
    assert len(str(report).splitlines()) < 60


def test_shrinking_ends(monkeypatch) -> None:
    """With no time at all, the first case that failed is reported."""
    monkeypatch.setattr(_check_module, "_SHRINK_S", 0.0)
    options = {"max_tokens": 40, "examples": 2, "checks": ["agreement", "lengths"]}
    report = examine_attention_module(lambda: wrong_attention.Dense(oracle.every()), CAUSAL[0], **options)
    assert report["agreement"].detail.startswith("40 tokens")


def test_a_module_that_raises_pages_is_said_in_short() -> None:
    def failing(q, k, v):
        raise ValueError("\n".join([repr(torch.randn(20, 20))] * 4) + "x" * 10_000)

    text = str(examine_attention_module(lambda: failing, CAUSAL[0], skip=COMPILING))
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 300


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
