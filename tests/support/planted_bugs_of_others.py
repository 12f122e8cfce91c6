"""What other libraries do at a step of attention, planted in a dense attention that is right as it stands."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from flexdilated import masks
from flexdilated.testing import Calls, check_attention_module
from tests.support import oracle, wrong_attention
from tests.support.planted_bugs import Bug, Look

SEGMENTS, RATES = (6, 12), (1, 2)
PATTERN = masks.longnet(segment_lengths=SEGMENTS, dilation_rates=RATES) & masks.causal()


def module() -> wrong_attention.Dense:
    """LongNet, causal."""
    branches = zip(SEGMENTS, RATES, strict=True)
    return wrong_attention.Dense(
        *(oracle.both(oracle.dilated(*sizes, "interleaved"), oracle.causal()) for sizes in branches)
    )


def _padded(module: wrong_attention.Dense, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return module(q, k, v, hidden)


@cache
def _look(check: str) -> Look:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "max_tokens": 26, "examples": 6}
    return lambda: check_attention_module(module, PATTERN, calls=Calls(padded=_padded), checks=[check], **sizes)


def _bug(what: str, kind: type[wrong_attention.Dense], check: str, says: str, seen_in: str = "") -> Bug:
    """A module of this kind in the place of the right one."""
    named = f"check_attention_module: {check}"
    return Bug(what, "tests.support.wrong_attention:Dense", lambda _: kind, _look(check), named, says, seen_in)


OF_OTHERS = (
    _bug(
        "softmax over the heads instead of the keys", wrong_attention.SoftmaxOverHeads, "coverage",
        "the weights of this query add up to", "darcstar",
    ),
    _bug(
        "parts normalised each by itself, then added up", wrong_attention.SummedMerge, "agreement",
        "as if each branch has a softmax of its own, and the results are summed", "darcstar",
    ),
    Bug(
        "`causal` left out of the dilated branches", "tests.support.planted_bugs_of_others:oracle.causal",
        lambda _: oracle.every, _look("causality"), "check_attention_module: causality", "is hidden from query",
        "darcstar",
    ),
    _bug(
        "a padding mask that nothing reads", wrong_attention.PaddingUnread, "padding", "is not applied",
        "darcstar, torchscale",
    ),
    _bug(
        "division by the sum over all positions", wrong_attention.DividedByAll, "causality", "is hidden from query",
        "fkodom",
    ),
    _bug(
        "unequal groups of heads: the last heads never written", wrong_attention.UnwrittenHeads, "coverage",
        "takes no part", "fkodom",
    ),
    _bug(
        "zero padding of the last segment takes part in the softmax", wrong_attention.ZeroPadding, "agreement",
        "keys more, of score 0 and value 0, take part in the softmax", "torchscale",
    ),
    _bug("weights of the merge detached", wrong_attention.DetachedMerge, "gradients", "dq is wrong", "torchscale"),
    _bug(
        "causal sequence parallelism without the rank's own keys", wrong_attention.OtherShards, "coverage",
        "is allowed and takes no part", "torchscale",
    ),
    _bug(
        "key/value heads repeated in the wrong order", wrong_attention.CycledHeads, "agreement",
        "as if query head h reads key/value head h % G, not h // (H / G)",
    ),
    _bug(
        "one entry's padding mask used for the whole batch", wrong_attention.PaddingOfFirst, "padding",
        "out is wrong",
    ),
)  # fmt: skip
