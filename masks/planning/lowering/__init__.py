"""What a plan is made of: a branch as terms in some order of tokens."""

from ._intervals import IntervalTerm, interval_terms
from ._padded import PaddedTerm, SharedListTerm
from ._term import Term
from ._ways import compact_terms, shared_terms
from ._windows import one_after_another
