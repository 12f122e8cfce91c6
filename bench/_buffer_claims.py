"""Published figures about pools of buffers and about compressed messages, and what stands for them here."""

from ._claims import Claim
from ._result import at_least

_DARCSTAR = "DarcStar-Solutions-Tech/dilated-attention-pytorch, commit f6094f7"
_FIRST_RUN = "docs/benchmarks/all-implementations-optimization-2025-06-27-2217-UTC.md"
_SECOND_RUN = "docs/benchmarks/all-implementations-with-block-sparse-2025-06-28-0013-UTC.md"
_REPORT = "docs/reports/memory-pool-integration-summary-2025-06-28-0014-UTC.md"
_FINDINGS = "docs/benchmarks/by-type/other/2025-06-26-1121-UTC/block-sparse-optimization-findings.md"

PLAIN_TEMPORARIES = Claim(
    "a pool costs dilated attention time, at most this",
    "−95.7 % (the same benchmark, run again: −729.5 %)",
    f"{_DARCSTAR}, {_FIRST_RUN}; again: {_SECOND_RUN}",
    "a tensor of its size (8,192 tokens, 8 heads of 64, in float16: 8 MiB), written once: time saved by a lease",
    at_least(-95.7, "%"),
)
IMPROVED_TEMPORARIES = Claim(
    "a pool makes a variant of it faster",
    "+73.4 % (the same benchmark, run again: +17.0 %)",
    f"{_DARCSTAR}, {_FIRST_RUN}; again: {_SECOND_RUN}",
    "the same in float32, 16 MiB",
    at_least(73.4, "%"),
)
RING_TIME = Claim(
    "a pool makes a ring faster",
    "+4.3 % (two hours before: −35.2 %)",
    f"{_DARCSTAR}, {_SECOND_RUN}; before: {_FIRST_RUN}",
    "a step of a ring, forward and backward, with every buffer for what travels leased: time saved",
    at_least(4.3, "%"),
)
SPARSE_RING_TIME = Claim(
    "a pool makes a block-sparse ring faster",
    "+24.9 %",
    f"{_DARCSTAR}, {_SECOND_RUN}",
    "a step of the exchange, which is what sparse patterns take here, forward and backward: time saved",
    at_least(24.9, "%"),
)
MEMORY = Claim(
    "a pool saves memory",
    "15 to 30 % (expected; its own benchmarks measured 32 to 120 % more)",
    f"{_DARCSTAR}, CHANGELOG.md and README.md; measured: {_REPORT}",
    "the peak that these steps of the ring add to a rank's memory, with a pool and without: share saved",
    at_least(15, "%"),
)
MESSAGES = Claim(
    "compressed messages save communication",
    "50 to 70 % (expected)",
    f"{_DARCSTAR}, {_FINDINGS}",
    "bytes of keys and values in float32, heads of 64",
    at_least(50, "%"),
)
