"""Every command that takes a pattern reads it the same way, and takes the sizes that it fixes."""

from __future__ import annotations

from argparse import Namespace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.cli._pattern import AskedPattern, asked_from, most_tokens
from flexdilated.cli._terminal import UsageError, size_of
from tests.support.commands import make_light

COMMANDS = {
    "show": ["--json"],
    "explain": ["--query", "3", "--key", "2", "--json"],
    "plan": ["--json"],
    "plan, ranks": ["--json", "--ranks", "2"],
    "check": ["--json"],
}


@pytest.fixture
def files(tmp_path, monkeypatch) -> None:
    make_light(tmp_path, monkeypatch)
    Path("p.json").write_text(masks.to_json(masks.strided(5)), encoding="utf-8")
    module = "from flexdilated import masks\nfirst = masks.every()\nmine = masks.strided(5)\nlast = masks.causal()\n"
    Path("p.py").write_text(module, encoding="utf-8")
    Path("broken.json").write_text("{", encoding="utf-8")
    Path("binary.json").write_bytes(b"\xff\x00")
    Path("ends.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    Path("folder.json").mkdir()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_expression_a_file_and_a_module_are_one_pattern(command, capsys) -> None:
    size = [] if command == "check" else ["-n", "40"]
    told = []
    for pattern in ("strided(5)", "p.json", "p.py:mine"):
        assert main([command.partition(",")[0], pattern, *size, *COMMANDS[command]]) in (0, 1)
        told.append(capsys.readouterr().out)
    assert "strided(5)" in told[0]
    assert told[0] == told[1] == told[2]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_pattern_is_refused_by_all(command, capsys) -> None:
    texts = ["", "chunked(", "causal() + 3", "(" * 2000]
    files = ["none.json", "folder.json", "broken.json", "binary.json"]
    for pattern in (*texts, *files, "none.py:mine", "p.py:other", "ends.py:mine", "p.py:"):
        assert main([command.partition(",")[0], pattern, *COMMANDS[command]]) == 2, pattern
        said = capsys.readouterr()
        assert said.out == ""
        assert "error: " in said.err


def ask(pattern: str, tokens: str | None = None, bind: tuple[str, ...] = ()) -> AskedPattern:
    return asked_from(Namespace(pattern=pattern, tokens=tokens, heads=None, bind=bind))


@given(
    grid=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    around=st.sampled_from(
        ["{}", "{} & causal()", "causal() | {}", "~{}", "{} + strided(4)", "head_groups([causal(), {}])"]
    ),
    block=st.integers(1, 9),
)  # fmt: skip
def test_tokens_default_to_those_of_the_grid(grid, around, block) -> None:
    """Through whatever it stands in; a grid of blocks has as many tokens as its blocks."""
    text = f"neighborhood(({', '.join(map(str, grid))},), 0)"
    plain, blocks = around.format(text), around.format(f"blockwise({text}, {block})")
    assert ask(plain).num_tokens == prod(grid)
    assert ask(blocks).num_tokens == prod(grid) * block
    assert most_tokens(masks.parse(around.format("strided(3)"))) is None
    assert ask(around.format("strided(3)")).num_tokens == 65536
    with pytest.raises(UsageError, match=f"up to position {prod(grid)} and"):
        ask(plain, str(prod(grid) + 1))


def test_sizes_in_full_in_k_and_in_m() -> None:
    assert [size_of(text) for text in ("65536", "64K", " 1m ", "0")] == [65536, 65536, 1 << 20, 0]
    assert [size_of(text) for text in ("", "K", "-5", "64k tokens", "1.5K", "9" * 30, "64G", "²")] == [None] * 8


def test_help_names_what_was_started_and_there_is_a_version(capsys) -> None:
    for program in ("flexdilated", "python -m flexdilated"):
        with pytest.raises(SystemExit, match="0"):
            main(["plan", "--help"], program=program)
        assert capsys.readouterr().out.startswith(f"usage: {program} plan [-h]")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"flexdilated {flexdilated.__version__}\n"


@pytest.mark.parametrize(
    ("pattern", "tensor", "tokens"),
    [
        ("documents('d')", torch.zeros(12, dtype=torch.int64), 12),
        ("causal().per_document(documents('d'))", torch.zeros(2, 20, dtype=torch.int64), 20),
        ("lengths('d')", torch.tensor([7, 90]), 90),
        ("visible_keys('d')", torch.ones(33, dtype=torch.bool), 33),
    ],
)
def test_tokens_default_to_those_of_the_tensor_and_heads_to_those_of_the_pattern(pattern, tensor, tokens, tmp_path):
    torch.save(tensor, tmp_path / "d.pt")
    found = ask(f"{pattern} & per_head([causal(), chunked(3), chunked(4)])", bind=(f"d={tmp_path / 'd.pt'}",))
    assert (found.num_tokens, found.num_heads) == (tokens, 3)
