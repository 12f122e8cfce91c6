"""Published figures that are measured again: what was claimed, where, and what stands for it here.

DarcStar is DarcStar-Solutions-Tech/dilated-attention-pytorch, fkodom is fkodom/dilated-attention-pytorch. Where a
range was claimed, its lower end is what has to be reached.
"""

from dataclasses import dataclass
from typing import Any

from ._measures import Row, Target, Timing, at_least, at_most

_DARCSTAR = "DarcStar-Solutions-Tech/dilated-attention-pytorch"
_CACHING = f"{_DARCSTAR}, commit f6094f7, docs/guides/optimization-guide.md"
_REPORT = f"{_DARCSTAR}, commit f6094f7, docs/reports/pattern-caching-performance-2025-06-29-1400-UTC.md"
_HEAD_PARALLEL = f"{_DARCSTAR}, commit c905f2b, docs/guides/head-parallel-optimization-fixes.md"
_FINDINGS = (
    f"{_DARCSTAR}, commit f6094f7, "
    "docs/benchmarks/by-type/other/2025-06-26-1121-UTC/block-sparse-optimization-findings.md"
)
_ANALYSIS = f"{_DARCSTAR}, commit f6094f7, docs/feasibility/memory-analysis.md"
_FKODOM = "fkodom/dilated-attention-pytorch, commit 87cda75, doc/benchmark.png and benchmark.py"


@dataclass(frozen=True)
class Claim:
    """`says`, in our words, and `claimed`, its figure, are the source's; `here` is what is measured in its stead."""

    says: str
    claimed: str
    source: str
    here: str
    target: Target

    def row(self, measured: float, timings: tuple[Timing, ...] = (), **detail: Any) -> Row:
        """The claim with what was measured."""
        return Row(
            self.says, self.target, measured, timings, {"claimed": self.claimed, "source": self.source, **detail}
        )


LOOK_UP = Claim(
    "a cached pattern is found sooner than it is made",
    "2.04 times as fast, on average",
    _REPORT,
    "planning a call of LongNet's branches 1024, 2048, 4096, with nothing cached, over looking the plan up",
    at_least(2.0, "×"),
)
CACHED_PASS = Claim(
    "caching patterns speeds up repeated forward passes",
    "2 times as fast",
    _CACHING,
    "the forward pass of that call, with the cache cleared before each pass, over the pass with all cached",
    at_least(2.0, "×"),
)
CACHED_MEMORY = Claim(
    "caching patterns lowers the peak memory of a forward pass",
    "276.01 MB to 212.01 MB: 23.2 % saved",
    _REPORT,
    "peak of the forward pass, inputs and output included, planned before it against planned within it",
    at_least(23.2, "%"),
)
HITS = Claim(
    "patterns are found in the cache while training",
    "at least 90 % hits",
    _CACHING,
    "share of hits over a short training run of several layers, in which batches of three lengths take turns",
    at_least(90.0, "%"),
)
NAIVE_MEMORY = Claim(
    "dilated attention needs less memory than naive attention, 8,192 tokens, 8 heads",
    "114 MB instead of 2,048 MB (computed): 94.4 % less",
    _HEAD_PARALLEL,
    "peak of a forward pass, inputs and output included, against attention by two matmuls and a softmax, measured too",
    at_least(94.4, "%"),
)
TOKEN_BYTES = Claim(
    "that peak for each token",
    "14.25 KB",
    _HEAD_PARALLEL,
    "the same peak over the number of tokens; q, k, v and the output alone are 8 KB of it",
    at_most(14.25, "KB"),
)
TUNED_BLOCKS = Claim(
    "tuned block sizes are faster than the default of 128",
    "10 to 20 % (expected)",
    _FINDINGS,
    "BigBird's pattern, whose own blocks have 64 tokens, forward: the time at block sides of 128 over the best of "
    "64, 128 and 256",
    at_least(1.10, "×"),
)
BLOCK_ORDER = Claim(
    "blocks that share keys, computed one after the other, use the processor's cache better",
    "5 to 15 % (expected)",
    _FINDINGS,
    "rows of blocks of a window, gathered in eager PyTorch: drawn order over ascending order",
    at_least(1.05, "×"),
)
FUSED_KERNEL = Claim(
    "a fused kernel is faster than separate matmuls over the active blocks",
    "20 to 30 % (expected)",
    _FINDINGS,
    "the same gathered blocks: two matmuls and a softmax over one call of flash attention",
    at_least(1.20, "×"),
)
FUSED_QKV = Claim(
    "one fused projection is faster than three, for q, k and v",
    "20 to 30 %",
    _ANALYSIS,
    "three linear layers over one of three times the width, forward",
    at_least(1.20, "×"),
)
LONG = Claim(
    "dilated attention is faster than dense attention at 128K tokens",
    "about 25 times: 56 s to 2.25 s, read off the figure",
    _FKODOM,
    "the source's sizes (4 heads of 8, one branch each: 8192, 16384, 32768 at rates 1, 2, 8), forward; dense "
    "attention is timed on a slice of the query rows over all keys and multiplied, as its cost is linear in them",
    at_least(25.0, "×"),
)

# In the order of the page of claims.
CLAIMS = (
    LOOK_UP, CACHED_PASS, CACHED_MEMORY, HITS, NAIVE_MEMORY, TOKEN_BYTES, TUNED_BLOCKS, BLOCK_ORDER, FUSED_KERNEL,
    FUSED_QKV, LONG,
)  # fmt: skip

# About pools of buffers and about compressed messages: docs/communication_buffers.md shows them.
_FIRST_RUN = "docs/benchmarks/all-implementations-optimization-2025-06-27-2217-UTC.md"
_SECOND_RUN = "docs/benchmarks/all-implementations-with-block-sparse-2025-06-28-0013-UTC.md"
_POOL_REPORT = "docs/reports/memory-pool-integration-summary-2025-06-28-0014-UTC.md"

PLAIN_TEMPORARIES = Claim(
    "a pool costs dilated attention time, at most this",
    "−95.7 % (the same benchmark, run again: −729.5 %)",
    f"{_DARCSTAR}, commit f6094f7, {_FIRST_RUN}; again: {_SECOND_RUN}",
    "a tensor of its size (8,192 tokens, 8 heads of 64, in float16: 8 MiB), written once: time saved by a lease",
    at_least(-95.7, "%"),
)
IMPROVED_TEMPORARIES = Claim(
    "a pool makes a variant of it faster",
    "+73.4 % (the same benchmark, run again: +17.0 %)",
    f"{_DARCSTAR}, commit f6094f7, {_FIRST_RUN}; again: {_SECOND_RUN}",
    "the same in float32, 16 MiB",
    at_least(73.4, "%"),
)
RING_TIME = Claim(
    "a pool makes a ring faster",
    "+4.3 % (two hours before: −35.2 %)",
    f"{_DARCSTAR}, commit f6094f7, {_SECOND_RUN}; before: {_FIRST_RUN}",
    "a step of a ring, forward and backward, with every buffer for what travels leased: time saved",
    at_least(4.3, "%"),
)
SPARSE_RING_TIME = Claim(
    "a pool makes a block-sparse ring faster",
    "+24.9 %",
    f"{_DARCSTAR}, commit f6094f7, {_SECOND_RUN}",
    "a step of the exchange, which is what sparse patterns take here, forward and backward: time saved",
    at_least(24.9, "%"),
)
MEMORY = Claim(
    "a pool saves memory",
    "15 to 30 % (expected; its own benchmarks measured 32 to 120 % more)",
    f"{_DARCSTAR}, commit f6094f7, CHANGELOG.md and README.md; measured: {_POOL_REPORT}",
    "the peak that these steps of the ring add to a rank's memory, with a pool and without: share saved",
    at_least(15, "%"),
)
MESSAGES = Claim(
    "compressed messages save communication",
    "50 to 70 % (expected)",
    _FINDINGS,
    "bytes of keys and values in float32, heads of 64",
    at_least(50, "%"),
)
