"""What the source says about itself, read without importing it: its modules, their imports, the words in their code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "oslo_engine"


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a.b import c`` is ``a.b.c``, ``import a.b`` is ``a.b``; relative ones keep their dots."""

    target: str
    file: Path
    line: int
    at_module_level: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name, those in kernels/ among them as ``oslo_engine.kernels``."""
    found = {}
    for folder, name in ((PACKAGE, PACKAGE), ("kernels", f"{PACKAGE}.kernels")):
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = file
    return found


def imports(file: Path) -> list[Import]:
    """All imports of a file but those for type checkers only."""
    return list(_imports(ast.parse(file.read_text(encoding="utf-8")), file, at_module_level=True))


def _imports(node: ast.AST, file: Path, at_module_level: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, file, node.lineno, at_module_level) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (f"{node.module}." if node.module else "")
        yield from (Import(base + alias.name, file, node.lineno, at_module_level) for alias in node.names)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.orelse:
            yield from _imports(child, file, at_module_level)
    else:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, file, at_module_level and not inside)


def engine_imports(root: Path) -> dict[str, list[tuple[str, Import]]]:
    """For every module the modules of the package that it imports; a name that is no module counts for the module it is in."""
    known = modules(root)
    graph: dict[str, list[tuple[str, Import]]] = {}
    for name, file in known.items():
        ours = [found for found in imports(file) if found.target.split(".")[0] == PACKAGE]
        graph[name] = [(found.target if found.target in known else found.target.rpartition(".")[0], found) for found in ours]
    return graph


def code_texts(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier and string in a file, but not its comments and docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                yield line, node.value
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield line, text


def words(text: str) -> list[str]:
    """``GPT2LMHeadModel``, ``gpt2_lm-head model`` -> ``["gpt2", "lm", "head", "model"]``."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text).lower())
