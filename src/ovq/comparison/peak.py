"""The peak memory of one training step, in a process of its own."""

import os
import signal
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch

from ovq.benchmark import peak_during
from ovq.comparison.models import make_model, token_ids
from ovq.comparison.steps import run_training_step
from ovq.models import OVQConfig

WARM_UP = 64  # tokens: few, since what they leave in the heap is not counted


def peak_in_new_process(config: OVQConfig, length: int, seed: int) -> int:
    """Peak bytes of a process during a training step, over those it held before.

    The process is forked from one that has imported everything and run nothing, so that it starts
    in no time and inherits no memory.

    Args:
        config: of the model.
        length: tokens ``T`` of the sequence.
        seed: of weights and tokens.

    Raises:
        ChildProcessError: the process ended without a figure, for want of memory for example.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, config.to_dict(), length, seed, torch.get_num_threads())
    process = context.Process(target=_send_peak, args=arguments)
    process.start()
    theirs.close()
    with ours:
        try:
            found = ours.recv()
        except EOFError:
            process.join()
            found = f"the process ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
    if isinstance(found, str):
        raise ChildProcessError(found)
    return found


def _send_peak(
    to: Connection, fields: dict[str, Any], length: int, seed: int, threads: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's, which ends this
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        to.send(peak_of_training_step(OVQConfig.from_dict(fields), length, seed))
    except (RuntimeError, MemoryError, OSError) as error:
        to.send(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _end_with_parent() -> None:
    """A killed parent leaves no step that runs on for minutes."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def peak_of_training_step(config: OVQConfig, length: int, seed: int) -> int:
    """Peak bytes of this process during a training step, over those it held before."""
    model, ids = make_model(config, seed), token_ids(config, length, seed)
    run_training_step(model, ids[:, :WARM_UP])
    return peak_during(lambda: run_training_step(model, ids))
