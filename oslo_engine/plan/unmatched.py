"""What to say where a rule of a policy finds nothing: what is there, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from oslo_engine.errors import PolicyError
from oslo_engine.plan.names import Names, split_optional, told_short
from oslo_engine.policy.schema import Policy
from oslo_engine.policy.schema_faults import nearest


def unmatched_rules(
    names: Names, policy: Policy, name: str, anchors: list[str], matched: set[tuple[str, str]], *, whole: bool
) -> Iterator[PolicyError]:
    """Rules of a region that matched nothing in any block.

    Args:
        anchors: the modules at which the region was looked for.
        matched: (kind, pattern) of the rules that matched something.
        whole: whether some place was matched to its end; where all have faults, the last rules were not looked at.
    """
    region = policy.regions[name]
    modules, tensors = ("columns", "rows", "inner", "norms"), ("cut", *(("sum", "once") if whole else ()))
    for kind in (*modules, *tensors):
        inside = names.modules_inside if kind in modules else names.tensors_inside
        for pattern in getattr(region, kind):
            wanted, may_lack = split_optional(pattern)
            if may_lack or (kind, pattern) in matched:
                continue
            there = list(dict.fromkeys(path for anchor in anchors for path in inside(anchor)))
            near = nearest(wanted, there)
            yield PolicyError(
                f"rule {pattern!r} matches nothing in any block",
                where=policy.where("regions", name, kind, pattern),
                expected=f"in {anchors[0]}: {told_short(there) or 'nothing'}",
                hint=f"did you mean {near!r}?" if near else None,
            )


def no_attribute(module: nn.Module, full: str, path: str, where: str) -> PolicyError:
    """An attribute to set that is not there.

    Args:
        module: where it was looked for. full, path: its name within the model and within the module.
    """
    numbers = [name for name, value in vars(module).items() if isinstance(value, int) and not isinstance(value, bool)]
    near = nearest(path, numbers)
    return PolicyError(
        "no such attribute",
        where=where,
        expected=f"a number of {type(module).__name__}: {told_short(numbers) or 'it has none'}",
        got=full,
        hint=f"did you mean {near!r}?" if near else None,
    )
