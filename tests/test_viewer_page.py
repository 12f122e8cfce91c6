"""The viewer's file: what it holds, what it refuses, and who may use it without a browser at hand."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from hashlib import sha256
from importlib.resources import files
from zlib import decompress

import pytest
import torch

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.viewer import Ranks, page
from flexdilated.viewer._page import _SCRIPTS, LARGEST_PAGE
from tests import oracle

LONGNET = masks.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]) & masks.causal()
WEB = files("flexdilated.viewer").joinpath("web")


def data_of(text: str) -> dict:
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    return json.loads(decompress(b64decode(packed)))


def test_a_page_is_one_small_file_that_asks_for_nothing():
    text = page(LONGNET, 1 << 20, num_heads=8, ranks=Ranks(num_ranks=32))
    assert len(text.encode()) < LARGEST_PAGE == 300_000
    assert "{{" not in re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=|@import|url\(|https?:", text)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    digests = []
    for name in ("script", "style"):
        (held,) = re.findall(f"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
        digests.append(f"{name}-src 'sha256-{b64encode(sha256(held.encode()).digest()).decode()}'")
    assert policy == f"default-src 'none'; {'; '.join(digests)}; base-uri 'none'; form-action 'none'"


def test_the_title_is_text_and_nothing_else():
    text = page(masks.causal(), 8, title='<script>alert("&")</script> {{data}}')
    assert "<title>&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt; {{data}}</title>" in text
    assert "<title>Who attends to whom</title>" in page(masks.causal(), 8)


def test_every_file_is_used_once_and_short():
    scripts = {file.name.removesuffix(".js") for file in WEB.iterdir() if file.name.endswith(".js")}
    assert sorted(scripts) == sorted(_SCRIPTS)
    for file in WEB.iterdir():
        lines = file.read_text("utf-8").splitlines()
        assert len(lines) < 300, file.name
        assert max(map(len, lines)) <= 120, (file.name, max(lines, key=len))


def test_the_data_is_the_pattern_and_its_sizes():
    data = data_of(page(LONGNET, 5000, num_heads=8, num_keys=7000, head=3))
    sizes = [data[name] for name in ("num_queries", "num_keys", "num_heads", "head", "residue", "ranks")]
    assert sizes == [5000, 7000, 8, 3, 16, None]
    assert [without_phrases(branch) for branch in data["branches"]] == json.loads(masks.to_json(LONGNET))["parts"]


def without_phrases(data):
    if isinstance(data, list):
        return [without_phrases(each) for each in data]
    return {k: without_phrases(v) for k, v in data.items() if k != "phrase"} if isinstance(data, dict) else data


def test_run_time_tensors_become_runs():
    ids = torch.tensor([[0, 0, 1, -1, -1, 4, 4, 4], [0, 0, 0, 0, 0, 0, 0, 0]])
    spans = data_of(page(masks.documents(ids), 8))["branches"][0]
    expected = {"kind": "spans", "word": "document", "gaps": [0, 0, 2], "lengths": [2, 1, 3]}
    assert {k: v for k, v in spans.items() if k != "phrase"} == expected
    assert data_of(page(masks.documents(ids), 8, batch=1))["branches"][0]["lengths"] == [8]
    hidden = torch.tensor([True, False, False, True, True, False, False, False])
    keys = data_of(page(masks.visible_keys(hidden), 8))["branches"][0]
    assert (keys["kind"], keys["gaps"], keys["lengths"]) == ("visible_keys", [0, 2], [1, 2])


def test_only_orders_that_are_a_change_are_offered():
    assert data_of(page(masks.causal(), 100))["residue"] is None
    assert data_of(page(masks.strided(7), 100))["residue"] == 7
    assert data_of(page(masks.strided(70), 60))["residue"] is None  # more classes than tokens
    assert data_of(page(masks.strided(65_537) | masks.strided(65_539), 100_000))["residue"] is None


def test_ranks_see_the_batch_entry_that_is_shown():
    ids = torch.tensor([[0] * 16, [0] * 8 + [1] * 8])
    for entry, size in ((0, 8 * 2 * 64 * 4), (1, 0)):
        told = data_of(page(masks.documents(ids), 16, batch=entry, ranks=Ranks(num_ranks=2)))["ranks"]
        assert told["shardings"]["contiguous"]["received"] == [[0, size], [size, 0]]


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_bytes_between_ranks_are_those_of_the_dense_rule(sharding):
    tokens, heads, kv_heads = 61, 4, 2
    pattern = masks.longnet([8, 32], [1, 4]) & masks.causal()
    rule = oracle.both(oracle.longnet([8, 32], [1, 4], offsets="interleaved", heads="all"), oracle.causal())
    ranks = Ranks(num_ranks=4, sharding=sharding, num_kv_heads=kv_heads, head_dim=5, dtype=torch.float16, batch=3)
    told = data_of(page(pattern, tokens, num_heads=heads, ranks=ranks))["ranks"]
    assert told["first"] == sharding
    everything = torch.arange(tokens)
    seen = oracle.counts(rule, range(heads), heads, everything, everything) > 0
    needed = seen.view(kv_heads, heads // kv_heads, tokens, tokens).any(1)  # of each KV head, by its query heads
    for order in ("contiguous", "zigzag"):
        held = Sharding(tokens, 4, order)
        for target in range(4):
            runs = [[run.start, run.stop] for run in held.ranges(target)]
            assert told["shardings"][order]["runs"][target] == runs
            for source in range(4):
                keys = needed[:, held.positions(target)].any(1)[:, held.positions(source)]
                size = 0 if target == source else int(keys.sum()) * 2 * 3 * 5 * 2
                assert told["shardings"][order]["received"][target][source] == size


def custom_rule(b, h, q, k):
    return q >= k


NOISE = torch.randint(0, 2, (1_500_000,), generator=torch.Generator().manual_seed(0)) > 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: page("causal", 8), "pattern must be a pattern or mixture from flexdilated.masks; got str"),
        (lambda: page(masks.causal(), 0), "num_tokens must be at least 1; got num_tokens=0"),
        (lambda: page(masks.causal(), 2**31), "num_tokens must be at most 2147483647"),
        (lambda: page(masks.causal(), 8, num_heads=0), "num_heads must be at least 1"),
        (lambda: page(masks.causal(), 8, num_heads=2, head=2), "head must be below the number of heads; got head=2"),
        (lambda: page(masks.causal(), 8, num_keys=0), "num_keys must be at least 1"),
        (
            lambda: page(masks.documents([0, 0, 1]), 3, batch=1),
            "batch must be below the number of batch entries; got batch=1 of 1",
        ),
        (lambda: page(masks.documents("ids"), 3), "the pattern needs the run-time tensor 'ids'"),
        (lambda: page(masks.documents([0, 0, 1]), 4), "document ids must be one for each of the 4 positions"),
        (lambda: page(masks.per_head([masks.causal()] * 3), 8, num_heads=2), "got 3 for 2 heads"),
        (lambda: page(masks.custom(custom_rule), 8), "a custom function has none: write the rule with the patterns"),
        (lambda: page(~masks.custom(custom_rule) & masks.causal(), 8), "or list its blocks with masks.block_list; got"),
        (lambda: page(masks.visible_keys(NOISE), 1_500_000), "a page must hold the whole rule in 300,000 bytes; got"),
        (lambda: page(masks.causal(), 8, num_keys=9, ranks=Ranks(num_ranks=2)), "ranks share one sequence"),
        (lambda: page(masks.causal(), 8, ranks=4), "ranks must be a Ranks(num_ranks=...) or None; got 4"),
        (lambda: page(masks.causal(), 8, title=b"x"), "title must be a string or None; got b'x'"),
        (lambda: page(masks.causal(), 8, num_heads=3, ranks=Ranks(num_ranks=2, num_kv_heads=2)), "must divide"),
        (lambda: Ranks(num_ranks=0), "num_ranks must be at least 1"),
        (lambda: Ranks(num_ranks=129), "num_ranks must be at most 128; got num_ranks=129"),
        (lambda: Ranks(num_ranks=2, sharding="striped"), "sharding must be one of 'contiguous', 'zigzag'"),
        (lambda: Ranks(num_ranks=2, head_dim=0), "head_dim must be at least 1"),
        (lambda: Ranks(num_ranks=2, dtype=torch.int8), "rows must be float64, float32, bfloat16 or float16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make, says):
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert says in str(raised.value)
