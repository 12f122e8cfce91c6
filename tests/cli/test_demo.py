"""The demo as a user runs it: end to end at small sizes, cut short, gone on with, and asked for nonsense."""

import json
import os
import random
import shutil
import signal
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from flexdilated.cli import _demo_model, _demo_training, main
from flexdilated.masks.plan_cache import bytes_from_environment
from tests.support.commands import parsers

FILES = ["checkpoint.pt", "loss.png", "mask.png", "report.json"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder of 24 files of made-up source, 60 kB."""
    folder = tmp_path_factory.mktemp("text")
    words = ["def ", "return ", "self", "(", ")", ":\n    ", "value", " = ", "None\n", "import ", "for ", "in "]
    draw = random.Random(0)
    for number in range(24):
        (folder / f"{number}.py").write_text("".join(draw.choices(words, k=600)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True, scope="module")
def narrow_model():
    """Half as wide as that of users, and a quarter of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_demo_model, "_EMBED_DIM", 64)
        yield


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch) -> None:
    """Drawing takes longer than these trainings: only some tests have matplotlib."""
    if "pictures" not in request.keywords:
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory) -> Path:
    """The folder of a run of 6 steps without extras, and what it printed; those who go on from it take a copy."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        for package in ("matplotlib", "tqdm"):
            patch.setitem(sys.modules, package, None)
        assert run(folder, text) == 0
    (folder / "printed").write_text(printed.getvalue(), encoding="utf-8")
    return folder


def run(out: Path, text: Path, *more: str) -> int:
    return main(["demo", "--context", "256", "--steps", "6", "--out", str(out), "--data", str(text), *more])


def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


@pytest.mark.pictures
def test_end_to_end(tmp_path: Path, text: Path, capsys) -> None:
    """One command trains, prints one table and leaves four files; the numbers in table and report agree."""
    out = tmp_path / "new" / "out"
    assert run(out, text, "--steps", "20") == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert all((out / name).read_bytes().startswith(PNG) for name in ("loss.png", "mask.png"))
    results = report(out)["results"]
    assert results["before"] == pytest.approx(8.0, abs=1e-3)
    assert results["after"] < results["unigram"] - 0.7
    assert results["steps"] == len(report(out)["history"]) == 20
    assert f"{results['after']:.3f}" in printed
    assert f"{results['time']['dense_ms']:.1f} ms" in printed
    assert results["density"] == pytest.approx(257 / 512)
    for measure in ("unigram", "bigram", "hits and misses", "computed / useful", "faster by"):
        assert measure in printed


def test_several_branches(tmp_path: Path, text: Path) -> None:
    """At 1024 bytes the pattern is a mixture, and the loss falls all the same."""
    assert run(tmp_path, text, "--context", "1024", "--steps", "3") == 0
    assert report(tmp_path)["config"]["model"]["segment_lengths"] == [256, 1024]
    assert report(tmp_path)["history"][-1] < report(tmp_path)["history"][0] - 0.1


def test_another_seed_is_another_run(tmp_path: Path, text: Path, finished: Path) -> None:
    """And torch's random state stays as it was. Equal seeds: the test of samples."""
    state = torch.get_rng_state()
    assert run(tmp_path, text, "--seed", "2", "--steps", "2") == 0
    assert report(tmp_path)["history"][1] != report(finished)["history"][1]
    assert torch.equal(torch.get_rng_state(), state)


def test_resume_equals_an_uninterrupted_run(tmp_path: Path, text: Path, finished: Path, monkeypatch, capsys) -> None:
    """Stopped after 4 of 6 steps and resumed: bit for bit the losses and the results of 6 steps in one go; then 8."""
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        assert run(tmp_path, text) == 0
    printed, errors = capsys.readouterr()
    assert "training ended by" in printed
    assert "Traceback" not in errors
    assert report(tmp_path)["results"]["ended_by"] == "Ctrl-C"
    assert report(tmp_path)["history"] == report(finished)["history"][:4]
    assert run(tmp_path, text, "--resume") == 0
    assert report(tmp_path)["history"] == report(finished)["history"]
    for name in ("before", "after"):
        assert report(tmp_path)["results"][name] == report(finished)["results"][name]
    assert run(tmp_path, text, "--steps", "8", "--resume") == 0
    assert report(tmp_path)["results"]["steps"] == len(report(tmp_path)["history"]) == 8


def stop_after(steps: int, monkeypatch) -> None:
    """Send this process SIGINT, as Ctrl-C does, within the given step."""
    take = _demo_training.Run.take

    def interrupted(self, window, share):
        if self.step + 1 == steps:
            os.kill(os.getpid(), signal.SIGINT)
        take(self, window, share)

    monkeypatch.setattr(_demo_training.Run, "take", interrupted)


def test_sample(tmp_path: Path, text: Path, finished: Path, capsys) -> None:
    """After a training, and from a checkpoint: the same text, in the terminal and in a file, as long as asked.

    The training is another one's again, bit for bit, as their seeds are equal.
    """
    assert run(tmp_path / "trained", text, "--sample", "50") == 0
    assert report(tmp_path / "trained")["history"] == report(finished)["history"]
    assert "sample    50 bytes after 128 of a held-out text" in capsys.readouterr().out
    first = (tmp_path / "trained" / "sample.txt").read_text(encoding="utf-8")
    shutil.copy(finished / "checkpoint.pt", tmp_path)
    assert run(tmp_path, text, "--resume", "--sample", "50") == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == first
    assert first in printed
    assert "sample.txt" in printed
    prompt, continuation = first.split("\n--- the model goes on ---\n")
    assert any(prompt in file.read_text(encoding="utf-8") for file in text.iterdir())
    assert 1 <= len(continuation) <= 51
    # The finished run is measured again.
    assert report(tmp_path)["history"] == report(finished)["history"]
    assert report(tmp_path)["results"]["after"] == report(finished)["results"]["after"]
    assert parsers()["demo"].parse_args(["--sample"]).sample == 400


def test_without_extras(finished: Path) -> None:
    """The command runs, and names what is missing and how to get it."""
    printed = (finished / "printed").read_text(encoding="utf-8")
    for missing, extra in (("tqdm", "demo"), ("matplotlib", "plot")):
        assert f"{missing} is not installed" in printed
        assert f'pip install "flexdilated[{extra}]"' in printed
    assert "step 6 of 6" in printed
    assert not (finished / "mask.png").exists()


@pytest.mark.pictures
def test_no_steps(tmp_path: Path, text: Path) -> None:
    """An untrained model is measured, and drawn."""
    assert run(tmp_path, text, "--steps", "0") == 0
    results = report(tmp_path)["results"]
    assert results["after"] == results["before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_time_limit(tmp_path: Path, text: Path) -> None:
    """The first step is always finished; then the limit ends the training."""
    assert run(tmp_path, text, "--steps", "100000", "--minutes", "1e-6") == 0
    assert report(tmp_path)["results"]["steps"] == 1
    assert report(tmp_path)["results"]["ended_by"] == "the limit of 1e-06 minutes"


def test_ctrl_c_outside_the_training(tmp_path: Path, text: Path, monkeypatch, capsys) -> None:
    from flexdilated.cli import _demo

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo, "load_corpus", interrupted)
    assert run(tmp_path, text) == 130
    assert "Traceback" not in capsys.readouterr().err


BAD = {
    "context of 1": (["--context", "1"], "--context must be at least 2; got 1"),
    "negative steps": (["--steps", "-1"], "--steps must be at least 0; got -1"),
    "no time": (["--minutes", "0"], "--minutes must be a positive number; got 0.0"),
    "time that is no number": (["--minutes", "nan"], "--minutes must be a positive number; got nan"),
    "negative seed": (["--seed", "-1"], "--seed must be at least 0; got -1"),
    "negative sample": (["--sample", "-1"], "--sample must be at least 0; got -1"),
    "unknown device": (["--device", "abacus"], "--device must be one of cpu"),
    "device without storage": (["--device", "meta"], "--device must be one of cpu"),
    "second processor": (["--device", "cpu:1"], "--device must be one of cpu"),
    "missing data": (["--data", "/no/such/place"], "nothing is at /no/such/place"),
    "too little data": (["--context", "65536"], "need a window of context + 1 = 65537 bytes each"),
    "nothing to resume": (["--resume"], "--resume needs a checkpoint"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(tmp_path: Path, text: Path, capsys, arguments: list[str], message: str) -> None:
    """One line that states the rule and the value, status 2, and nothing written."""
    assert run(tmp_path, text, *arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_out_that_is_a_file(tmp_path: Path, text: Path, capsys) -> None:
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    assert run(tmp_path / "taken", text) == 2
    assert "--out must be a folder that can be written" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"


def test_environment_that_does_not_parse(tmp_path: Path, text: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FLEXDILATED_CACHE_BYTES", "lots")
    monkeypatch.setattr("flexdilated.cli._demo.masks.cache", bytes_from_environment)  # it reads the variable once
    assert run(tmp_path, text) == 2
    assert "FLEXDILATED_CACHE_BYTES must be a whole number of bytes" in capsys.readouterr().err


def test_resume_with_other_settings(tmp_path: Path, text: Path, finished: Path, capsys) -> None:
    shutil.copy(finished / "checkpoint.pt", tmp_path)
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    assert run(tmp_path, text, "--resume", "--seed", "1") == 2
    assert "seed was 0, is 1" in capsys.readouterr().err
    assert run(tmp_path, text / "0.py", "--resume", "--context", "255") == 2
    assert "context was 256, is 255, another corpus" in capsys.readouterr().err
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"], ids=["empty", "foreign"])
def test_resume_from_what_is_no_checkpoint(tmp_path: Path, text: Path, capsys, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    assert run(tmp_path, text, "--resume") == 2
    assert "--resume needs a checkpoint of this command" in capsys.readouterr().err
