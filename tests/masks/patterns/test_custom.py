"""Custom patterns: any mask_mod, exactly; known by code and captured values; refused where it is no rule."""

from __future__ import annotations

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.blocks import _blocks
from flexdilated.masks.blocks._blocks import Blocks, build_blocks
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.testing._drawn_patterns import classify_window, same_kind, window_by_head
from tests.support.compilers import without_inductor
from tests.support.custom_rules import TABLE, by_global, diagonal, window


def test_heads_that_differ_have_tables_of_their_own():
    """The rule reads the head, though not on the heads that the checks look at."""
    late = masks.custom(lambda b, h, q, k: (h < 6) | (q == k))
    assert late.for_head(7, 8) != late.for_head(6, 8) != late
    dense = masks.block_mask(late, 256, num_heads=8, block_size=64).to_dense()[0]
    assert dense[5].sum() == 16
    assert torch.equal(dense[7], torch.eye(4, dtype=dense.dtype))
    alike = masks.custom(diagonal)
    assert alike.for_head(3, 8) is alike
    alike = masks.custom(lambda b, h, q, k: (torch.zeros_like(h) + q == k) & (h.dtype == torch.int64))
    assert alike.for_head(3, 8) is alike


def test_a_head_that_is_written_into_a_tensor():
    def shifted(b, h, q, k):
        shift = torch.zeros_like(h)
        shift += h
        return q - k == shift

    pattern = masks.custom(shifted)
    dense = masks.block_mask(pattern, 12, num_heads=3, block_size=1).to_dense()[0]
    assert torch.equal(dense.bool(), torch.stack([torch.eye(12).roll(-h, 1).tril(-h).bool() for h in range(3)]))


def test_functions_of_one_side_and_of_short_tables():
    """They hold for all of the other side; and a table of two entries as far as it reaches."""
    short = torch.tensor([1, 0])
    for function, tokens in (
        (lambda b, h, q, k: q % 3 == 0, 7),
        (lambda b, h, q, k: k < 2, 7),
        (lambda b, h, q, k: short[q] > 0, 2),
    ):
        pattern, t = masks.custom(function), torch.arange(tokens)
        found = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))(t[0], t[0], t[:, None], t)
        assert torch.equal(found, function(0, 0, t[:, None], t).expand(tokens, tokens))
        q, k, v = torch.randn(3, 1, 1, tokens, 4)
        exact = fd.attend(q, k, v, pattern, engine="reference")
        torch.testing.assert_close(fd.attend(q, k, v, pattern), exact)


def test_classify_prunes():
    calls = []
    function, inner = window_by_head(torch.tensor([64])), classify_window(torch.tensor([64]))

    def asked(pattern: masks.Pattern) -> int:
        calls.clear()
        sizes = {"num_heads": 1, "num_queries": 8192, "num_keys": 8192}
        (term,) = shared_terms(pattern, 1, pattern.bind(**sizes), 1)
        rule = term.table_rule()
        evaluated = type(rule).allowed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(rule), "allowed", lambda self, t, q, k: calls.append(len(q)) or evaluated(self, t, q, k))
            build_blocks(rule, q_block=64, k_block=64)
        return sum(calls)

    assert asked(masks.custom(function)) == 128**2
    assert asked(masks.custom(function, classify=inner)) < 3 * 128
    assert asked(masks.custom(function) & masks.local_window(left=64, right=0)) < 3 * 128


def test_doubts_are_settled_a_few_at_a_time():
    """No list of all blocks is ever made: what is held at once stays small while tokens grow."""
    settle, pattern = _blocks.count_pairs, masks.custom(diagonal)
    for N in (1024, 4096):
        held: list[int] = []

        def noting(rule, places, shape, held=held):
            held.append(len(places.table))
            return settle(rule, places, shape)

        (term,) = shared_terms(pattern, 1, pattern.bind(num_heads=1, num_queries=N, num_keys=N), 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_blocks, "_DOUBTS_AT_ONCE", 1024)
            patch.setattr(_blocks, "count_pairs", noting)
            blocks: Blocks = build_blocks(term.table_rule(), q_block=32, k_block=32)
        assert len(blocks.row) == N // 32
        assert sum(held) == (N // 32) ** 2
        assert max(held) <= 1024


def capturing() -> list[masks.Pattern]:
    """Functions that capture ints, tensors by position and by head, globals and inner functions."""
    inner = window(9)
    composite = lambda b, h, q, k: (TABLE[q % 6] == TABLE[k % 6]) & inner(b, h, q, k)  # noqa: E731
    functions = [window(3), window(8), by_global, window_by_head(torch.tensor([5, 60, 7, 30, 9])), composite]
    return [masks.custom(function) for function in functions]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["flex", "aten"])
def test_each_runs_with_what_it_captured(engine):
    q, k, v = torch.randn(3, 1, 2, 150, 16)
    patterns = capturing()
    with without_inductor(), torch.no_grad():
        for pattern in patterns[: 3 if engine == "flex" else None]:
            found = fd.attend(q, k, v, pattern & masks.causal(), engine=engine)
            exact = fd.attend(q, k, v, pattern & masks.causal(), engine="reference")
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
        last = patterns[-1]
        compiled = torch.compile(lambda q, k, v: fd.attend(q, k, v, last, engine=engine), fullgraph=True)
        exact = fd.attend(q, k, v, last, engine="reference")
        torch.testing.assert_close(compiled(q, k, v), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_captures_compile_to_one_kernel():
    """The C++ of FlexAttention, one function a head: heads 1 and 2 of 3 on one key/value head, 70 queries over 190.

    Its scores are changed as well, by a table that is captured, for each head and distance.
    """
    slopes = torch.tensor([9.0, 0.5, 0.1])

    def score_mod(score, b, h, q_idx, k_idx):
        return torch.tanh(score) - slopes[h] * (q_idx - k_idx).abs() + torch.sin(0.3 * k_idx)

    q, (k, v) = torch.randn(1, 2, 70, 16), torch.randn(2, 1, 1, 190, 16)
    *_, by_head, composite = capturing()
    pattern = masks.per_head([masks.every(), by_head, composite])
    options = {"q_offset": 130, "k_offset": 10, "head_offset": 1, "num_heads_global": 3, "enable_gqa": True}
    options["score_mod"] = score_mod
    found, exact = (fd.attend(q, k, v, pattern, engine=engine, **options) for engine in ("flex", "reference"))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_what_it_captured_follows_the_device():
    pattern = masks.custom(same_kind(TABLE)) | masks.custom(lambda b, h, q, k: TABLE[q % 6] > 1)
    pattern |= masks.custom(lambda b, h, q, k: (q - k).to(h.device) > torch.full((), 3, device=q.device))
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    mod = pattern.mask_mod(num_heads=1, device=torch.device("meta"))
    assert mod(meta[0], meta[0], meta[:, None], meta).device.type == "meta"


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_head_that_becomes_a_new_tensor_is_followed() -> None:
    """It hands its value on in second place, after a tensor of which only the kind counts."""
    assert masks.custom(lambda b, h, q, k: q.new_tensor(h) + 0 * q >= k).rule.uses_head
    assert not masks.custom(lambda b, h, q, k: h.new_tensor(3) + 0 * q >= k).rule.uses_head
