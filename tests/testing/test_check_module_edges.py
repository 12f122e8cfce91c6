"""check_attention_module: what is no output, no lse or no verdict on a length, and how it is told."""

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import Calls, check_attention_module, examine_attention_module

WINDOW = masks.local_window(left=2, right=0)


def test_weights_are_no_lse() -> None:
    """Averaged over heads they have its shape where there are as many tokens as heads."""

    def with_weights(q, k, v):
        return fd.attend(q, k, v, WINDOW), torch.ones(q.shape[0], q.shape[2], q.shape[2]) / q.shape[2]

    check_attention_module(lambda: with_weights, WINDOW, max_tokens=6, checks=["agreement", "gradients"])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda out: out > 0, "must be of floating point numbers; got torch.bool"),
        (lambda out: out.to("meta"), "must be on the device of q, cpu; got meta"),
        (lambda out: (), "must be a tensor; got tuple"),
        (lambda out: out[:, :, :0], "must have the shape of q, (2, 1, 4, 8); got (2, 1, 0, 8)"),
    ],
)
def test_an_output_that_is_none(broken, words) -> None:
    def by_tokens(q, k, v):
        return broken(fd.attend(*(x.transpose(1, 2) for x in (q, k, v)), WINDOW).transpose(1, 2))

    calls = Calls(layout="BNHD")
    report = examine_attention_module(lambda: by_tokens, WINDOW, calls=calls, max_tokens=4, checks=["agreement"])
    assert report["agreement"].detail == f"the output {words}"


def test_a_mistake_after_a_block_is_found() -> None:
    """One token in the last block of 128, which sees too much; also for a pattern without numbers."""

    def leaking(q, k, v):
        return fd.attend(q, k, v, masks.every() if q.shape[2] == 129 else masks.causal())

    sizes = {"num_heads": 1, "head_dim": 2, "max_tokens": 150}
    report = examine_attention_module(lambda: leaking, masks.causal(), checks=["causality"], **sizes)
    assert report["causality"].detail.startswith("129 tokens: key 1 is hidden from query 0 of head 0")


def test_a_module_that_is_never_the_same_twice() -> None:
    calls: list[int] = []

    def changing(q, k, v):
        calls.append(1)
        return fd.attend(q, k, v, WINDOW) + len(calls)

    report = examine_attention_module(lambda: changing, WINDOW, max_tokens=4, checks=["lengths"])
    assert report["lengths"].detail.startswith("2 tokens: a new module gives ")
    assert "kept" not in report["lengths"].detail


def test_a_report_fits_the_page() -> None:
    def wordy(q, k, v):
        raise RuntimeError("a long line of words " * 9 + "\nand another" * 40)

    text = str(examine_attention_module(lambda: wordy, WINDOW, max_tokens=4, checks=["half precision", "padding"]))
    assert max(map(len, text.partition("\nhalf precision:")[0].splitlines())) <= 120
    assert text.endswith("\nand another\n... and 33 more lines")


@pytest.mark.parametrize("given", [{"seed": "x"}, {"dtype": torch.int64}, {"dtype": "float32"}])
def test_settings_of_the_wrong_kind(given) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(given))} must be"):
        examine_attention_module(lambda: print, WINDOW, **given)
