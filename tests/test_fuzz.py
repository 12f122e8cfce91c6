"""Drawn and spoilt texts are read or refused with a clear error; and the run over millions sees what is wrong."""

import pytest

from bench.bench_fuzz import TEXTS, answer_all
from flexdilated import masks


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_answered(kind):
    found = answer_all(kind, number=5000, seed=20)
    assert found.wrong == []
    assert found.slowest[0] < 1
    # Both answers are drawn often.
    assert found.verdicts.keys() == {"pattern", "ValueError"}
    assert min(found.verdicts.values()) > 500


def raises(error: Exception):
    def read(text: str) -> masks.Pattern:
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (raises(KeyError("kind")), "KeyError"),
        (raises(RecursionError()), "RecursionError"),
        (raises(ValueError("long" * 1000)), "an unclear error"),
        (raises(UnicodeDecodeError("utf-8", b"", 0, 1, "is a ValueError that says nothing")), "an unclear error"),
        (lambda text: None, "no pattern"),
        (lambda text: Forgetful(), "another pattern"),
    ],
)
def test_wrong_answers_are_seen(read, verdict):
    found = answer_all("expressions", number=20, seed=0, read=read)
    assert found.verdicts == {verdict: 20}
    assert found.num_wrong == 20
    assert found.wrong[0].startswith(verdict)


class Forgetful(type(masks.causal())):
    """Not what its own text says."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = type(masks.causal()).__hash__


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"dilated","offset":' + "9" * 5000 + ',"rate":1,"segment":1}',
        '{"kind":"dilated","offset":"' + "a" * 5000 + '","rate":1,"segment":1}',
        '{"kind":"causal","' + "a" * 5000 + '":1}',
        '{"kind":"' + "a" * 5000 + '"}',
        '{"kind":"block_list","block":1,"rows":' + "[" * 900 + "]" * 900 + "}",
        '{"kind":"not","part":' * 5000,
        '{"kind":"blockwise","block":2,"part":{"kind":"visible_keys","name":"' + "a" * 5000 + '"}}',
    ],
)
def test_errors_about_long_json_are_short(text):
    with pytest.raises(ValueError, match=r"must|pattern") as caught:
        masks.from_json(text)
    assert type(caught.value) is ValueError
    assert len(str(caught.value)) < 1200
