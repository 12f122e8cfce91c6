"""Lowering: a branch as terms, each in some order of tokens."""

from ._shared_lists import IntervalTerm, PaddedTerm, SharedListTerm, interval_terms, padded_terms
from ._term import Term
from ._ways import compact_terms, shared_terms
from ._weights import CountedPairs
from ._windows import one_after_another, without_scattered_keys
