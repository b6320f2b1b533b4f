"""A training in which one rank goes wrong: python failing_ranks.py HOW TP PP. Started by tests/e2e/test_failing_ranks.py."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import oslo_engine as oslo
from training_runs import Recipe, batches, unsplit

WRONG_STEP = 2


def main(how: str, tp: int, pp: int) -> None:
    torch.set_num_threads(1)
    if how == "world":
        return with_wrong_world(tp, pp)
    dist.init_process_group("gloo")
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=tp, pp=pp)
    for step in range(8 if how != "evaluates" else 10_000):
        wrong = step == WRONG_STEP and dist.get_rank() == 1
        if wrong:
            print("WRONG", time.time(), flush=True)
        if wrong and how == "raises":
            time.sleep(1)  # the other ones are waiting by then
            raise ValueError("no more of this")
        if wrong and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if wrong and how == "busy":
            computes_alone(until=time.monotonic() + 3 * float(os.environ["OSLO_ENGINE_STOPPED_S"]))
        if wrong and how == "stopped in backward":
            last_block(model).register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        if wrong and how == "ends":
            return None
        if wrong and how == "saves":  # as behind a loop that ends earlier
            model.save_pretrained_with_parallel(tempfile.mkdtemp())
            return None
        if wrong and how == "evaluates":
            with torch.no_grad():
                model(**batches(Recipe(rows=4), step)[0])
        with killed_inside(model) if wrong and how == "killed" else contextlib.nullcontext():
            train(model, batches(Recipe(rows=4), step)[0], how, wrong)
    return None


def train(model: Any, batch: dict[str, torch.Tensor], how: str, wrong: bool) -> None:
    if how in ("nan", "nan gradient"):
        return train_with_nan(model, batch, how, wrong)
    if how != "catches":
        model.train_step(batch)
        return None
    handle = None if not wrong else last_block(model).register_forward_hook(stumble)
    try:
        output = model(**batch)
        for micro in output if model.mpu.get_pipeline_parallel_world_size() > 1 else [output]:
            micro.loss.backward()
    except ValueError:
        print("caught", flush=True)
    finally:
        if handle is not None:
            handle.remove()
    return None


def train_with_nan(model: Any, batch: dict[str, torch.Tensor], how: str, wrong: bool) -> None:
    """One rank has a weight, or a gradient, that is no number; a loop as people write it looks at losses and norms."""
    parameter = next(parameter for name, parameter in model.named_parameters() if "mlp.c_fc.weight" in name)
    if wrong and how == "nan":
        with torch.no_grad():
            parameter[0, 0] = float("nan")
    loss = model.train_step(batch)
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}")
    if wrong and how == "nan gradient":
        parameter.grad[0, 0] = float("nan")
    oslo.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def last_block(model: Any) -> torch.nn.Module:
    held = [block for block in model.transformer.h if any(not parameter.is_meta for parameter in block.parameters())]
    return held[-1].mlp


def computes_alone(until: float) -> None:
    while time.monotonic() < until:
        sum(range(1_000_000))


def stumble(module: torch.nn.Module, args: Any, output: Any) -> None:
    raise ValueError("no more of this")


@contextlib.contextmanager
def killed_inside(model: Any) -> Any:
    last_block(model).register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    yield


def with_wrong_world(tp: int, pp: int) -> None:
    """As a script does that leaves everything to the launcher."""
    model, _ = unsplit(Recipe())
    print("WRONG", time.time(), os.getpid(), flush=True)
    oslo.parallelize(model, tp=tp, pp=pp)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
