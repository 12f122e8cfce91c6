"""check_attention_module: right modules pass, and each wrong one fails the check that is about its mistake."""

import multiprocessing
import re
import threading

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import (
    MODULE_CHECKS,
    Calls,
    _ranks_check,
    check_attention_module,
    examine_attention_module,
    identity_projections,
)
from tests.support import oracle, ranks, wrong_attention
from tests.support.wrong_attention import (
    WithoutGradients,
    ends_on_a_rank,
    hangs_on_a_rank,
    over_ranks,
    raises_on_a_rank,
    without_ranks,
)

COMPILING = ("compile", "recompilation", "ranks")
WINDOW = masks.local_window(left=2, right=0), [oracle.local_window(2, 0)]


def by_mask(module, q, k, v, hidden):
    return module(q, k, v, key_padding_mask=hidden)


def one_by_one(module, q, k, v):
    steps = range(q.shape[2])
    return torch.cat([module(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], q_offset=t) for t in steps], 2)


def packed(module, q, k, v, ids):
    return fd.attend(q, k, v, module.pattern.per_document(ids), enable_gqa=True)


OURS = {
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
        factory, pattern, num_kv_heads=2, calls=calls, max_tokens=11, examples=2, skip=COMPILING
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
    options = {"calls": calls, "max_tokens": 9, "examples": 2, "skip": COMPILING}
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

    options = {"max_tokens": 9, "examples": 2, "skip": COMPILING}
    check_attention_module(lambda: TokensFirst(*rules), pattern, calls=Calls(layout="BNHD"), **options)
    report = examine_attention_module(lambda: TokensFirst(*rules), pattern, max_tokens=9, checks=["agreement"])
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


def found_over_ranks(made, monkeypatch: pytest.MonkeyPatch) -> str:
    """By processes forked from one that has imported torch, as those of other tests are."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: ranks.context)
    report = examine_attention_module(
        lambda: fd.BlockSparseAttention(WINDOW[0], enable_gqa=True),
        WINDOW[0],
        num_kv_heads=2,
        lengths=[30],
        calls=Calls(over_ranks=made),
        checks=["ranks"],
    )
    return report["ranks"].detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (over_ranks, "30 tokens on 2 ranks: as on one"),
        (without_ranks, "30 tokens on 2 ranks: out is wrong"),
        (WithoutGradients, "30 tokens on 2 ranks: dk is wrong"),
        (raises_on_a_rank, "rank 1 of 2 raises ZeroDivisionError: by this rank\nand no other"),
        (ends_on_a_rank, "rank 1 of 2 ended with exit code 7"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_over_ranks(made, found, monkeypatch) -> None:
    """Right; without the other rank's keys, without its gradients; one raises, or ends, while the other waits."""
    assert found_over_ranks(made, monkeypatch).startswith(found)


@pytest.mark.slow
def test_a_rank_that_hangs(monkeypatch) -> None:
    monkeypatch.setattr(_ranks_check, "LIMIT_S", 2.0)
    said = found_over_ranks(hangs_on_a_rank, monkeypatch)
    assert re.fullmatch(r"rank (0|0 and 1) of 2 did not end within 2 s, and was ended", said)


def test_a_module_over_ranks_that_cannot_be_sent() -> None:
    calls = Calls(over_ranks=lambda mesh: mesh)
    report = examine_attention_module(
        lambda: fd.BlockSparseAttention(WINDOW[0]), WINDOW[0], calls=calls, checks=["ranks"]
    )
    assert report["ranks"].detail.startswith("over_ranks and plain must be functions of a module, to be pickled: ")


def test_lengths_can_be_given() -> None:
    """For modules that take only some."""

    def fours(q, k, v):
        assert q.shape[2] % 4 == 0
        return fd.attend(q, k, v, WINDOW[0])

    report = check_attention_module(lambda: fours, WINDOW[0], lengths=[8, 4, 12], skip=COMPILING)
    assert report["agreement"].detail.startswith("3 lengths from 4 to 12")


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
    report = check_attention_module(
        lambda: fd.BlockSparseAttention(pattern), pattern, examples=2, max_tokens=12, skip=COMPILING
    )
    assert report["agreement"].verdict == "passed"


def test_weights_are_no_lse() -> None:
    """Averaged over heads they have its shape where there are as many tokens as heads."""

    def with_weights(q, k, v):
        return fd.attend(q, k, v, WINDOW[0]), torch.ones(q.shape[0], q.shape[2], q.shape[2]) / q.shape[2]

    check_attention_module(lambda: with_weights, WINDOW[0], max_tokens=6, checks=["agreement", "gradients"])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda out: out > 0, "must be of floating point numbers; got torch.bool"),
        (lambda out: out.to("meta"), "must be on the device of q, cpu; got meta"),
        (lambda out: (), "must be a tensor; got tuple"),
        (lambda out: out[:, :, :0], "must have shape (2, 1, 4, 8); got (2, 1, 0, 8)"),
    ],
)
def test_an_output_that_is_none(broken, words) -> None:
    def by_tokens(q, k, v):
        return broken(fd.attend(*(x.transpose(1, 2) for x in (q, k, v)), WINDOW[0]).transpose(1, 2))

    calls = Calls(layout="BNHD")
    report = examine_attention_module(lambda: by_tokens, WINDOW[0], calls=calls, max_tokens=4, checks=["agreement"])
    assert report["agreement"].detail == f"the output {words}"


def test_a_mistake_after_a_block_is_found() -> None:
    """One token in the last block of 128, which sees too much; also for a pattern without numbers."""

    def leaking(q, k, v):
        return fd.attend(q, k, v, masks.every() if q.shape[2] == 129 else masks.causal())

    sizes = {"num_heads": 1, "head_dim": 2, "max_tokens": 130}
    report = examine_attention_module(lambda: leaking, masks.causal(), checks=["causality"], **sizes)
    assert report["causality"].detail.startswith("129 tokens: key 1 is hidden from query 0 of head 0")


def test_a_module_that_is_never_the_same_twice() -> None:
    calls: list[int] = []

    def changing(q, k, v):
        calls.append(1)
        return fd.attend(q, k, v, WINDOW[0]) + len(calls)

    report = examine_attention_module(lambda: changing, WINDOW[0], max_tokens=4, checks=["lengths"])
    assert report["lengths"].detail.startswith("2 tokens: a new module gives ")
    assert "kept" not in report["lengths"].detail


def test_a_report_fits_the_page() -> None:
    def wordy(q, k, v):
        raise RuntimeError("a long line of words " * 9 + "\nand another" * 40)

    text = str(examine_attention_module(lambda: wordy, WINDOW[0], max_tokens=4, checks=["half precision", "padding"]))
    assert max(map(len, text.partition("\nhalf precision:")[0].splitlines())) <= 120
    assert text.endswith("\nand another\n... and 33 more lines")


def test_a_module_with_projections_is_told_how_it_was_called() -> None:
    report = examine_attention_module(
        lambda: fd.MultiheadDilatedAttention(32, 4, [8], [1], batch_first=True),
        masks.longnet([8], [1]),
        checks=["agreement"],
    )
    assert "got (2, 4, 1, 8); called with q, k and v of (batch, heads, tokens, head dim)" in report["agreement"].detail
    assert "takes calls=testing.Calls(layout='BNE')" in report["agreement"].detail


@pytest.mark.parametrize("given", [{"seed": "x"}, {"dtype": torch.int64}, {"dtype": "float32"}])
def test_settings_of_the_wrong_kind(given) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(given))} must be"):
        examine_attention_module(lambda: print, WINDOW[0], **given)
