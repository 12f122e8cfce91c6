"""check_attention_module: right modules pass, whatever their call; the report, and the lengths that are tried."""

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
from tests.support import oracle, wrong_attention

COMPILING = ("compile", "recompilation", "ranks")
CAUSAL = masks.causal(), [oracle.causal()]
WINDOW = masks.local_window(left=2, right=0), [oracle.local_window(2, 0)]
SMALL = {"max_tokens": 9, "examples": 2, "skip": COMPILING}


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
    pattern, decoded = OURS[name], one_by_one if name == "longnet" else None
    calls = Calls(padded=by_mask, packed=packed, decoded=decoded)
    report = check_attention_module(
        lambda: fd.BlockSparseAttention(pattern, enable_gqa=True), pattern, num_kv_heads=2, calls=calls, **SMALL
    )
    left_out = {result.name for result in report.results if result.verdict == "does not apply"}
    assert left_out <= {"causality", *(() if decoded else ("decoding",))}  # empty rows: by padding that hides all keys
    assert {result.name for result in report.results} == set(MODULE_CHECKS) - set(COMPILING)


@pytest.mark.slow
def test_ours_pass_the_slow_checks() -> None:
    report = check_attention_module(lambda: fd.BlockSparseAttention(WINDOW[0]), WINDOW[0], checks=COMPILING)
    assert [result.verdict for result in report.results] == ["passed", "passed", "does not apply"]


def test_multihead_modules_pass() -> None:
    """Projections set to the identity show the attention inside; torch's own gives NaN where all keys are hidden."""
    pattern = masks.longnet([4, 8], [1, 2]) & masks.causal()
    options = {"calls": Calls(layout="BNE", padded=by_mask), **SMALL}
    ours = lambda: fd.MultiheadDilatedAttention(32, 4, [4, 8], [1, 2], causal=True, batch_first=True)  # noqa: E731
    check_attention_module(lambda: identity_projections(ours()), pattern, **options)
    dense = lambda: identity_projections(torch.nn.MultiheadAttention(32, 4, batch_first=True))  # noqa: E731
    report = examine_attention_module(dense, masks.every(), **options)
    assert [result.name for result in report.failures] == ["empty rows"]
    assert "all of batch 1 hidden by padding: " in report["empty rows"].detail
    assert "got nan" in report["empty rows"].detail


SECOND_RESULTS = {
    "natural": (lambda q, lse: lse, True),
    "base 2": (lambda q, lse: lse / 0.6931472, False),
    # Averaged over heads they have the shape of an lse where there are as many tokens as heads.
    "weights": (lambda q, lse: torch.ones(q.shape[0], q.shape[2], q.shape[2]) / q.shape[2], True),
}


@pytest.mark.parametrize("name", SECOND_RESULTS)
def test_an_lse_is_checked_where_there_is_one(name) -> None:
    second, is_right = SECOND_RESULTS[name]

    def with_lse(q, k, v):
        out, lse = fd.attend(q, k, v, WINDOW[0], return_lse=True)
        return out, second(q, lse)

    checks = ["agreement", "gradients", "half precision"]
    report = examine_attention_module(lambda: with_lse, WINDOW[0], max_tokens=9, checks=checks)
    assert [result.verdict for result in report.results] == ["passed" if is_right else "failed"] * 3
    assert is_right or report["agreement"].detail.startswith("1 token, ordinary values: lse is wrong")


def test_documents_may_cut_or_restart() -> None:
    pattern = masks.chunked(3)

    def cut(module, q, k, v, ids):
        return fd.attend(q, k, v, pattern & masks.documents(ids))

    options = {"max_tokens": 12, "checks": ["packing"]}
    factory = lambda: fd.BlockSparseAttention(pattern)  # noqa: E731
    check_attention_module(factory, pattern, calls=Calls(packed=cut, documents="cut"), **options)
    assert not examine_attention_module(factory, pattern, calls=Calls(packed=cut), **options).passed


def test_lengths_can_be_given() -> None:
    """For modules that take only some; a check that needs two lengths does not apply to one."""

    def fours(q, k, v):
        assert q.shape[2] % 4 == 0
        return fd.attend(q, k, v, WINDOW[0])

    report = check_attention_module(lambda: fours, WINDOW[0], lengths=[8, 4, 12], skip=COMPILING)
    assert report["agreement"].detail.startswith("3 lengths from 4 to 12: ")
    one = check_attention_module(lambda: fours, WINDOW[0], lengths=[8], checks=["agreement", "recompilation"])
    assert [result.verdict for result in one.results] == ["passed", "does not apply"]


def test_lengths_that_a_pattern_does_not_take_are_not_tried() -> None:
    """A list of blocks needs those that it names, a grid its tokens."""
    for pattern in (masks.block_list([[0], [1], [2]], block=2), masks.neighborhood((3, 4), (1, 1))):
        options = {**SMALL, "max_tokens": 12}
        report = check_attention_module(lambda: fd.BlockSparseAttention(pattern), pattern, **options)  # noqa: B023
        assert report["agreement"].verdict == "passed"


class LateLeak(wrong_attention.Dense):
    """Sees all keys in sequences of more than 5 tokens."""

    def times(self, q, k):
        times = super().times(q, k)
        return torch.ones_like(times) if q.shape[2] > 5 else times


def test_the_shortest_failing_case_is_reported() -> None:
    """Wrong from 6 tokens on, which is no length that is tried at first."""
    options = {"max_tokens": 32, "examples": 3, "checks": ["agreement", "causality", "coverage"]}
    report = examine_attention_module(lambda: LateLeak(*WINDOW[1]), WINDOW[0], **options)
    assert [result.detail[:8] for result in report.failures] == ["6 tokens"] * 3, str(report)


def test_a_module_that_raises_fails() -> None:
    def no_long_ones(q, k, v):
        if q.shape[2] > 4:
            raise ValueError("too long")
        return fd.attend(q, k, v, WINDOW[0])

    report = examine_attention_module(lambda: no_long_ones, WINDOW[0], max_tokens=12, checks=["agreement", "lengths"])
    assert report["agreement"].detail == "5 tokens, ordinary values: raises ValueError: too long"
    assert report["lengths"].detail == "5 tokens: raises ValueError: too long"
    assert str(report).startswith("no_long_ones, claimed to be local_window(left=2, right=0), H=4")


def test_heads_may_come_after_tokens_and_an_output_may_be_none() -> None:
    calls = Calls(layout="BNHD")
    for change, words in {
        lambda out: out: "",
        lambda out: (): "the output must be a tensor; got tuple",
        lambda out: out[:, :, :0]: "the output must have shape (2, 1, 4, 8); got (2, 1, 0, 8)",
    }.items():

        def by_tokens(q, k, v, change=change):
            return change(fd.attend(*(x.transpose(1, 2) for x in (q, k, v)), WINDOW[0]).transpose(1, 2))

        report = examine_attention_module(lambda: by_tokens, WINDOW[0], calls=calls, max_tokens=4, checks=["agreement"])
        assert report.passed if not words else report["agreement"].detail == f"1 token, ordinary values: {words}"


def test_a_failed_check_raises_with_the_report() -> None:
    options = {"max_tokens": 6, "checks": ["agreement", "coverage"]}
    report = examine_attention_module(lambda: wrong_attention.CausalLeak(*WINDOW[1]), WINDOW[0], **options)
    with pytest.raises(AssertionError, match="checks failed") as caught:
        check_attention_module(lambda: wrong_attention.CausalLeak(*WINDOW[1]), WINDOW[0], **options)
    assert str(caught.value) == str(report)
