"""What DeepSpeed's ZeRO 1 and 2 keep, by parameter instead of in partitions.

ZeRO lays the parameters of a group one after another, pads them, and divides that line evenly over the data-parallel ranks. Its
optimizer steps on one partition: master weights in single precision, with moments of the same form and one count of steps.
Here each parameter's part is put together from the ranks that have a piece of it, and taken apart again, so that a checkpoint
has what any optimizer would keep for the parameter, and the master weight as ``fp32``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_engine.checkpoint.optimizer_state import MASTER, Entry, name_of
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.plan.plan import Plan

_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # what changes in a dynamic loss scaler


def is_zero(optimizer: Any) -> bool:
    """Whether it is what ``deepspeed.initialize`` makes of an optimizer for ZeRO 1 or 2."""
    cls = type(optimizer)
    return (cls.__module__, cls.__name__) == ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")


class ZeroState:
    """A ZeRO optimizer by the names of its parameters.

    Args:
        names: the first names of this rank's parameters.

    Raises:
        UnsupportedError: this version of DeepSpeed keeps its partitions in another way.
    """

    def __init__(self, optimizer: Any, names: Mapping[Tensor, str]) -> None:
        try:
            self._partitions: Sequence[Tensor] = optimizer.single_partition_of_fp32_groups
            self._members: Sequence[Sequence[Any]] = optimizer.bit16_groups
            self._base: torch.optim.Optimizer = optimizer.optimizer
            self._scaler = optimizer.loss_scaler if optimizer.dynamic_loss_scale else None
            self._places = {
                parameter: (number, parameter._hp_mapping, parameter._dp_group)
                for number, members in enumerate(self._members)
                for parameter in members
            }
        except AttributeError as error:
            raise UnsupportedError(
                "this version of DeepSpeed keeps its optimizer in another way",
                got=str(error),
                hint="use a version that oslo_engine was tried with: see constraints.txt",
            ) from None
        self._names = names
        self._parameters = {names[parameter]: parameter for parameter in self._places}

    def entries(self, plan: Plan) -> tuple[dict[str, dict[str, Entry]], dict[str, Any]]:
        """What it keeps: tensors by parameter and key, and everything else by the name in a file. The same on all dp ranks.

        Raises:
            UnsupportedError: it keeps something that is neither a number nor like the partition.
        """
        entries: dict[str, dict[str, Entry]] = {}
        others: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            shape, partition = plan.tensor(name).shape, self._partition(parameter)
            entries[name] = {MASTER: Entry(partition.dtype, shape, divided=True)}
            for key, value in self._state(parameter).items():
                if not isinstance(value, Tensor):
                    others[name_of(key, name)] = value
                elif value.shape == partition.shape and parameter.ndim:
                    entries[name][key] = Entry(value.dtype, shape, divided=True)
                elif not value.ndim and parameter.ndim:
                    entries[name][key] = Entry(value.dtype, (), divided=False)
                else:
                    raise UnsupportedError(
                        "the optimizer keeps something that cannot be divided by parameter",
                        where=f"{key} of {name}",
                        expected=f"shape {tuple(partition.shape)}, or a number",
                        got=f"shape {tuple(value.shape)}",
                    )
        return entries, others

    def read(self, name_in_file: str) -> Tensor:
        """One tensor of ``entries``: this rank's part over tp, the whole over dp.

        Communication: one all-reduce over dp, of as many bytes; all ranks ask for the same.
        """
        key, _, name = name_in_file.partition(":")
        parameter = self._parameters[name]
        kept = self._partition(parameter) if key == MASTER else self._state(parameter)[key]
        if not kept.ndim:
            return kept.detach()
        _, mapping, group = self._places[parameter]
        whole = torch.zeros(parameter.numel(), dtype=kept.dtype, device=parameter.device)
        if mapping is not None:
            _piece(whole, mapping.lp_fragment_address).copy_(_piece(kept.detach(), mapping.hp_fragment_address))
        dist.all_reduce(whole, group=group)  # every entry has one owner, so nothing is added to anything but zero
        return whole.reshape(parameter.shape)

    def fill(self, keys: Mapping[str, Sequence[str]], read: Callable[[str, str], Any]) -> None:
        """Take over what was saved, by this or by another optimizer of the same kind.

        Args:
            keys: what was saved for each parameter, by name. Without a master weight it is the parameter's own value.
            read: gives the value of (key, name): this rank's part over tp, the whole over dp.

        Raises:
            CheckpointError: parameters of one group are not alike in what must be one for all of them.
        """
        for number, members in enumerate(self._members):
            names = [self._names[parameter] for parameter in members]
            saved = [set(keys.get(name, ())) - {MASTER} for name in names]
            wanted = set[str]().union(*saved)
            if any(of_one != wanted for of_one in saved):
                raise _not_alike(number, f"some have {', '.join(sorted(wanted))}, others do not")
            state = self._base.state[self._partitions[number]]
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key in sorted(wanted):
                self._fill_one(number, key, read, state)
            for name, parameter in zip(names, members, strict=True):
                self._place(
                    parameter, self._partitions[number], read(MASTER, name) if MASTER in keys.get(name, ()) else parameter
                )

    def loss_scale(self) -> dict[str, float]:
        """Where a dynamic loss scale is; nothing of another one."""
        return {key: getattr(self._scaler, key) for key in _LOSS_SCALE if hasattr(self._scaler, key)}

    def set_loss_scale(self, saved: Mapping[str, float]) -> None:
        for key in self.loss_scale():
            if key in saved:
                setattr(self._scaler, key, saved[key])

    def _fill_one(self, number: int, key: str, read: Callable[[str, str], Any], state: dict[str, Any]) -> None:
        partition = self._partitions[number]
        one_for_all: list[Any] = []
        for parameter in self._members[number]:
            value = read(key, self._names[parameter])
            if not (isinstance(value, Tensor) and value.ndim):
                one_for_all.append(value)
                if value != one_for_all[0]:
                    raise _not_alike(number, f"{key} {float(one_for_all[0]):g} and {float(value):g}")
                continue
            if key not in state or state[key].shape != partition.shape:
                state[key] = torch.zeros_like(partition, dtype=value.dtype)
            self._place(parameter, state[key], value)
        if one_for_all:
            value, group = one_for_all[0], self._base.param_groups[number]
            on_device = isinstance(value, Tensor) and (group.get("capturable") or group.get("fused"))
            state[key] = value.to(partition.device) if on_device else value

    def _place(self, parameter: Any, partition: Tensor, value: Tensor) -> None:
        mapping = self._places[parameter][1]
        if mapping is not None:
            piece = _piece(value.detach().reshape(-1), mapping.lp_fragment_address)
            _piece(partition.detach(), mapping.hp_fragment_address).copy_(piece)

    def _partition(self, parameter: Any) -> Tensor:
        return self._partitions[self._places[parameter][0]]

    def _state(self, parameter: Any) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._base.state.get(self._partition(parameter), {})
        return state


def _piece(line: Tensor, address: Any) -> Tensor:
    return line.narrow(0, address.start, address.numel)


def _not_alike(number: int, got: str) -> CheckpointError:
    return CheckpointError(
        "DeepSpeed keeps one state for a whole parameter group, and its parameters were not all in the same one",
        where=f"parameter group {number}",
        got=got,
        hint="go on with the optimizer that was saved, or put these parameters into different groups",
    )
