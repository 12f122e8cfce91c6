"""`python -m flexdilated explain`: the tree, plain data, run-time tensors, and what is refused."""

import json

import pytest
import torch

from flexdilated import masks
from flexdilated.cli import main

LONGNET = "longnet((2048, 4096, 8192), (1, 2, 4)) & causal()"


def test_the_pair_of_the_readme(capsys):
    assert main(["explain", LONGNET, "--query", "5000", "--key", "17", "--head", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    pair = {"query": 5000, "key": 17, "head": 3, "num_heads": 8}
    assert said == str(masks.explain(masks.parse(LONGNET), **pair, num_tokens=1 << 16)).splitlines()
    assert said[0] == "query 5000, key 17, head 3 of 8: not allowed"
    assert said[1].endswith(": none of 3 branches allows it")
    assert said[-1].endswith("slots 1250 and 16388: block (9, 128) allows none of its 16384 pairs and is left out")


def test_json_is_the_same(capsys):
    size = ["-n", "8K", "--heads", "2", "--block-size", "64"]
    assert main(["explain", "causal() + strided(4)", "--query", "40", "--key", "8", *size, "--json"]) == 0
    pattern = masks.parse("causal() + strided(4)")
    found = masks.explain(pattern, query=40, key=8, num_heads=2, num_tokens=8192, block_size=64)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_data()))
    assert found.multiplicity == 2


def test_tensors_come_with_the_command(capsys, tmp_path):
    pattern = "causal().per_document(documents('ids'))"
    torch.save(torch.tensor([[0] * 30 + [1] * 30, [0] * 60]), tmp_path / "ids.pt")
    given = ["--bind", f"ids={tmp_path / 'ids.pt'}", "--query", "35", "--key", "3"]
    for batch, verdict in (("0", "not allowed"), ("1", "allowed")):
        assert main(["explain", pattern, *given, "--batch", batch]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"query 35, key 3, head 0 of 8, batch entry {batch}: {verdict}\n")
        assert "documents('ids')" in said


def test_positions_as_people_write_them(capsys):
    assert main(["explain", "causal()", "--query", "3K", "--key", "1k"]) == 0
    assert capsys.readouterr().out.startswith("query 3072, key 1024, head 0 of 8: allowed")
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "causal()", "--query", "1e3", "--key", "2"])
    assert "a position must be a whole number, such as 5000 or 64K; got '1e3'" in capsys.readouterr().err


def test_a_pair_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "causal()", "--query", "3"])
    assert "--key" in capsys.readouterr().err
