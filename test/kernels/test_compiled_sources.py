"""Machine code in numba's cache is as new as the file of its function: it must hang on no other of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sgl_importance
import sgl_importance_kernels

PACKAGES = [Path(str(package.__file__)).parent for package in (sgl_importance, sgl_importance_kernels)]


def compiled_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("njit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def names_of_other_modules(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sgl_importance")
        for alias in node.names
    }


def test_what_is_compiled_reads_nothing_of_another_module() -> None:
    files = [file for package in PACKAGES for file in package.rglob("*.py")]
    trees = {file: ast.parse(file.read_text()) for file in files}
    found = [(file, tree, each) for file, tree in trees.items() for each in compiled_functions(tree)]
    assert len(found) > 10
    foreign = [
        f"{file}: {function.name} reads {node.id}"
        for file, tree, function in found
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id in names_of_other_modules(tree)
    ]
    assert foreign == []
