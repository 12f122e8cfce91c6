"""The training loop: one window a step, until the steps, the time or the user's patience are over."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from torch import nn

from ._corpus import Corpus
from ._evaluate import loss_bits
from ._interrupt import Interrupt
from ._progress import training_progress
from ._run import Run
from ._schedule import learning_rate_factor, planned_steps
from ._settings import Settings
from ._team import Team
from ._windows import training_window

_SECONDS_BETWEEN_CHECKPOINTS = 30.0
_GRADIENT_NORM_LIMIT = 1.0


def train(
    run: Run, corpus: Corpus, settings: Settings, team: Team, interrupt: Interrupt, save: Callable[[], None]
) -> str:
    """Train in place; call `save` now and then and at the end. Returns what ended it, as a phrase.

    Every step is finished before an interrupt or the time limit is heeded, so the run can always go on. All processes
    of a team take the same steps: the first one's clock counts, and any one's interrupt.
    """
    began, earlier, first = monotonic(), run.seconds, run.step
    saved, (planned, stopped) = began, team.decide(settings.steps, stop=interrupt.requested)
    with training_progress(done=run.step, total=settings.steps) as progress:
        while run.step < planned and not stopped:
            window = training_window(corpus.train, run.step, context=settings.context, seed=settings.seed)
            run.losses.append(_step(run, window, learning_rate_factor(run.step, steps=planned), team))
            now = monotonic()
            run.seconds = earlier + now - began
            planned = planned_steps(
                steps=settings.steps,
                done=run.step,
                ran=run.step - first,
                elapsed_seconds=now - began,
                limit_seconds=60.0 * settings.minutes,
            )
            planned, stopped = team.decide(planned, stop=interrupt.requested)
            progress.step(run.step, planned, f"{_recent(run.losses):.3f} bits per byte")
            if now - saved > _SECONDS_BETWEEN_CHECKPOINTS:
                saved = now
                save()
    save()
    return _ending(run, settings, stopped)


def _step(run: Run, window, factor: float, team: Team) -> float:
    loss = loss_bits(run.model, window, run.device)
    loss.backward()
    loss = loss.detach()
    team.add_up([loss, *(p.grad for p in run.model.parameters() if p.grad is not None)])
    nn.utils.clip_grad_norm_(run.model.parameters(), _GRADIENT_NORM_LIMIT)
    run.optimizers.step(factor)
    return loss.item()


def _recent(losses: list[float]) -> float:
    last = losses[-10:]
    return sum(last) / len(last)


def _ending(run: Run, settings: Settings, stopped: bool) -> str:
    if run.step >= settings.steps:
        return "all steps"
    return "Ctrl-C" if stopped else f"the limit of {settings.minutes:g} minutes"
