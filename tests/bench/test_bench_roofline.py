"""The roofline: shares of time that sum to one, by the operator that spends it, and the page they stand on."""

from typing import Any

import pytest
import torch

from bench import roofline
from bench._run import MEASURES
from bench.roofline import CASES, KINDS, Case, Shape, _kind, kernel_jobs, parts_of

SMALL = MEASURES["roofline"].small


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "kernel"),
        ("aten::index_select", "moves"),
        ("aten::index_copy_", "moves"),
        ("aten::copy_", "moves"),
        ("aten::index_add_", "sums"),
        ("aten::add_", "sums"),
        ("aten::lerp_", "merges"),
        ("aten::masked_fill_", "masks"),
        ("aten::where", "masks"),
        ("aten::fill_", "fills"),
        ("flexdilated::tiles", None),
        ("aten::as_strided", None),
    ],
)
def test_kinds(operator, kind) -> None:
    assert _kind(operator) == kind


def test_shares_are_of_the_work_that_is_done() -> None:
    """A run that only gathers is nearly all moves, and what was prepared does not count."""
    x, index = torch.randn(1 << 11, 2048), torch.randperm(1 << 11)
    shares = parts_of(lambda: (x @ x.T, x)[1], lambda given: given.index_select(0, index))
    assert set(shares) == set(KINDS)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["moves"] > 0.5
    assert shares["kernel"] == 0.0


def test_a_kernel_shape_counts_all_its_problems() -> None:
    shape = Shape(8, 16, pairs=1000)
    assert shape.count == 7
    assert shape.flops(4) == 4 * 64 * 7 * 8 * 16
    found: list[Any] = [job.run(None) for job in kernel_jobs(shape)]
    assert found[0][0].shape == (7, 1, 8, 64)
    assert [x.shape[2] for x in found[1]] == [8, 16, 16]


def test_the_check_sees_a_wrong_attention(monkeypatch) -> None:
    """A pattern that is one key too wide does not get as far as the clock."""
    attend = roofline.fd.attend
    wide = roofline.masks.local_window(left=1024, right=0)
    monkeypatch.setattr(roofline.fd, "attend", lambda q, k, v, pattern: attend(q, k, v, wide))
    small = Case("narrow", "masks.local_window(left=9, right=0)")
    with pytest.raises(AssertionError, match="out must be within"):
        roofline.roofline(**{**SMALL, "cases": (small,)})


def test_every_pattern_sums_to_the_whole() -> None:
    patterns = roofline.roofline(**SMALL)[0].detail["patterns"]
    assert list(patterns) == ["forward", "backward"]
    for figures in patterns.values():
        assert list(figures) == ["dense", *(case.name for case in SMALL["cases"])]
        for figure in figures.values():
            assert sum(figure["shares"].values()) == pytest.approx(1.0)
            kernel = sum(figure["shares"][kind] for kind in ("useful", "beyond", "below"))
            assert kernel == pytest.approx(figure["in_kernel"])
    assert patterns["forward"]["dense"]["waste"] == 1.0


def test_every_expression_of_the_full_size_is_a_pattern() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.pattern(2048).bind(num_heads=2, num_queries=2048, num_keys=2048)
