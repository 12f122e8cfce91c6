"""`explain`: one pair of a pattern, rule by rule."""

from __future__ import annotations

import argparse
import json

from ..masks import explain as explain_pair
from ._pattern_arguments import asked_from
from ._usage import UsageError


def explain(options: argparse.Namespace) -> int:
    """Print the tree of reasons, or the same as plain data. Status 0 whether the pair is allowed or not."""
    asked = asked_from(options)
    asked.require(head=options.head, batch=options.batch)
    pair = {"query": options.query, "key": options.key, "head": options.head, "batch": options.batch}
    sizes = {"num_heads": asked.num_heads, "num_tokens": asked.num_tokens, "block_size": options.block_size}
    try:
        found = explain_pair(asked.pattern, **pair, **sizes)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(json.dumps(found.to_data(), indent=2) if options.json else found)
    return 0
