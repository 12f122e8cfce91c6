"""check_attention_module: right modules pass, and each wrong one fails the check that is about its mistake."""

import multiprocessing
import threading

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import (
    MODULE_CHECKS,
    Calls,
    check_attention_module,
    examine_attention_module,
    identity_projections,
)
from flexdilated.testing._module import Subject
from flexdilated.testing._ranks_check import examine_over_ranks, on_two_processes
from tests.support import oracle, ranks, wrong_attention
from tests.support.wrong_attention import WithoutGradients, ends_on_a_rank, over_ranks, raises_on_a_rank, without_ranks

COMPILING = ("compile", "recompilation", "ranks")
WINDOW = masks.local_window(left=2, right=0), [oracle.local_window(2, 0)]
SPARSE = masks.longnet([4, 8], [1, 3]), [oracle.dilated(4, 1, "interleaved"), oracle.dilated(8, 3, "interleaved")]
SEGMENTS = masks.chunked(5), [oracle.dilated(5, 1, 0)]
GAPS = masks.dilated(6, 2), [oracle.dilated(6, 2, 0)]


def by_mask(module, q, k, v, hidden):
    return module(q, k, v, key_padding_mask=hidden)


def one_by_one(module, q, k, v):
    steps = range(q.shape[2])
    return torch.cat([module(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], q_offset=t) for t in steps], 2)


def packed(module, q, k, v, ids):
    return fd.attend(q, k, v, module.pattern.per_document(ids), enable_gqa=True)


OURS = {
    "window": WINDOW[0],
    "longnet": masks.longnet([4, 8, 16], [1, 2, 3]) & masks.causal(),
    "per head": masks.per_head([masks.causal(), masks.strided(3), ~masks.chunked(4), masks.dilated(6, 4, 1)]),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_pass(name) -> None:
    pattern = OURS[name]
    decoded = one_by_one if name != "per head" else None
    calls = Calls(padded=by_mask, packed=packed, decoded=decoded)

    def factory():
        return fd.BlockSparseAttention(pattern, enable_gqa=True)

    report = check_attention_module(
        factory, pattern, num_kv_heads=2, calls=calls, max_tokens=11, examples=4, skip=COMPILING
    )
    applied = [result.name for result in report.results if result.verdict == "passed"]
    missing = {"causality", "decoding"} & (set() if decoded else {"decoding"})
    assert set(applied) >= set(MODULE_CHECKS) - set(COMPILING) - missing - {"empty rows"}
    assert report["empty rows"].verdict == "passed"  # by padding that hides all keys


def test_on_the_device(flexdilated_device) -> None:
    """Where --flexdilated-device says; kernels of accelerators want head dims from 16 on."""
    dtype = torch.float32 if flexdilated_device.type == "cpu" else torch.bfloat16
    checks = ["agreement", "coverage", "causality", "empty rows", "gradients", "determinism"]
    pattern = masks.longnet([6, 12], [2, 3]) & masks.causal()
    where = {"device": flexdilated_device, "dtype": dtype, "head_dim": 16, "lengths": [1, 5, 16, 33]}
    report = check_attention_module(lambda: fd.BlockSparseAttention(pattern), pattern, checks=checks, **where)
    assert [result.verdict for result in report.results] == ["passed"] * len(checks)


@pytest.mark.slow
def test_ours_pass_the_slow_checks() -> None:
    def factory():
        return fd.BlockSparseAttention(WINDOW[0])

    report = check_attention_module(factory, WINDOW[0], checks=COMPILING)
    assert [result.verdict for result in report.results] == ["passed", "passed", "does not apply"]


def test_multihead_modules_pass() -> None:
    """Projections set to the identity show the attention inside; torch's own gives NaN where all keys are hidden."""
    pattern = masks.longnet([4, 8], [1, 2]) & masks.causal()
    calls = Calls(layout="BNE", padded=by_mask)
    options = {"calls": calls, "max_tokens": 9, "examples": 4, "skip": COMPILING}
    ours = lambda: fd.MultiheadDilatedAttention(32, 4, [4, 8], [1, 2], causal=True, batch_first=True)  # noqa: E731
    check_attention_module(lambda: identity_projections(ours()), pattern, **options)
    dense = lambda: identity_projections(torch.nn.MultiheadAttention(32, 4, batch_first=True))  # noqa: E731
    report = examine_attention_module(dense, masks.every(), **options)
    assert [result.name for result in report.failures] == ["empty rows"]
    assert "all of batch 1 hidden by padding" in report["empty rows"].detail
    assert "got nan" in report["empty rows"].detail


def test_heads_may_come_after_tokens() -> None:
    pattern, rules = WINDOW

    class TokensFirst(wrong_attention.Dense):
        def forward(self, q, k, v):
            return super().forward(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    options = {"max_tokens": 9, "skip": COMPILING}
    check_attention_module(lambda: TokensFirst(*rules), pattern, calls=Calls(layout="BNHD"), **options)
    report = examine_attention_module(lambda: TokensFirst(*rules), pattern, **options)
    assert "agreement" in {result.name for result in report.failures}


def lse_too(module, q, k, v):
    return fd.attend(q, k, v, WINDOW[0], return_lse=True)


def wrong_lse(module, q, k, v):
    out, lse = fd.attend(q, k, v, WINDOW[0], return_lse=True)
    return out, lse / 0.6931472


def test_an_lse_is_checked_where_there_is_one() -> None:
    options = {"max_tokens": 9, "checks": ["agreement", "gradients"]}
    check_attention_module(lambda: print, WINDOW[0], calls=Calls(plain=lse_too), **options)
    report = examine_attention_module(lambda: print, WINDOW[0], calls=Calls(plain=wrong_lse), **options)
    assert report["agreement"].detail.startswith("1 token, ordinary values: lse is wrong")


# module, what it claims to be, the checks that must fail among others, those that must pass, and words of a report
WRONG = {
    "softmax over heads": ("SoftmaxOverHeads", WINDOW, {"agreement", "coverage"}, {"lengths"}, "runs over the heads"),
    "blocks apart": ("BlocksApart", (masks.causal(), [oracle.causal()]), {"agreement"}, {"causality"}, "add up to 2"),
    "causal leak": (
        "CausalLeak",
        WINDOW,
        {"causality", "coverage"},
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
SMALL = {"max_tokens": 14, "examples": 9, "skip": COMPILING}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_fails_its_check(mistake) -> None:
    name, (pattern, rules), failing, passing, words = WRONG[mistake]
    kind = getattr(wrong_attention, name)
    heads = {"num_kv_heads": 2} if name == "CycledHeads" else {}
    report = examine_attention_module(lambda: kind(*rules), pattern, **SMALL, **heads)
    failed = {result.name for result in report.failures}
    assert failed >= failing, str(report)
    assert all(report[check].verdict == "passed" for check in passing), str(report)
    assert words in str(report)
    if mistake in ONE_CHECK:
        assert failed - ({"gradients"} if mistake == "NaN on empty rows" else set()) == failing, str(report)


@pytest.mark.parametrize(
    ("claim", "heads"), [(WINDOW, {}), (WINDOW, {"num_kv_heads": 2}), (SPARSE, {}), (SEGMENTS, {}), (GAPS, {})]
)
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


def subject_over_ranks(made) -> Subject:
    def factory():
        return fd.BlockSparseAttention(WINDOW[0])

    return Subject(factory, WINDOW[0], Calls(over_ranks=made), 4, 2, 8, (30,), torch.float32, torch.device("cpu"), 0)


@pytest.fixture(autouse=True)
def ready_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked from one that has imported torch, as those of other tests are."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: ranks.context)


@pytest.mark.slow
def test_over_ranks() -> None:
    """On the same two processes: right, without the other rank's keys, without its gradients; then one raises."""
    made = (over_ranks, without_ranks, WithoutGradients, raises_on_a_rank, over_ranks)
    right, alone, detached, raised, after = examine_over_ranks([subject_over_ranks(each) for each in made])
    assert right == "30 tokens on 2 ranks: as on one"
    assert str(alone).startswith("30 tokens on 2 ranks: out is wrong")
    assert str(detached).startswith("30 tokens on 2 ranks: dk is wrong")
    assert str(raised) == "rank 1 of 2 raises ZeroDivisionError: by this rank\nand no other"
    assert str(after) == "was not tried, as the job before it came to no result"


@pytest.mark.slow
def test_a_rank_that_ends() -> None:
    """The other one waits forever, and is ended at once."""
    report = examine_attention_module(
        lambda: fd.BlockSparseAttention(WINDOW[0]), WINDOW[0], calls=Calls(over_ranks=ends_on_a_rank), checks=["ranks"]
    )
    assert report["ranks"].detail == "rank 1 of 2 ended with exit code 7"


@pytest.mark.slow
def test_a_rank_that_hangs() -> None:
    """The hang ends its job and those after it; what came before stays."""
    jobs = [wrong_attention.own_rank, wrong_attention.hang_on_a_rank, wrong_attention.own_rank]
    fine, hung, after = on_two_processes(jobs, job_s=2.0)
    assert fine == [0, 1]
    assert str(hung) == "rank 0 of 2 did not end within 2 s, and was ended"
    assert str(after) == "was not tried, as the job before it came to no result"


def test_a_module_over_ranks_that_cannot_be_sent() -> None:
    calls = Calls(over_ranks=lambda mesh: mesh)
    report = examine_attention_module(
        lambda: fd.BlockSparseAttention(WINDOW[0]), WINDOW[0], calls=calls, checks=["ranks"]
    )
    assert report["ranks"].detail.startswith("over_ranks and plain must be functions of a module, to be pickled: ")


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


def test_lengths_can_be_given() -> None:
    """For modules that take only some."""

    def fours(q, k, v):
        assert q.shape[2] % 4 == 0
        return fd.attend(q, k, v, WINDOW[0])

    report = check_attention_module(lambda: fours, WINDOW[0], lengths=[8, 4, 12], skip=COMPILING)
    assert report["agreement"].detail.startswith("3 lengths from 4 to 12")


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


def test_lengths_that_a_pattern_does_not_take_are_not_tried() -> None:
    """Neither at first nor to find a shorter case: a list of blocks needs those that it names."""
    pattern = masks.block_list([[0], [1], [2]], block=2)

    class Stale(fd.BlockSparseAttention):
        before = 0

        def forward(self, q, k, v):
            out, stale = super().forward(q, k, v), self.before not in (0, q.shape[2])
            self.before = q.shape[2]
            return out * 2 if stale else out

    report = examine_attention_module(
        lambda: Stale(pattern), pattern, max_tokens=7, checks=["agreement", "lengths", "coverage"]
    )
    assert [result.name for result in report.failures] == ["lengths"]
    assert "a used module gives" in report["lengths"].detail


def test_a_module_that_cannot_be_copied() -> None:
    class Locked(fd.BlockSparseAttention):
        def __init__(self, pattern):
            super().__init__(pattern)
            self.lock = threading.Lock()

    report = check_attention_module(lambda: Locked(WINDOW[0]), WINDOW[0], max_tokens=6, checks=["lengths", "agreement"])
    assert report["lengths"].verdict == "does not apply"
    assert report["lengths"].detail.startswith("the module cannot be copied: TypeError: cannot pickle")


def test_a_pattern_of_one_length() -> None:
    pattern = masks.neighborhood((3, 4), (1, 1))
    report = check_attention_module(lambda: fd.BlockSparseAttention(pattern), pattern, max_tokens=12, skip=COMPILING)
    assert report["agreement"].verdict == "passed"
