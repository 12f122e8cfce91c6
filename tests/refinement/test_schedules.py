"""Schedules: monotone whole numbers of few values, and the formulas of their papers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flexdilated import schedules

CURVES = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "cubic": lambda t: (1 - t) ** 3,
}
numbers = {
    "start": st.integers(0, 300),
    "end": st.integers(0, 300),
    "steps": st.integers(1, 400),
    "begin": st.integers(0, 50),
    "widths": st.one_of(st.integers(2, 20), st.just(400)),
}
drawn = st.builds(
    lambda name, sizes: getattr(schedules, name)(**sizes), st.sampled_from([*CURVES]), st.fixed_dictionaries(numbers)
)


@given(drawn)
def test_whole_numbers_that_never_go_back(schedule):
    found = [schedule(step) for step in range(schedule.begin + schedule.steps + 10)]
    assert all(type(value) is int for value in found)
    assert found == sorted(found, reverse=schedule.end < schedule.start)
    assert set(found[: schedule.begin + 1]) == {schedule.start}
    assert set(found[schedule.begin + schedule.steps :]) == {schedule.end}
    assert set(found) <= set(schedule.values)
    assert len(schedule.values) == len(set(schedule.values)) <= schedule.widths
    assert (schedule.values[0], schedule.values[-1]) == (schedule.start, schedule.end)
    assert schedule(10**9) == schedule.end


@given(drawn, st.integers(0, 500))
def test_near_the_formula(schedule, step):
    """Half a step between values, and half a unit of rounding, away from the published curve at most."""
    time = min(max((step - schedule.begin) / schedule.steps, 0), 1)
    exact = schedule.end + (schedule.start - schedule.end) * CURVES[schedule.curve](time)
    apart = max(1.0, abs(schedule.end - schedule.start) / (schedule.widths - 1))
    assert abs(schedule(step) - exact) <= apart / 2 + 0.5 + 1e-9
