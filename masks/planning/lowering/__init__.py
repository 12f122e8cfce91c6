"""Lowering: express a branch of a mixture as terms, each computed by one kernel in some order of the tokens."""

from ._key_lists import KeyLists
from ._layouts import compact_terms, shared_terms
from ._shared_lists import IntervalTerm, PaddedTerm, SharedListTerm, interval_terms, padded_terms
from ._table import GATHERED_BYTES, TableProblems, TableTerm, tables_of_heads
from ._term import CountedPairs, Term
from ._windows import rule_of_joined_entries, without_scattered_keys
