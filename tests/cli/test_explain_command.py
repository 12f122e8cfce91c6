"""`python -m flexdilated explain` prints what masks.explain returns, as a tree and as plain data."""

import json

import torch

from flexdilated import masks
from flexdilated.cli import main


def test_the_command_prints_what_masks_explain_returns(capsys):
    for text, pair, words in (
        ("longnet((2048, 4096, 8192), (1, 2, 4)) & causal()", (5000, 17, 3, 8), []),
        ("causal() + strided(4)", (40, 8, 0, 2), ["-n", "8K", "--heads", "2", "--block-size", "64"]),
    ):
        at = dict(zip(("query", "key", "head", "num_heads"), pair, strict=True))
        sizes = {"num_tokens": 8192, "block_size": 64} if words else {"num_tokens": 1 << 16}
        found = masks.explain(masks.parse(text), **at, **sizes)
        command = ["explain", text, *(f"--{name}={at[name]}" for name in ("query", "key", "head")), *words]
        assert main(command) == 0
        assert capsys.readouterr().out.splitlines() == str(found).splitlines()
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_data()))
    assert main(["explain", "causal()", "--query", "3K", "--key", "1k"]) == 0
    assert capsys.readouterr().out.startswith("query 3072, key 1024, head 0 of 8: allowed")


def test_tensors_come_with_the_command(capsys, tmp_path):
    torch.save(torch.tensor([[0] * 30 + [1] * 30, [0] * 60]), tmp_path / "ids.pt")
    given = ["--bind", f"ids={tmp_path / 'ids.pt'}", "--query", "35", "--key", "3"]
    for batch, verdict in (("0", "not allowed"), ("1", "allowed")):
        assert main(["explain", "causal().per_document(documents('ids'))", *given, "--batch", batch]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"query 35, key 3, head 0 of 8, batch entry {batch}: {verdict}\n")
        assert "documents('ids')" in said
