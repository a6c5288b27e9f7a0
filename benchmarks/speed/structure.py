"""How large the code is and how it hangs together: modules, imports, lines, functions, names.

    python benchmarks/speed/structure.py [--root DIR]

Counts the four packages (``fairpate``, ``aggregator``, ``teachers``, ``student``). An *importer* of a module is another
module that imports it anywhere, in a function or for type checkers alike. A *circle* is a group of modules that
import each other, imports inside functions and those for type checkers included. *Header* lines are a module's
docstring and imports before its first statement. *Code* lines are neither blank, comment nor docstring. *Fields* are
the settings that a user may give for one method, in all its sections.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

PACKAGES = ("fairpate", "aggregator", "teachers", "student")
Kind = Literal["first", "later", "types"]
"""When an import runs: with the module, inside a function, or for type checkers alone."""
Functions = ast.FunctionDef | ast.AsyncFunctionDef
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Module:
    """One file: its dotted name and its text."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[tuple[Kind, str, str]]:
        """Each import as (kind, module, name); the name is empty for ``import module``."""
        found: list[tuple[Kind, str, str]] = []
        stack: list[tuple[ast.AST, Kind]] = [(self.tree, "first")]
        while stack:
            node, kind = stack.pop()
            if isinstance(node, ast.Import):
                found += [(kind, alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(kind, node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                stack += [(child, "types") for child in node.body] + [(child, kind) for child in node.orelse]
            else:
                inside = isinstance(node, Functions) and kind == "first"
                statements = [child for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS)]
                stack += [(child, "later" if inside else kind) for child in statements]
        return found

    def header(self) -> int:
        """Lines up to the first statement that is neither docstring nor import."""
        for node in self.tree.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if not is_text and not is_types and not isinstance(node, ast.Import | ast.ImportFrom):
                decorators = getattr(node, "decorator_list", [])
                return (decorators[0].lineno if decorators else node.lineno) - 1
        return self.text.count("\n")

    def kinds_of_lines(self) -> Counter[str]:
        """How many lines are code, docstring, comment and blank."""
        documented: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        commented = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        }
        counts: Counter[str] = Counter()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if number in documented:
                counts["docstring"] += 1
            elif number in commented:
                counts["comment"] += 1
            else:
                counts["code" if line.strip() else "blank"] += 1
        return counts

    def functions(self) -> Iterator[Functions]:
        """Every function and method."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Functions))


def read_modules(root: Path) -> dict[str, Module]:
    """The modules of the packages below ``root`` by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.parent.name == "examples":  # files that users copy, which nothing imports
                continue
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path)
    return found


def edges(modules: dict[str, Module]) -> dict[str, dict[str, set[Kind]]]:
    """For each module the modules of ours that it imports, and when."""
    found: dict[str, dict[str, set[Kind]]] = {}
    for module in modules.values():
        reached: dict[str, set[Kind]] = defaultdict(set)
        found[module.name] = reached
        for kind, name, part in module.imports:
            target = f"{name}.{part}" if f"{name}.{part}" in modules else name
            if target in modules and target != module.name:
                reached[target].add(kind)
    return found


def circles(reached: dict[str, dict[str, set[Kind]]], *, kinds: set[Kind]) -> list[list[str]]:
    """One circle after the other, each broken before the next is looked for."""
    graph = {name: {other for other, when in others.items() if when & kinds} for name, others in reached.items()}
    found: list[list[str]] = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1]
            found.append(circle)
            graph[circle[1]].discard(circle[0])
            continue
        return found


def count_fields(annotation: Any) -> int:
    """How many settings a field of this type holds: all those of a section or a record, else one."""
    for part in (annotation, *get_args(annotation)):
        if dataclasses.is_dataclass(part):
            return sum(map(count_fields, get_type_hints(part).values()))
        # A file is one setting: its checksum follows from it.
        if "model_fields" in dir(part) and "sha256" not in part.model_fields:
            return sum(count_fields(field.annotation) for field in part.model_fields.values())
    return 1


def most_fields(root: Path) -> str:
    """The largest number of fields that a method's configuration has, and the method."""
    sys.path.insert(0, str(root))  # ahead of an installed version
    from fairpate.methods.base import all_methods

    number, name = max((count_fields(method), name) for name, method in all_methods().items())
    return f"{number} ({name})"


def measures(root: Path) -> dict[str, str]:
    """What the table shows, by row."""
    modules = read_modules(root)
    reached = edges(modules)
    importers = Counter(other for others in reached.values() for other in others)
    lines = Counter[str]()
    for module in modules.values():
        lines += module.kinds_of_lines()
    total = sum(lines.values())
    functions = [node for module in modules.values() for node in module.functions()]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    stems = Counter(name.rpartition(".")[2] for name, module in modules.items() if module.path.stem != "__init__")
    classes = Counter(n.name for m in modules.values() for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef))
    header = sum(module.header() for module in modules.values())
    later = circles(reached, kinds={"first", "later", "types"})
    return {
        "modules": str(len(modules)),
        "modules with one importer": str(sum(importers[name] == 1 for name in modules)),
        "lines": f"{total:,}",
        "lines of code": f"{lines['code']:,}",
        "docstrings, comments": f"{lines['docstring'] / total:.1%}, {lines['comment'] / total:.1%}",
        "headers": f"{header / total:.1%}",
        "functions in 1,000 lines": f"{1000 * len(functions) / total:.0f}",
        "length of a function: median, 95th percentile, longest": (
            f"{statistics.median(lengths):.0f}, {lengths[int(0.95 * len(lengths))]}, {lengths[-1]}"
        ),
        "circles of imports, those for type checkers included": str(len(later)),
        "module names that occur twice": str(sum(count > 1 for count in stems.values())),
        "class names that occur twice": str(sum(count > 1 for count in classes.values())),
        "fields of a configuration, most": most_fields(root),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="another checkout")
    for row, value in measures(parser.parse_args().root).items():
        print(f"{row:58} {value}")


if __name__ == "__main__":
    main()
