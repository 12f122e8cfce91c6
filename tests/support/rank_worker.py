"""One rank of `tests.support.ranks`: a process that runs functions, each in a process group of its own."""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any, NamedTuple


class Order(NamedTuple):
    """What the worker is to do: the call, pickled, and its place in the group."""

    call: bytes
    rank: int
    size: int
    store: str
    group_timeout_s: float


def serve(orders: connection.Connection, stacks: str) -> None:
    """Carry out orders until there are no more; send (True, result) or (False, traceback), pickled.

    On SIGUSR1 the stacks of all threads go to the file `stacks`.
    """
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":  # elsewhere gloo finds the way by the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        orders.send_bytes(b"ready")
        while True:
            order = Order(*pickle.loads(orders.recv_bytes()))
            try:
                answer = pickle.dumps((True, _carry_out(order)))
            except BaseException:  # SystemExit too: whatever ended the function is told
                answer = pickle.dumps((False, traceback.format_exc()))
            orders.send_bytes(answer)


def _carry_out(order: Order) -> Any:
    """The function's result. The group stays until the next order: by then no rank is busy in it any more."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    function, args = pickle.loads(order.call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # As pyproject.toml has it.
        warnings.filterwarnings("ignore", "`torch.jit.script")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{order.store}",
            rank=order.rank,
            world_size=order.size,
            timeout=timedelta(seconds=order.group_timeout_s),
        )
        distributed.barrier()  # whoever dies from here on dies with its connections made
        return function(*args)


def set_group_timeout(seconds: float) -> None:
    """That of collectives, from here on; gloo sends from one rank to one by the first timeout.

    All ranks meet first: how long each needed until here counts for nothing, on a busy machine too.
    """
    from torch import distributed

    distributed.barrier()
    # Public from torch 2.15 on.
    set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=seconds), distributed.group.WORLD)


def _die_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
