"""What one worker does: join the others, load its slice, and run what the parent sends until it is told to stop."""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oslo_engine.deploy.generating import run_prompts
from oslo_engine.deploy.messages import Problem, Ready, Result, RunMethod, RunPrompts, Stop, Traits, pack, receive
from oslo_engine.deploy.pulse import write_pulse
from oslo_engine.deploy.settings import Deployment
from oslo_engine.errors import DeploymentError

UNREADABLE = -2  # instead of a call's number, which is not known then
# A worker waits here for the others in the middle of a call; the parent ends it long before where one of them has died.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Assignment:
    """A worker's place.

    folder: shared by all of them. load: packed, a function without arguments that returns the model.
    """

    rank: int
    num_ranks: int
    folder: Path
    load: bytes
    settings: Deployment
    seed: int


def run_worker(assignment: Assignment, pipe: Connection) -> None:
    """The whole life of a worker's process: whatever happens in it, the parent hears."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    _die_with_forker()
    threading.Thread(target=_die_with_parent, args=(assignment.folder,), daemon=True).start()
    threading.Thread(target=_show_life, args=(assignment,), daemon=True).start()
    try:
        _join(assignment)
        load: Callable[[], Any] = pickle.loads(assignment.load)
        model = load()
        pipe.send_bytes(pack(Ready(_traits(model))))
    except BaseException as error:
        pipe.send_bytes(pack(_problem(-1, error)))
        os._exit(1)  # the others may be anywhere: no farewell to the process group
    _serve(model, assignment.rank, pipe)
    os._exit(0)


def _serve(model: Any, rank: int, pipe: Connection) -> None:
    while True:
        try:
            work = receive(pipe)
        except (EOFError, OSError):
            return
        except Exception as error:
            unreadable = DeploymentError(
                "the arguments of a call could not be read in a worker",
                where=f"rank {rank}",
                got=str(error),
                hint="what is passed must be defined in a module that can be imported, not in the script itself",
            )
            pipe.send_bytes(pack(_problem(UNREADABLE, unreadable)))
            continue
        if isinstance(work, Stop):
            return
        if not isinstance(work, (RunMethod, RunPrompts)):
            continue  # a cancellation of what has ended meanwhile
        try:
            value = _run(model, work, rank, pipe)
            packed = _packed(value, work) if rank == 0 else None
            pipe.send_bytes(pack(Result(work.number, packed, _sequence())))
        except (KeyboardInterrupt, SystemExit):
            return
        except BaseException as error:
            pipe.send_bytes(pack(_problem(work.number, error)))


def _run(model: Any, work: RunMethod | RunPrompts, rank: int, pipe: Connection) -> Any:
    if work.seed is not None:
        torch.manual_seed(work.seed)
    with torch.no_grad(), _changed_defaults(model, work.defaults):
        if isinstance(work, RunPrompts):
            return run_prompts(model, work, pipe if rank == 0 else None)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(_device(model)), (work.args, work.kwargs))
        found = getattr(model, work.method)
        value = found(*args, **kwargs) if callable(found) else found
        return None if value is model else value  # of methods that return the model


@contextmanager
def _changed_defaults(model: Any, defaults: dict[str, Any]) -> Iterator[None]:
    """Within, the model's own generation settings are those that the parent sees."""
    config = getattr(model, "generation_config", None)
    before = {name: getattr(config, name, None) for name in defaults}
    try:
        for name, value in defaults.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def _packed(value: Any, work: RunMethod | RunPrompts) -> bytes:
    method = work.method if isinstance(work, RunMethod) else "generate"
    try:
        return pack(to_host(value))
    except DeploymentError:
        raise
    except Exception as error:
        raise _unsendable(f"{type(value).__name__} of {method}: {error}") from error


def _unsendable(got: str) -> DeploymentError:
    return DeploymentError(
        "what this call returned stays with the workers", expected="tensors, numbers, texts and plain objects", got=got
    )


def to_host(value: Any) -> Any:
    """A value that can travel: tensors on the CPU, without the storage around a view; caches stay here.

    Raises:
        DeploymentError: a module of the model is in it.
    """
    from transformers.cache_utils import Cache

    def travelling(leaf: Any) -> Any:
        if isinstance(leaf, Cache):
            return None
        if isinstance(leaf, nn.Module):
            raise _unsendable(f"a module of the model, {type(leaf).__name__}")
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        whole = leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
        return leaf if whole and leaf.is_contiguous() else leaf.contiguous().clone()

    return pytree.tree_map(travelling, value, is_leaf=lambda leaf: isinstance(leaf, Cache))


def _problem(number: int, error: BaseException) -> Problem:
    trace = "".join(traceback.format_exception(error))
    try:
        packed: bytes | None = pack(error)
        pickle.loads(packed or b"")
    except Exception:
        packed = None
    summary = str(error).partition("\n")[0]
    return Problem(number, packed, f"{type(error).__name__}: {summary}", trace, _sequence())


def _sequence() -> tuple[tuple[str, int], ...]:
    """Collectives run so far in each process group, by its ranks and its place among the groups of those.

    Where ranks differ in these after a failed call, one of them would take what was meant for it then as the next call's.
    """
    if not dist.is_initialized():
        return ()
    counts: list[tuple[str, int]] = []
    seen: Counter[str] = Counter()
    for group in list(dist.distributed_c10d._world.pg_map):
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        counts.append((f"{ranks} {seen[ranks]}", int(group._get_sequence_number_for_group())))  # type: ignore[attr-defined]
        seen[ranks] += 1
    return tuple(counts)


def _traits(model: Any) -> Traits:
    config, generation = model.config, getattr(model, "generation_config", None)
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    return Traits(
        config=config,
        generation_config=generation,
        mixes_lengths=takes_positions and not config.is_encoder_decoder and not getattr(model, "_is_stateful", False),
        dtype=model.dtype,
        can_generate=model.can_generate(),
        modalities=(getattr(model, "input_modalities", "text"), getattr(model, "output_modalities", "text")),
    )


def _on_gpu(assignment: Assignment) -> bool:
    return torch.cuda.device_count() >= assignment.num_ranks


def _join(assignment: Assignment) -> None:
    """A process group over a file: no port is taken. NCCL where every worker has a GPU of its own, else gloo."""
    on_gpu = _on_gpu(assignment)
    if on_gpu:
        torch.cuda.set_device(assignment.rank)
    threads = assignment.settings.threads_per_worker
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // assignment.num_ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.manual_seed(assignment.seed)
    store = dist.FileStore(str(assignment.folder / "store"), assignment.num_ranks)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=assignment.rank,
        world_size=assignment.num_ranks,
        timeout=_COLLECTIVE_TIMEOUT,
    )


def _show_life(assignment: Assignment) -> None:
    parent: Any = parent_process()

    def goes_on() -> bool:
        # A child that the parent forked meanwhile keeps its pipes open, so their end would not show that it is gone.
        try:
            os.kill(parent.pid, 0)
        except ProcessLookupError:
            _end_without_parent(assignment.folder)
        except PermissionError:
            pass
        return True

    write_pulse(
        assignment.folder,
        assignment.rank,
        lambda: sum(count for _, count in _sequence()),
        counts_cpu=not _on_gpu(assignment),
        goes_on=goes_on,
    )


def _die_with_forker() -> None:
    """On Linux: end even while stopped, when the process that forks workers ends.

    It ends with the parent where no worker keeps open what it is given to start processes through the same forker.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if sys.platform == "linux" and isinstance(alive := getattr(server, "_forkserver_alive_fd", None), int):
        os.close(alive)
        server._forkserver_alive_fd = None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_parent(folder: Path) -> None:
    parent: Any = parent_process()
    wait([parent.sentinel])
    _end_without_parent(folder)


def _end_without_parent(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
