"""The demo's training: a run that saves and goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from math import log
from pathlib import Path
from statistics import fmean
from time import monotonic
from types import FrameType
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from ._bindings import read_torch
from ._command_parser import UsageError
from ._demo_data import training_window
from ._demo_model import ByteModel
from ._output import progress, replace

CHECKPOINT = "checkpoint.pt"
_SECONDS_BETWEEN_CHECKPOINTS = 30.0
_GRADIENT_NORM_LIMIT = 1.0
_WARMUP_STEPS = 10
_PACE_STEPS = 5  # after which the pace of a run is known


class Interrupt:
    """While entered, on the main thread, the first SIGINT sets `requested` and a later one raises KeyboardInterrupt."""

    requested = False

    def __enter__(self) -> Interrupt:
        self._earlier = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass
class Run:
    """A model and its past: the bits per byte of every step so far, the validation's at step 0, and the seconds.

    After its parameters are drawn a run draws nothing but its windows, which are a function of seed and step.
    `identity` is what a run that goes on must share with it.
    """

    model: ByteModel
    identity: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    before: float = float("nan")
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.optimizers = self.model.optimizers()

    @property
    def step(self) -> int:
        """Steps behind."""
        return len(self.losses)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, plain data and tensors, in place of an earlier one."""
        state = {name: getattr(self, name) for name in ("identity", "losses", "before", "seconds")}
        state |= {"model": self.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}
        buffer = BytesIO()  # where the disk is full, torch.save on a file raises what does not say so
        torch.save(state, buffer)
        replace(folder / CHECKPOINT, lambda path: path.write_bytes(buffer.getbuffer()))

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        self.losses, self.before, self.seconds = state["losses"], state["before"], state["seconds"]

    def take(self, window: UInt8[Tensor, " m"], share: float) -> None:
        """One step, at this share of the full learning rates."""
        loss = loss_bits(self.model, window)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM_LIMIT)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())


def load_checkpoint(folder: Path, *, identity: dict[str, Any]) -> dict[str, Any]:
    """The state last saved, on the CPU. Nothing but data is unpickled.

    Raises UsageError where there is none, where it cannot be read, and where its `identity` is another.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        raise UsageError(f"--resume needs a checkpoint, written by an earlier run; there is none at {path}")
    try:
        state = read_torch(path)
        found = dict(state["identity"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise UsageError(f"--resume needs a checkpoint of this command; {path} is none ({kind})") from None
    changes = [
        f"{name} was {found.get(name)}, is {now}" if isinstance(now, int) else f"another {name}"
        for name, now in identity.items()
        if found.get(name) != now
    ]
    if changes:
        raise UsageError(f"--resume needs the settings that the run began with: {', '.join(changes)}")
    return state


def train(
    run: Run, text: UInt8[Tensor, " n"], interrupt: Interrupt, *,
    context: int, seed: int, steps: int, minutes: float, save: Callable[[], None],
) -> str:  # fmt: skip
    """Train in place, one window a step; call `save` now and then and at the end. Returns what ended it, as a phrase.

    Every step is finished before an interrupt or the time limit is heeded, so the run can always go on.
    """
    began, earlier, first = monotonic(), run.seconds, run.step
    saved, planned = began, steps
    with progress("training", unit="step", done=run.step, total=steps) as bar:
        while run.step < planned and not interrupt.requested:
            window = training_window(text, run.step, context=context, seed=seed)
            run.take(window, learning_rate_share(run.step, steps=planned))
            now = monotonic()
            run.seconds = earlier + now - began
            pace = {"ran": run.step - first, "elapsed_seconds": now - began, "limit_seconds": 60.0 * minutes}
            planned = planned_steps(steps=steps, done=run.step, **pace)
            bar.step(run.step, planned, f"{fmean(run.losses[-10:]):.3f} bits per byte")
            if now - saved > _SECONDS_BETWEEN_CHECKPOINTS:
                saved = now
                save()
    save()
    if run.step >= steps:
        return "all steps"
    return "Ctrl-C" if interrupt.requested else f"the limit of {minutes:g} minutes"


def loss_bits(model: ByteModel, window: UInt8[Tensor, " m"]) -> Float[Tensor, ""]:
    """Mean cross-entropy, in bits, of each of the window's bytes after the first; differentiable."""
    tokens = window.to(model.head.weight.device, torch.int64)
    return F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:]) / log(2)


@torch.no_grad()
def mean_bits(model: ByteModel, windows: UInt8[Tensor, "w m"]) -> float:
    """Bits per byte over all windows, each read from its start with nothing before it."""
    return fmean(float(loss_bits(model, window)) for window in windows)


def learning_rate_share(step: int, *, steps: int) -> float:
    """Share of the full rate at a step: up in a few steps, then down in a line to 0 at `steps`."""
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - step / steps)


def planned_steps(*, steps: int, done: int, ran: int, elapsed_seconds: float, limit_seconds: float) -> int:
    """How many steps the run will end with: all, or as many as the time limit allows at the pace so far.

    `done` counts all steps behind, `ran` those of this process. Where the result is below `steps`, the learning rate
    falls to 0 at that step, and the run depends on the machine's pace.
    """
    if ran < _PACE_STEPS and elapsed_seconds < limit_seconds:
        return steps
    left = max(0.0, limit_seconds - elapsed_seconds)
    return min(steps, done + int(left * ran / elapsed_seconds))
