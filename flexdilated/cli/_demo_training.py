"""The demo's training: a run that saves and goes on, over one process or all that torchrun has started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import BytesIO
from math import log
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from ._bindings import read_torch
from ._command_parser import UsageError
from ._demo_data import training_window
from ._demo_model import ByteModel, optimizers_of
from ._output import progress, replace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CHECKPOINT = "checkpoint.pt"
_SECONDS_BETWEEN_CHECKPOINTS = 30.0
_GRADIENT_NORM_LIMIT = 1.0
_WARMUP_STEPS = 10
_PACE_STEPS = 5  # after which the pace of a run is known


@dataclass(frozen=True)
class Team:
    """This process's place among those that torchrun has started, its device, and the mesh of all; None for one."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, run by the first process alone and told to all; a UsageError is raised by all."""
        if self.mesh is None:
            return work()
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = work()
            except UsageError as error:
                told[1] = str(error)
        torch.distributed.broadcast_object_list(told, src=0, device=self.device)
        if told[1] is not None:
            raise UsageError(told[1])
        return told[0]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, which all get bit for bit."""
        if self.mesh is None:
            return
        flat = torch.cat([x.reshape(-1) for x in tensors])
        torch.distributed.all_reduce(flat)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(total.view_as(x))

    def decide(self, number: int, *, stop: bool) -> tuple[int, bool]:
        """The first process's number, and whether any process is to stop: one answer for all."""
        votes = torch.tensor([number if self.rank == 0 else 0, int(stop)], device=self.device)
        self.add_up([votes])
        number, stops = votes.tolist()
        return number, stops > 0

    def check_alike(self, facts: Mapping[str, object]) -> None:
        """Raises UsageError, in all processes, if one has other facts than the first."""
        if self.mesh is None:
            return
        from ..distributed.group import Ranks, check_agreement

        try:
            check_agreement(Ranks.of(self.mesh), {name: str(value) for name, value in facts.items()})
        except ValueError as error:
            raise UsageError(str(error)) from None


@contextmanager
def team_of(device: str) -> Iterator[Team]:
    """The team that torchrun's environment describes, with its process group; only its first process is heard.

    What a process raises ends it, and torchrun then ends the others; its traceback is printed whichever it is.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Team(0, 1, torch.device(device))
        return
    from torch.distributed.device_mesh import init_device_mesh

    own = _own_device(torch.device(device))
    if own.type != "cpu":
        torch.accelerator.set_device_index(own)
    began = not torch.distributed.is_initialized()
    if began:
        torch.distributed.init_process_group(torch.distributed.get_default_backend_for_device(own))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh(own.type, (size,), mesh_dim_names=("sequence",))
    with ExitStack() as stack:
        if rank:
            sys.stdout.flush()
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield Team(rank, size, own, mesh)
    # Not after an error: others may be in the middle of something, which the group's end would wait for.
    if began:
        torch.distributed.destroy_process_group()


def _own_device(device: torch.device) -> torch.device:
    """This process's; of accelerators each process of a machine has its own, or a UsageError says why not."""
    if device.type == "cpu":
        return device
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if device.index is not None or processes > devices:
        raise UsageError(
            f"several processes take one accelerator each: --device must name a kind, such as {device.type}, and a "
            f"machine run at most as many processes as it has of them; got {device}, {processes} processes, {devices}"
        )
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))


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
        self.optimizers = optimizers_of(self.model)

    @property
    def step(self) -> int:
        """Steps behind."""
        return len(self.losses)

    def save(self, folder: Path) -> None:
        """Write a checkpoint in place of an earlier one."""
        state = {"identity": self.identity, "model": self.model.state_dict(), "losses": self.losses}
        state |= {"optimizers": [each.state_dict() for each in self.optimizers]}
        save_checkpoint(folder, state | {"before": self.before, "seconds": self.seconds})

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        self.losses, self.before, self.seconds = state["losses"], state["before"], state["seconds"]


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Plain data and tensors, in one piece."""
    buffer = BytesIO()  # where the disk is full, torch.save on a file raises what does not say so
    torch.save(state, buffer)
    replace(folder / CHECKPOINT, lambda path: path.write_bytes(buffer.getbuffer()))


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
    run: Run, text: UInt8[Tensor, " n"], team: Team, interrupt: Interrupt, *,
    context: int, seed: int, steps: int, minutes: float, save: Callable[[], None],
) -> str:  # fmt: skip
    """Train in place, one window a step; call `save` now and then and at the end. Returns what ended it, as a phrase.

    Every step is finished before an interrupt or the time limit is heeded, so the run can always go on. All processes
    of a team take the same steps: the first one's clock counts, and any one's interrupt.
    """
    began, earlier, first = monotonic(), run.seconds, run.step
    saved, (planned, stopped) = began, team.decide(steps, stop=interrupt.requested)
    with progress("training", unit="step", done=run.step, total=steps) as bar:
        while run.step < planned and not stopped:
            window = training_window(text, run.step, context=context, seed=seed)
            run.losses.append(_step(run, window, learning_rate_factor(run.step, steps=planned), team))
            now = monotonic()
            run.seconds = earlier + now - began
            pace = {"ran": run.step - first, "elapsed_seconds": now - began, "limit_seconds": 60.0 * minutes}
            planned = planned_steps(steps=steps, done=run.step, **pace)
            planned, stopped = team.decide(planned, stop=interrupt.requested)
            bar.step(run.step, planned, f"{running_mean(run.losses[-10:])[-1]:.3f} bits per byte")
            if now - saved > _SECONDS_BETWEEN_CHECKPOINTS:
                saved = now
                save()
    save()
    if run.step >= steps:
        return "all steps"
    return "Ctrl-C" if stopped else f"the limit of {minutes:g} minutes"


def _step(run: Run, window: UInt8[Tensor, " m"], factor: float, team: Team) -> float:
    loss = loss_bits(run.model, window, team.device)
    loss.backward()
    loss = loss.detach()
    team.add_up([loss, *(p.grad for p in run.model.parameters() if p.grad is not None)])
    nn.utils.clip_grad_norm_(run.model.parameters(), _GRADIENT_NORM_LIMIT)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def loss_bits(model: ByteModel, window: UInt8[Tensor, " m"], device: torch.device) -> Float[Tensor, ""]:
    """Mean cross-entropy, in bits, of each of the window's bytes after the first; differentiable.

    Where several processes share the window, what this one adds to that mean.
    """
    tokens = window.to(device, torch.int64)
    logits, following = model(tokens[None, :-1])[0], tokens[1:]
    mine = following[model.positions(len(following))]
    return F.cross_entropy(logits, mine, reduction="sum") / (log(2) * len(following))


@torch.no_grad()
def mean_bits(model: ByteModel, windows: UInt8[Tensor, "w m"], team: Team) -> float:
    """Bits per byte over all windows, each read from its start with nothing before it."""
    bits = torch.stack([loss_bits(model, window, team.device) for window in windows])
    team.add_up([bits])
    return sum(bits.tolist()) / len(windows)


def learning_rate_factor(step: int, *, steps: int) -> float:
    """Share of the full rate at a step: up in a few steps, then down in a line to 0 at `steps`."""
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - step / steps)


def planned_steps(*, steps: int, done: int, ran: int, elapsed_seconds: float, limit_seconds: float) -> int:
    """How many steps the run will end with: all, or as many as the time limit allows at the pace so far.

    `done` counts all steps behind, `ran` those of this process. Where the result is below `steps`, the learning rate
    falls to 0 at the end in sight, and the run depends on the machine's pace.
    """
    if ran < _PACE_STEPS and elapsed_seconds < limit_seconds:
        return steps
    left = max(0.0, limit_seconds - elapsed_seconds)
    return min(steps, done + int(left * ran / elapsed_seconds))


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and those just before it, ten in all where there are as many."""
    lasts = (values[max(0, end - 10) : end] for end in range(1, len(values) + 1))
    return [sum(last) / len(last) for last in lasts]
