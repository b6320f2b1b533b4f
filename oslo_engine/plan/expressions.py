"""The arithmetic of a policy: names, whole numbers and * / + -, with exact division."""

from __future__ import annotations

import ast
from collections.abc import Callable

from oslo_engine.errors import PolicyError


def evaluate(expression: str, lookup: Callable[[str], int], *, where: str) -> int:
    """Value of an expression such as ``head * head_dim``, ``q / kv`` or ``conv1d.kernel_size``.

    Args:
        expression: checked by the policy schema; * and / bind tighter than + and -.
        lookup: the value of a name; raises KeyError for one it does not know.
        where: file:line, for errors.

    Raises:
        PolicyError: an unknown name, or a division with a remainder.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node)
            try:
                return lookup(name)
            except KeyError:
                raise PolicyError(
                    f"unknown name {name!r} in {expression!r}",
                    where=where,
                    expected="a unit of this policy, a config attribute, or an attribute of the module",
                ) from None
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Div):
                if right == 0 or left % right:
                    raise PolicyError(
                        f"{expression!r} does not divide", where=where, expected="no remainder", got=f"{left} / {right}"
                    )
                return left // right
        raise PolicyError(f"{expression!r} is not an expression", where=where, expected="names, whole numbers and * / + -")

    return value(ast.parse(expression, mode="eval").body)
