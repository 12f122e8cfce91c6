"""The viewer's file: what it holds, what it refuses, and who may use it without a browser at hand."""

import json
import re
from base64 import b64decode, b64encode
from hashlib import sha256
from zlib import decompress

import pytest
import torch

from flexdilated import masks
from flexdilated.viewer import _page, page
from flexdilated.viewer._page import LARGEST_PAGE

LONGNET = masks.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]) & masks.causal()


def data_of(text: str) -> dict:
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    return json.loads(decompress(b64decode(packed)))


def test_a_page_is_one_small_file_that_asks_for_nothing():
    text = page(LONGNET, 1 << 20, num_heads=8)
    assert len(text.encode()) < 150_000 < LARGEST_PAGE == 4_000_000
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


def test_the_data_is_the_traced_pattern_and_its_sizes(monkeypatch):
    monkeypatch.setattr(_page, "_TILES", 16)
    data = data_of(page(LONGNET, 5000, num_heads=8, num_keys=7000, head=3))
    sizes = [data[name] for name in ("num_queries", "num_keys", "num_heads", "head", "residue")]
    assert sizes == [5000, 7000, 8, 3, 16]
    assert [branch["phrase"] for branch in data["branches"]] == [repr(branch) for branch in LONGNET.branches()]
    assert data["command"] is None  # of queries and keys that differ, of functions, and of values
    for pattern in (masks.custom(lambda b, h, q, k: q >= k), LONGNET & masks.documents(torch.zeros(8).long())):
        assert data_of(page(pattern, 8))["command"] is None
    small = data_of(page(masks.causal() & ~masks.strided(2), 8))
    nodes = [["head"], ["query"], ["key"], ["le", 2, 1], ["sub", 1, 2], ["const", 2], ["mod", 4, 5], ["const", 0],
             ["eq", 6, 7], ["not", 8], ["and", 3, 9]]  # fmt: skip
    assert (small["program"]["nodes"][: len(nodes)], small["program"]["tables"]) == (nodes, [])
    (branch,) = small["branches"]
    assert (branch["node"], [part["node"] for part in branch["parts"]]) == (10, [3, 9])


def test_only_orders_that_are_a_change_are_offered():
    assert data_of(page(masks.causal(), 100))["residue"] is None
    assert data_of(page(masks.strided(7), 100))["residue"] == 7
    assert data_of(page(masks.strided(70), 60))["residue"] is None  # more classes than tokens
    assert data_of(page(masks.strided(65_537) | masks.strided(65_539), 100_000))["residue"] is None


def test_a_page_that_is_too_large_is_refused(monkeypatch):
    noise = torch.randint(0, 2, (400_000,), generator=torch.Generator().manual_seed(0)) > 0
    monkeypatch.setattr(_page, "LARGEST_PAGE", 120_000)
    with pytest.raises(ValueError, match=r"a page must hold the whole rule in 120,000 bytes; got 1.*take fewer tokens"):
        page(masks.visible_keys(noise), len(noise))
