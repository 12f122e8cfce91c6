"""The rules of transformers, read as patterns, allow the pairs that the functions themselves allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as rules

import flexdilated as fd
from flexdilated.integrations.transformers._mask_functions import pattern_from_mask_function
from flexdilated.masks.patterns import names

# B batch entries, N tokens

_LENGTH = 24


def evaluated(function) -> Tensor:
    """(B, N, N) of a function of index tensors."""
    entry, token = torch.arange(2), torch.arange(_LENGTH)
    found = function(entry[:, None, None], torch.tensor(0), token[None, :, None], token[None, None, :])
    return found.expand(2, _LENGTH, _LENGTH)


def as_read(function) -> Tensor:
    """(B, N, N) of the pattern that it is read as: whose value each query gets a share of."""
    reading = pattern_from_mask_function(function, None)
    pattern = reading.whole()
    q, v = torch.zeros(2, 1, _LENGTH, 8), torch.eye(_LENGTH).expand(2, 1, -1, -1)
    return fd.attend(q, q, v, pattern, bindings={name: reading.tensors[name] for name in names(pattern)})[:, 0] > 0


sizes = st.integers(1, _LENGTH + 3)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def ids_of(parts: list[int]) -> Tensor:
    """Sequences of these lengths, and one more to the end, (2, N); the second entry is one sequence."""
    ids = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))[:_LENGTH]
    first = torch.cat([ids, torch.full((_LENGTH - len(ids),), len(parts))])
    return torch.stack([first, torch.zeros_like(first)])


def positions_in(ids: Tensor) -> Tensor:
    """How many tokens of its own sequence come before each."""
    same = ids[:, :, None] == ids[:, None, :]
    return same.long().tril(-1).sum(-1)


plain = st.one_of(
    st.just(rules.causal_mask_function),
    st.just(rules.bidirectional_mask_function),
    st.builds(rules.sliding_window_causal_mask_function, sizes),
    st.builds(rules.sliding_window_overlay, sizes),  # no limit to later keys
    st.builds(lambda size: lambda b, h, q, k: k <= q + size, sizes),  # none to earlier ones
    st.builds(rules.sliding_window_bidirectional_mask_function, sizes),
    st.builds(lambda size: rules.chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.long)), sizes),
)


@given(plain, plain)
def test_rules_of_positions(one, other) -> None:
    assert torch.equal(as_read(one), evaluated(one))
    chunks = [each.__closure__ for each in (one, other) if each.__name__ == "and_mask"]
    if len(chunks) < 2:  # two chunk sizes at once are refused
        both = rules.and_masks(one, other)
        assert torch.equal(as_read(both), evaluated(both))
    either = rules.or_masks(one, other)
    assert torch.equal(as_read(either), evaluated(either))


@given(plain, lengths)
def test_packed_sequences(rule, parts: list[int]) -> None:
    ids = ids_of(parts)
    if hasattr(rules, "packed_sequence_compatibility_function"):
        packed = rules.packed_sequence_compatibility_function(rule, positions_in(ids), ids)
    else:  # since transformers 5.24
        remapped = rules.remap_positions_for_packed_sequence(rule, positions_in(ids))
        packed = rules.and_masks(remapped, rules.packed_sequence_mask_function(ids))
    assert torch.equal(as_read(packed), evaluated(packed))


@given(plain, lengths, st.lists(st.booleans(), min_size=2 * _LENGTH, max_size=2 * _LENGTH))
def test_groups_that_see_each_other_and_keys_that_are_hidden(rule, parts: list[int], visible: list[bool]) -> None:
    """Groups as of the tokens of an image: those with negative ids are in none."""
    seen, ids = torch.tensor(visible).view(2, -1), ids_of(parts)
    either = rules.or_masks(rule, rules.blockwise_overlay(torch.where(ids % 3 == 1, -1, ids)))
    for function in (either, rules.and_masks(rule, rules.padding_mask_function(seen))):
        assert torch.equal(as_read(function), evaluated(function))


distances = st.integers(-_LENGTH - 2, _LENGTH + 2)


@given(distances, distances)
def test_limits_of_the_distance(one: int, other: int) -> None:
    """On either side of the diagonal, also where no pair is left."""
    for rule in (
        lambda b, h, q, k: (k + one <= q) & (q < k + other),
        lambda b, h, q, k: (q - k >= one) & (q - k < other),
        lambda b, h, q, k: ((q - k > one) & (k - q <= 0)) | ((q - k < 0) & (-(q - k) < other)),
    ):
        assert torch.equal(as_read(rule), evaluated(rule))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b, h, q, k: q * 2 >= k, "unsupported operand"),
        (lambda b, h, q, k: abs(q - k) >= 3, "least distance in both directions"),
        (lambda b, h, q, k: q >= 3, "a number other than 0"),
        (lambda b, h, q, k: torch.ones(()), "it returns Tensor"),
        (lambda b, h, q, k: torch.ones(2, 4, dtype=torch.bool)[b, q], "hides queries by a table"),
        (lambda b, h, q, k: k // 4 == q // 3, "different sizes"),
        (lambda b, h, q, k: (k // 4 == q // 4) & (k // 3 == q // 3), "two chunk sizes"),
        (lambda b, h, q, k: q.new_zeros((), dtype=torch.bool), "allows no pair"),
    ],
)
def test_what_cannot_be_read(function, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pattern_from_mask_function(function, None)
