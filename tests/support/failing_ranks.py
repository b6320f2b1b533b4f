"""A training in which one rank goes wrong: python failing_ranks.py HOW. Started by tests/e2e/test_failing_ranks.py."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import oslo_engine as oslo
from training_runs import Recipe, batches, unsplit


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            print("WRONG", time.time(), flush=True)
            if how == "raises":
                time.sleep(1)  # the other one is waiting by then
                raise ValueError("no more of this")
            if how == "hangs on":  # as after an exception that somebody caught: its connections stay open
                sys.excepthook(ValueError, ValueError("no more of this"), None)
                time.sleep(60)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "ends":
                return
        model.train_step(batches(Recipe(rows=4), step)[0])


if __name__ == "__main__":
    main(sys.argv[1])
