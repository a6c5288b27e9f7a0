"""Pages of the documentation site that follow from the code: navigation, commands, configuration, Python interface.

Each is Markdown that stands below the first lines of its page when the site is built, so that nothing is written twice.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import papers  # in benchmarks/papers/, which conf.py names
import typer
from typer.cli import get_docs_for_click

from fairpate.cli.summaries import as_yaml, fields_of
from fairpate.config import SweepConfig
from fairpate.methods.base import all_methods, find_method, looks_of
from fairpate.report.frontier import Row
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.run.sweep import cells_of, load_sweep
from fairpate.types import RunRecord

_ROUTING = ", ".join(f"set_{name}_request" for name in ("fit", "predict", "predict_proba", "score"))
_MEMBERS = ["   :members:", f"   :exclude-members: {_ROUTING}"]  # scikit-learn documents those
_MISTAKES = (2**31 - 1, 2**63 - 1, 1e12)  # ends of ranges that only catch mistakes
_LINK = re.compile(r"^- \[[^\]]*\]\(([\w./-]+)\.(?:md|ipynb)\)", re.MULTILINE)
MODULES = {
    "python": "fairpate fairpate.estimators",
    "methods": "fairpate.types fairpate.methods.base",
    "privacy": "fairpate.privacy.accountant fairpate.privacy.gnmax "
    "fairpate.privacy.mechanism_events fairpate.privacy.laplace fairpate.privacy.discrete_gaussian "
    "fairpate.privacy.second_accountant fairpate.privacy.audit_bounds",
    "fairness": "fairpate.fairness.rates fairpate.fairness.gate fairpate.methods.raco_dp",
    "learning": "fairpate.nn.models fairpate.nn.fit fairpate.nn.private_fit student.student student.card",
    "aggregator": "aggregator.mechanism aggregator.session aggregator.ledger aggregator.client",
}
"""Page of the Python reference, and the modules on it."""


def navigation(index: str) -> str:
    """``index`` with a hidden table of contents below each heading: the pages that it lists there."""
    heading, *parts = re.split(r"^## ", index, flags=re.MULTILINE)
    return heading + "".join(f"## {part.rstrip()}\n\n{_contents(part)}\n" for part in parts)


def _contents(part: str) -> str:
    pages = "\n".join(_LINK.findall(part))
    return f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {part.splitlines()[0]}\n\n{pages}\n```\n"


_NOTION_IN = {
    "demographic_parity": "parity",
    "equalized_odds": "odds",
    "accuracy_parity": "accuracy_parity",
    "false_negative_rate": "fnr",
    "false_positive_rate": "fpr",
}
"""The name of a notion of fairness in the recorded results."""


_ROOT = Path(__file__).parents[1]


def live_frontier(name: str = "utkface") -> str:
    """The interactive page of a recorded comparison, as `fairpate compare` would write it; nothing runs."""
    results = json.loads((_ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    path = _ROOT / "configs" / "paper" / f"{name}.yaml"
    with mock.patch("fairpate.data.dataset.DatasetEntry.located"):  # commands need no files of the data set
        cells = cells_of(sweep := load_sweep(path), folder=path.parent)
    names = papers.cell_names(cells)
    # Commands of other seeds differ in the seed alone, and would make the page a third larger.
    commands = {names[cell.digest]: cell.command for cell in cells if cell.config.seed == sweep.seeds[0]}
    rows = []
    for name, cell in results["cells"].items():
        data, method, *settings = name.split("/", 2)
        config = {"method": method} | dict(each.split("=", 1) for each in ",".join(settings).split(",") if each)
        for place, seed in enumerate(cell["seeds"]):
            value = {key: each[place] for key, each in cell.items() if isinstance(each, list)}
            ends = {notion: value.get(key) for notion, key in _NOTION_IN.items()}
            record = RunRecord(
                **{key: cell[key] for key in ("unit", "relation", "delta")},
                **{key: value[key] for key in ("accuracy", "coverage", "majority_accuracy")},
                method=method,
                data=data,
                seed=seed,
                epsilon=math.inf if value["epsilon"] is None else value["epsilon"],
                epsilon_is_data_dependent=False,
                disparity=value["parity"],
                config=config,
                degenerate=("is no better than a constant, or is one",) * bool(value["degenerate"]),
                fairness={notion: dict.fromkeys(("value", "low", "high"), each) for notion, each in ends.items()},
            )
            row = {
                "method": method,
                "data": data,
                "seed": seed,
                "config": config,
                "command": "" if place else commands[name],
            }
            rows.append(Row(digest=name, minutes=math.nan, record=record, **row))
    looks = looks_of({row.method for row in rows})
    report = FrontierReport(title="PATE and DP-SGD families on faces", rows=rows, publish_unprotected=True, looks=looks)
    return frontier_report(report)


def commands() -> str:
    """Every command with its arguments and options, as Typer writes it."""
    from fairpate.cli import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="fairpate")
    return re.sub(r"^# .*\n", "", text, count=1)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a configuration, or a section; ``default`` None where it has to be given, empty of a section."""

    path: str
    values: str
    meaning: str
    default: str | None


def configuration() -> str:
    """Every field of every method and of a sweep: default, values, meaning, and which methods read it."""
    read_by: dict[str, dict[str, Field]] = {}
    methods = all_methods() | {"own_votes": find_method("own_votes")}
    for name, method in methods.items():
        defaults = {each["field"]: as_yaml(each.get("default", "")) for each in fields_of(method())}
        for field in fields_in(method.model_json_schema(), defaults):
            read_by.setdefault(field.path, {})[name] = field
    sections = dict.fromkeys(path.partition(".")[0] for path in read_by if "." in path)
    del read_by["method"]  # as the command line says it
    alone = [found for path, found in read_by.items() if "." not in path and path not in sections]
    parts = [_table("A run", alone, list(methods))]
    for section in sections:
        inside = [found for path, found in read_by.items() if (path + ".").startswith(f"{section}.")]
        parts.append(_table(f"`{section}`", inside, list(methods)))
    sweep = [{"": field} for field in fields_in(SweepConfig.model_json_schema(), {})]
    return "\n".join([*parts, _table("A sweep", sweep, [""])])


def fields_in(schema: Mapping[str, Any], defaults: Mapping[str, str]) -> Iterator[Field]:
    """Fields of a JSON schema, section by section, those of sections that are null by default too."""
    return _fields(schema, "", schema.get("$defs", {}), defaults)


def _fields(
    section: Mapping[str, Any], prefix: str, definitions: Mapping[str, Any], defaults: Mapping[str, str]
) -> Iterator[Field]:
    for name, node in section["properties"].items():
        path, inner = f"{prefix}{name}", _section_of(node, definitions)
        default = defaults.get(path, as_yaml(node["default"]) if "default" in node else None)
        meaning = " ".join(part for part in (node.get("description"), (inner or {}).get("description")) if part)
        meaning = meaning.replace("``", "`")
        if inner is not None and default != "null":
            default = ""
        yield Field(path=path, values=_values(node), meaning=meaning, default=default)
        if inner is not None:
            yield from _fields(inner, f"{path}.", definitions, defaults)


def _section_of(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any] | None:
    places = [part["$ref"] for part in [node, *node.get("anyOf", [])] if "$ref" in part]
    found = definitions[places[0].rpartition("/")[2]] if places else None
    return found if found is not None and "properties" in found else None


def _values(node: Mapping[str, Any]) -> str:
    """What a field may hold, in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_values(part) for part in node["anyOf"]))
    if "enum" in node or "const" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    kind = node.get("type", "")
    if kind in ("number", "integer"):
        return _range({"number": "number", "integer": "whole number"}[kind], node)
    if kind == "array":
        of = node.get("items") or {}
        return f"list of {_values(of)}" if of else "list"
    if kind == "string":
        return str(node.get("format", "text"))
    return {"boolean": "`true`, `false`", "null": "null", "object": "mapping"}.get(kind, "section")


def _range(noun: str, node: Mapping[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    if node.get("minimum", -1) > node.get("exclusiveMinimum", math.inf):
        del words["exclusiveMinimum"]
    ends = [f"{words[end]} {node[end]:g}" for end in words if node.get(end, _MISTAKES[0]) not in _MISTAKES]
    return " ".join([noun, " and ".join(ends)]).strip()


def _table(title: str, rows: Sequence[Mapping[str, Field]], names: Sequence[str]) -> str:
    lines = [f"## {title}\n", "| field | values, default | meaning |", "|-|-|-|"]
    return "\n".join([*lines, *(_row(by_method, names) for by_method in rows), ""])


def _row(by_method: Mapping[str, Field], names: Sequence[str]) -> str:
    values, default, meaning = (
        _said({name: words(field) for name, field in by_method.items()})
        for words in (lambda field: field.values, _default, lambda field: field.meaning)
    )
    path = next(iter(by_method.values())).path
    meaning += _readers(list(by_method), names)
    cells = (f"`{path}`", "<br>".join(filter(None, (values, default))), meaning)
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def _said(by_method: Mapping[str, str]) -> str:
    """What most methods say, then what others say and which these are."""
    names: dict[str, list[str]] = {}
    for name, words in by_method.items():
        names.setdefault(words, []).append(name)
    common, *others = sorted(names, key=lambda words: -len(names[words]))
    return " ".join([common, *(f"For {', '.join(names[words])}: {words}" for words in others if words)])


def _readers(readers: Sequence[str], names: Sequence[str]) -> str:
    """Which of ``names`` read a field, in the shorter way; empty for all."""
    others = [name for name in names if name not in readers]
    if not others:
        return ""
    words = f"all but {', '.join(others)}" if len(others) < len(readers) else ", ".join(readers)
    return f" *Read by {words}.*"


def _default(field: Field) -> str:
    value = field.default
    return "to be given" if value is None else f"default `{value}`" if value else ""


def interface(page: str) -> str:
    """What the modules of a page document: their first paragraphs and every public class and function."""
    shown: set[int] = set()
    parts = ((name, _directives(name, shown)) for name in MODULES[page].split())
    return "\n".join(f"## {name}\n\n```{{eval-rst}}\n{lines}```\n" for name, lines in parts)


def _directives(name: str, shown: set[int]) -> str:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [n for n, value in vars(module).items() if _is_own(n, value, name)]
    lines = [f".. automodule:: {name}", ""]
    for each in public:
        value = getattr(module, each)
        if id(value) in shown:
            continue
        shown.add(id(value))
        if inspect.isclass(value):
            lines += [f".. autoclass:: {name}.{each}", *_MEMBERS, ""]
        elif callable(value):
            lines += [f".. autofunction:: {name}.{each}", ""]
    return "\n".join(lines) + "\n"


def _is_own(name: str, value: Any, module: str) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module and bool(value.__doc__)
