"""The commands as tests run them: all options with a value each; what takes long only says what it was asked."""

import functools
from argparse import _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexdilated.cli import main
from flexdilated.cli._main import _parser
from flexdilated.cli._terminal import CommandParser
from flexdilated.memory._memory import AttentionMemory, AttentionSize
from flexdilated.nn._model_memory import ModelMemory

# Of every option a value that differs from its default.
PATTERN = {"tokens": ["-n", "48"], "heads": ["--heads", "4"], "bind": ["--bind", "d=two.pt"]}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "show": {
        **PATTERN, "head": ["--head", "1"], "order": ["--order", "residue"], "rows": ["--rows", "3:45"],
        "cols": ["--cols", "2:46"], "cells": ["--cells", "3x5"], "batch": ["--batch", "1"],
        "color": ["--color", "always"], "brief": ["--brief"], "json": ["--json"], "plot": ["--plot", "out.png"],
        "html": ["--html", "out.html"],
    },
    "explain": {
        **PATTERN, "query": ["--query", "21"], "key": ["--key", "4"], "head": ["--head", "1"],
        "batch": ["--batch", "1"], "block_size": ["--block-size", "33"], "json": ["--json"],
    },
    "plan": {
        **PATTERN, "bind": ["--bind", "d=one.pt"], "kv_heads": ["--kv-heads", "2"], "head_dim": ["--head-dim", "32"],
        "value_dim": ["--value-dim", "112"], "dropout_p": ["--dropout-p", "0.25"],
        "dtype": ["--dtype", "bf16"], "device": ["--device", "cuda"], "batch": ["--batch", "3"],
        "layers": ["--layers", "2"], "embed_dim": ["--embed-dim", "768"], "budget": ["--budget", "1"],
        "measure": ["--measure"], "json": ["--json"], "ranks": ["--ranks", "3"], "order": ["--order", "zigzag"],
        "schedule": ["--schedule", "ring"], "codec": ["--codec", "int8"],
    },
    "check": {
        "examples": ["--examples", "3"], "heads": ["--heads", "2"], "max_tokens": ["--max-tokens", "9"],
        "seed": ["--seed", "5"], "json": ["--json"],
    },
    "tune": {"device": ["--device", "meta"], "seconds": ["--seconds", "2"]},
}  # fmt: skip
# What stands before them. A pattern has run-time tensors where --bind or --batch is asked for, and heads that differ.
MODULE = """
import torch
from flexdilated import masks
plain = masks.head_groups([masks.dilated(8, 2, "interleaved") & masks.causal(), masks.chunked(5)])
light = masks.causal()
mine = light & masks.lengths(torch.tensor(40), name="d")
several = plain & masks.lengths(torch.tensor([40, 25]), name="d")
"""
FILES = ("out.png", "out.html", "out.json")


def parsers() -> dict[str, CommandParser]:
    """Of each command."""
    (action,) = (each for each in _parser("flexdilated")._actions if isinstance(each, _SubParsersAction))
    return dict(action.choices)


def first_words(command: str, options: frozenset[str]) -> list[str]:
    """The command, and what it cannot be without."""
    if command == "tune":
        return [command, "out.json"]
    several = command in ("show", "explain") and options & {"bind", "batch"}
    name = "several" if several else "mine" if "bind" in options else "light" if command == "plan" else "plain"
    size = [] if command == "check" or options & {"tokens", "budget"} else ["-n", "64"]
    return [command, f"mine.py:{name}", *size]


def needed(command: str, options: frozenset[str]) -> list[str]:
    """A pair to explain."""
    pair = {"query": ["--query", "47"], "key": ["--key", "2"]} if command == "explain" else {}
    return [word for name, words in pair.items() if name not in options for word in words]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(status, what was printed and written, what was said of errors)."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as ended:  # argparse
        status = int(ended.code or 0)
    said = capsys.readouterr()
    written = [(name, Path(name).read_bytes()) for name in FILES if Path(name).exists()]
    for name, _ in written:
        Path(name).unlink()
    return status, f"{said.out}{written}", said.err


def make_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a module of patterns; what takes long answers with what it was asked; one parser serves all."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODULE, encoding="utf-8")
    torch.save(torch.tensor(30), "one.pt")
    torch.save(torch.tensor([30, 35]), "two.pt")
    make_memory_up(monkeypatch)
    monkeypatch.setattr("flexdilated._plan.measure_options", lambda *given, **named: [(f"{given}", 1.0, 1.0)])
    monkeypatch.setattr("flexdilated.masks.plot", _Told)
    monkeypatch.setattr("flexdilated.cli._show.describe", _Told)
    monkeypatch.setattr("flexdilated.cli._check._steps", _steps)
    monkeypatch.setattr("flexdilated.cli._device.available_devices", lambda: ("cpu", "meta"))
    monkeypatch.setattr("flexdilated._engine_choice._has_triton", lambda: True)
    monkeypatch.setattr("flexdilated.cli._device.measure_machine", _measure_machine)
    monkeypatch.setattr("flexdilated.cli._device._constants_table", lambda found: found.text)
    monkeypatch.setattr("flexdilated.cli._main._parser", functools.cache(_parser))


def make_memory_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory model runs a call on no memory, which takes seconds: for tests of something else."""
    monkeypatch.setattr("flexdilated._plan_size.attention_memory", memory_of_call)
    for module in ("flexdilated.cli._plan", "flexdilated._plan"):
        monkeypatch.setattr(f"{module}.model_memory", _memory_of_model)


def memory_of_call(
    pattern: Any, size: AttentionSize, *, device: str, engine: str, drops: bool, score_mod: Any, planned: Any
) -> AttentionMemory:
    """Numbers that depend on all that is asked, and rise with the tokens."""
    engines = ["aten", "flex", "portable"]
    many = 1 + engines.index(engine) + (device != "cpu") + drops + (score_mod is not None)
    q, k, v, out = (many * each for each in size.nbytes)
    return AttentionMemory(q, k + v, out, 4, q + k + v, q + k + v, 2 * q, 3 * q, len(pattern.text))


def _memory_of_model(size: Any, num_tokens: int, call: AttentionMemory, *, checkpoint: bool) -> ModelMemory:
    weights = size.depth * size.embed_dim * size.dtype.itemsize
    step = call.training_peak * (1 if checkpoint else size.depth)
    return ModelMemory(weights, weights + call.inference_peak, weights + step)


class _Told:
    """What was asked, in every form."""

    def __init__(self, *given: Any, **named: Any) -> None:
        values = [tensor.tolist() for tensor in given[0].given_tensors().values()]
        self._text = f"{given} {named} {values}"

    def __str__(self) -> str:
        return self._text

    def to_data(self) -> str:
        return self._text

    def savefig(self, buffer: Any, **how: Any) -> None:
        buffer.write(f"{self._text} {how}".encode())


def _steps(pattern: Any, **asked: Any) -> Iterator[tuple[int, str]]:
    yield 1, "the rule"
    raise AssertionError(f"{pattern!r} {asked}")


def _measure_machine(device: Any, *, seconds: float) -> Any:
    text = f"{device} {seconds}"
    return SimpleNamespace(text=text, spread={"": 1.0}, to_data=lambda: {"text": text})
