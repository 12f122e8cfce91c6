"""What a plan is made of: a branch as terms in some order of tokens."""

from ._compact import compact_terms
from ._lower import shared_terms
from ._one_sequence import one_after_another
from ._term import Term
