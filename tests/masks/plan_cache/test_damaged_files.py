"""Files and texts that are damaged in any way: each reader's own error."""

import io
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.cli._pattern import read_bindings, read_pattern
from flexdilated.cli._terminal import UsageError
from flexdilated.masks.planning._machine import CPU
from flexdilated.tuning import MeasuredMachine

PATTERN = masks.longnet([8, 16], [1, 2]) & masks.documents("ids", longest=9) & masks.block_list([[0], [0, 1]], block=4)
MACHINE = MeasuredMachine(CPU, "cpu", "2026-01-01", {"launch": 1.0}).to_data()
GOOD = [PATTERN.text, json.dumps(MACHINE)]


def saved(*, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.arange(9), buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


TENSORS = [saved(zipped=zipped) for zipped in (True, False)]
DEEP = 50_000
ODD = [
    b"[" * DEEP, b"[" * 980 + b"]" * 980, b'{"kind":' * DEEP, b'{"kind":"not","part":' * 900 + b"0" + b"}" * 900,
    b"{", b'"' * 9, b"\xff\xfe[\x00]\x00", b"\xef\xbb\xbf[]", b"\x00" * 50, b"1e999", b"NaN", b"-Infinity", b"9" * 5000,
    b"9" * 400, b"[]", b"{}", b"null", b"true", b'"\\ud800"', b"(" * DEEP, b"~" * DEEP, b"causal()" + b"&" * 99,
    b"\x80\x02.", b"\x80\x02" + b"]" * DEEP + b".", b"PK\x03\x04" + b"\x00" * 90,
]  # fmt: skip
VALUES = [
    "1e999", "NaN", "-1", "0", "9" * 400, "9" * 5000, "null", '"\\u0000"', "[]", "{}", "[" * 300 + "]" * 300, "1.5",
    "true",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Odd bytes, or a good text or tensor: cut, with a value or byte in place of another, or with a name twice."""
    if not draw(st.integers(0, 2)):
        return draw(st.sampled_from(ODD) | st.binary(max_size=40))
    if not draw(st.integers(0, 2)):
        return draw(cut(bytearray(draw(st.sampled_from(TENSORS)))))
    good = draw(st.sampled_from(GOOD))
    if draw(st.booleans()):  # a value
        places = list(re.finditer(r'(?<=[:\[,])\s*("[^"]*"|-?[\d.e+-]+|null|true|false)', good))
        place = draw(st.sampled_from(places))
        good = good[: place.start()] + draw(st.sampled_from(VALUES)) + good[place.end() :]
    if not draw(st.integers(0, 3)):  # a name that comes twice
        good = re.sub(r"\{(\"\w+\":[^,{\[]*),", r"{\1,\1,", good, count=1)
    return draw(cut(bytearray(good.encode())))


@st.composite
def cut(draw: st.DrawFn, text: bytearray) -> bytes:
    for _ in range(draw(st.integers(0, 2))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text[: draw(st.just(len(text)) | st.integers(0, len(text)))])


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "set_machine": (masks.set_machine, ValueError),
    "pattern of a command": (lambda path: read_pattern(str(path.with_suffix(".json"))), UsageError),
    "tensors of a command": (lambda path: read_bindings(PATTERN, [f"ids={path.with_suffix('.pt')}"]), UsageError),
}


@pytest.fixture
def place(tmp_path: Path):
    """A path, and under names with each reader's suffix the same file."""
    path = tmp_path / "stored"
    path.touch()
    for name in ("stored.json", "stored.pt"):
        (tmp_path / name).symlink_to(path)
    yield path
    masks.set_machine(None)


@pytest.mark.parametrize("reader", READERS)
@given(damaged())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(reader: str, place: Path, content: bytes) -> None:
    read, refusal = READERS[reader]
    place.write_bytes(content)
    with suppress(refusal):
        read(place)


WRITTEN = {"pattern of a command": GOOD[0], "set_machine": GOOD[1]}


@pytest.mark.parametrize("reader", WRITTEN)
@given(data=st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_name_that_comes_twice_is_refused(reader: str, place: Path, data: st.DataObject) -> None:
    """In any object, also with one value: a reader that took the last would drop what was written before."""
    read, refusal = READERS[reader]
    good = WRITTEN[reader]
    place.write_text(good, encoding="utf-8")
    read(place)
    entry = data.draw(st.sampled_from(list(re.finditer(r'"\w+": ?("[^"]*"|-?[\d.e+-]+|null)', good))))
    place.write_text(f"{good[: entry.end()]},{entry[0]}{good[entry.end() :]}", encoding="utf-8")
    with pytest.raises(refusal, match="duplicate key"):
        read(place)
