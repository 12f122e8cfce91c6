"""The demo's parts against plain definitions: corpus, windows, baselines, schedule, interrupt, pictures."""

import os
import signal
from math import log2
from pathlib import Path

import pytest
import torch

from flexdilated.cli._command_parser import UsageError
from flexdilated.cli._demo_data import bigram_bits, load_corpus, training_window, unigram_bits, validation_windows
from flexdilated.cli._demo_model import ByteModel, model_config, sample_text
from flexdilated.cli._demo_training import Interrupt, learning_rate_share, planned_steps
from flexdilated.cli._output import replace


def build_model(context: int) -> ByteModel:
    return ByteModel(model_config(context), seed=0)


def text_of(data) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_the_standard_library_is_split_by_file() -> None:
    corpus = load_corpus(None, context=1024)
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert "argparse.py" in {*corpus.train_files, *corpus.validation_files}
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 1 / 16 <= share < 1 / 12
    folders = {folder for name in corpus.train_files for folder in Path(name).parts[:-1]}
    assert not folders & {"site-packages", "test", "tests"}


def test_a_folder_with_odd_files(tmp_path: Path) -> None:
    """Empty files and links to nowhere are left out, long ones not held out; bytes stay, in the order of names."""
    for number in range(20):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number, 0xFF]) * 50)
    (tmp_path / "long").write_bytes(b"y" * 1000)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    corpus = load_corpus(tmp_path, context=8)
    assert len(corpus.train_files) + len(corpus.validation_files) == 21
    assert "long" in corpus.train_files
    for side, files in ((corpus.train, corpus.train_files), (corpus.validation, corpus.validation_files)):
        assert list(files) == sorted(files)
        expected = b"".join((tmp_path / name).read_bytes() + b"\0" for name in files)
        assert bytes(side.tolist()) == expected


def test_a_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(range(160)))
    corpus = load_corpus(tmp_path / "one", context=8)
    assert bytes(corpus.train.tolist()) == bytes(range(150)) + b"\0"
    assert bytes(corpus.validation.tolist()) == bytes(range(150, 160)) + b"\0"


@pytest.mark.parametrize("content", [None, b"", b"short"], ids=["no file", "empty", "too short"])
def test_too_little_text(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(UsageError, match=r"at least one readable file|need a window of context"):
        load_corpus(tmp_path, context=8)


def test_baselines_by_hand() -> None:
    """Train on "aab", measure on "?ab" and "?ba": counts as their definitions say, a pseudo-count each."""
    train, windows = text_of(b"aab"), torch.stack([text_of(b"aab"), text_of(b"bba")])
    a, b = (2 + 1) / (3 + 256), (1 + 1) / (3 + 256)
    assert unigram_bits(train, windows) == pytest.approx(-(2 * log2(a) + 2 * log2(b)) / 4)
    after_a = {"a": (1 + a) / (2 + 1), "b": (1 + b) / (2 + 1)}
    after_b = {"a": a, "b": b}  # never followed by anything: the unigram
    expected = [after_a["a"], after_a["b"], after_b["b"], after_b["a"]]
    assert bigram_bits(train, windows) == pytest.approx(-sum(log2(p) for p in expected) / 4)


def test_training_windows_visit_everything_once_a_pass() -> None:
    text = text_of(range(101))
    starts = [int(training_window(text, step, context=10, seed=3)[0]) for step in range(20)]
    first, second = starts[:10], starts[10:]
    assert sorted(first) == list(range(first[first.index(min(first))], 100, 10))
    assert len(set(second)) == 10
    assert first != second
    other = [int(training_window(text, step, context=10, seed=4)[0]) for step in range(10)]
    assert other != first
    shortest = text_of(range(11))
    assert training_window(shortest, 7, context=10, seed=0).tolist() == list(range(11))


def test_validation_windows_do_not_overlap() -> None:
    windows = validation_windows(text_of(range(100)), context=9, limit=4)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert validation_windows(text_of(range(25)), context=9, limit=4)[:, 0].tolist() == [0, 10]


def test_learning_rate() -> None:
    factors = [learning_rate_share(step, steps=100) for step in range(100)]
    assert max(factors) == factors[9] == pytest.approx(0.91)
    assert factors[0] == pytest.approx(0.1)
    assert factors[-1] == pytest.approx(0.01)


def test_planned_steps() -> None:
    """100 steps, 20 of them behind before, and a minute: what fits at the pace so far, once that is known."""
    paces = [(0, 0.0, 100), (4, 30.0, 100), (10, 5.0, 100), (10, 10.0, 80), (20, 40.0, 50), (20, 61.0, 40)]
    for ran, elapsed, planned in [*paces, (1, 90.0, 21)]:
        sizes = {"steps": 100, "done": 20 + ran, "ran": ran}
        assert planned_steps(**sizes, elapsed_seconds=elapsed, limit_seconds=60.0) == planned


def test_the_model_is_causal() -> None:
    """A changed byte changes no logit before it: not through the look-back, nor the attention."""
    model = build_model(300)
    torch.nn.init.normal_(model.head.weight)
    tokens = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 150] = (tokens[0, 150] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:150], after[:150])
    assert not torch.equal(before[150], after[150])


def test_a_byte_is_seen_with_the_three_before_it() -> None:
    """Without the trunk, a byte changes its own logits and the next three."""
    model = build_model(16)
    torch.nn.init.normal_(model.head.weight)
    model.trunk = torch.nn.Identity()
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 5] = 1
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [5, 6, 7, 8]
    first = model.embed(tokens)[0, :4]
    weights = torch.stack([parameter[0] for parameter in model.embeddings.parameters()])
    for seen in range(4):  # before the first byte there is nothing, not another byte
        torch.testing.assert_close(first[seen], weights[: seen + 1].sum(0))
    assert model(torch.tensor([[65]])).shape == (1, 1, 256)


def test_segments_end_at_the_context() -> None:
    for context in (2, 3, 255, 256, 257, 16384, 100_000):
        config = model_config(context)
        assert max(config.segment_lengths) == config.segment_lengths[-1] >= context
        assert config.segment_lengths[0] == min(256, context)
        assert len(config.dilation_rates) == len(config.segment_lengths)


@pytest.mark.parametrize("sizes", [[1] * 40, [30, 1, 9], [2, 1, 37]], ids=["steps", "prompt", "short prompt"])
def test_a_sample_is_drawn_from_the_models_logits(sizes: list[int]) -> None:
    """Byte by byte or in chunks, through caches and look-back: the logits of a whole pass."""
    model = build_model(40).double()
    torch.nn.init.normal_(model.head.weight)
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))
    following, behind = model.next_logits(), 0
    with torch.no_grad():
        expected = model(tokens)
        for part in tokens.split(sizes, dim=1):
            behind += part.shape[1]
            torch.testing.assert_close(following(part), expected[:, behind - 1], rtol=1e-9, atol=1e-9)


def test_what_is_printed_of_a_sample_leaves_the_terminal_alone() -> None:
    found = sample_text(b"a\tb\n\xc3\xa9", b"\x1b[2J\x00\xff\r\x07c")
    shown = "\N{REPLACEMENT CHARACTER}"
    expected = f"a\tb\n\u00e9\n--- the model goes on ---\n{shown}[2J{shown}{shown}{shown}{shown}c\n"
    assert found == expected


def test_a_second_interrupt_ends_at_once() -> None:
    earlier = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is earlier


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old", encoding="utf-8")

    def fail(partial: Path) -> None:
        partial.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text(encoding="utf-8") == "old"
