"""The suite's checks of shapes bite: wrong kinds, sizes that differ within one call, fields of dataclasses."""

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from flexdilated.masks.core._box import Bounds, Progression, count_residue
from tests.support.shape_checks import _EVERY, _FIRST


def often(call) -> None:
    """As often as one of a function's calls is checked, however often it was called before."""
    for _ in range(_EVERY):
        call()


def test_the_library_is_checked() -> None:
    one, two = torch.ones(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    for _ in range(2):  # once checked at each call, then of many calls some
        for wrong in (
            lambda: Bounds(one, two),
            lambda: Progression(one.float(), 1, one),
            lambda: count_residue(Progression(one, 1, one), 3, two[None]),
        ):
            with pytest.raises(BeartypeCallHintViolation):
                often(wrong)
        for size in (one, two):  # an axis means one size in one call
            for _ in range(_FIRST):
                assert count_residue(Progression(size, 1, size), 3, size).tolist() == [1] * len(size)
