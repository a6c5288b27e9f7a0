"""A dossier: a form about a published run, filled in from its public files.

- ``registry``: an entry of the registry of differential-privacy deployments
  (github.com/opendp/deployments-registry-data, schema of July 2026);
- ``nist``: what can undo a guarantee, with the sections of "Guidelines for Evaluating Differential Privacy Guarantees"
  (NIST SP 800-226): 2 the guarantee, 3 the algorithms, 4 the deployment. Hazards and sections are those of its public
  draft (December 2023); the final text (March 2025) was not compared line by line;
- ``egress``: what a trusted research environment asks before a model leaves it.

Each line of a form is *filled* with a value from named fields of public files, or left to the *operator*, who alone
knows its answer, or *open* until a file provides it. A dossier may be signed with the operator's Ed25519 key.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2
import yaml

from fairpate import pages
from fairpate.config import read_yaml
from fairpate.data.dataset import sha256_of
from fairpate.releases.directory import read_json, run_at, write_json, write_text
from fairpate.report.records import described_events
from fairpate.run.bundle import published_statement
from fairpate.run.publication import require_card
from fairpate.types import Relation, UserError

DOSSIER_FORMAT = "fairpate.dossier/1"
Form = Literal["registry", "nist", "egress"]
FORMS: tuple[Form, ...] = get_args(Form)
Kind = Literal["filled", "operator", "open"]


class DossierError(UserError):
    """Raised if a dossier (a form about a published run) is damaged, or if its signature is not valid."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a dossier, a form about a published run: ``place`` is its name or section in the form.

    ``kind`` says who answers the line: ``filled``, its ``value`` was computed from public files; ``operator``, only the
    operator knows the answer; ``open``, the file that would fill it is missing, or nothing published answers it. The
    value is computed only from the fields that ``read_from`` lists, each written ``FILE:NAME.NAME``; it is None for the
    other two kinds. The ``note`` may say where an answer comes from.
    """

    place: str
    kind: Kind
    value: Any = None
    read_from: tuple[str, ...] = ()
    note: str = ""


def dossier_values(root: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """Return the public files of the run in ``root`` from which a dossier, a form about the run, is filled in: their
    paths by file name, and the contents of the JSON files among them by file name."""
    run = run_at(root)
    require_card(run, published_statement(run))
    names = ("card.json", "metrics.json", "record.json", "statement.json", "audit.json")
    paths = {name: run.public / name for name in names} | {"environment.json": run.environment}
    files = {name: path for name, path in paths.items() if path.is_file()}
    values = {name: read_json(path) for name, path in files.items()}
    return files | {"student.safetensors": run.student}, values


def dossier_lines(form: Form, values: Mapping[str, Any]) -> list[Line]:
    """Return the lines of a dossier, a form about a published run. ``form`` is its name, such as ``nist``; ``values``
    are the contents of the run's public JSON files by file name, from which the lines are filled in."""
    forms = read_yaml(Path(__file__).with_name("dossier.yaml"))
    lines = []
    for each in forms[form]:
        fields = tuple(each.get("from", ()))
        found: dict[str, Any] = {}
        value: Any = None
        for name in fields:
            file, _, path = name.partition(":")
            value = values.get(file)
            for part in path.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
                found[part] = value
        if "words" in each:
            # Words that come out empty leave the line open, or to the operator.
            words = forms["words"].get(each["words"], each["words"])
            value = _template(words).render(found) or None
        if value is None:
            kind: Kind = "open" if each.get("open") else "operator"
            lines.append(Line(place=each["place"], kind=kind, note=each.get("note", "")))
        else:
            lines.append(Line(place=each["place"], kind="filled", value=value, read_from=fields))
    return lines


def _continuous(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds of those privacy events in ``events`` whose noise is floating-point numbers instead of integers;
    a dossier names such noise as a hazard."""
    kinds = {"PoissonGaussians", "PoissonGaussianLaplaces", "AttributeGaussians", "SecretBatchAttributeGaussians"}
    flat = [each for event in events for of in event.get("trials", [[event]]) for each in of]
    return sorted({event["kind"] for event in flat} & kinds)


def _other_content(epsilon: float, delta: float, relation: str) -> float:
    """Return the least error rate of an attacker who guesses which of two contents one privacy unit has. Both contents
    are equally likely. The guarantee is ``epsilon`` and ``delta`` for ``relation``."""
    if relation == _ADDED:  # another content: one unit is taken out, and another one put in
        epsilon, delta = 2 * epsilon, min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta)
    return pages.least_wrong(epsilon, delta)


_ADDED: Relation = "add or remove one"
_WORDS = jinja2.Environment(undefined=jinja2.StrictUndefined)  # noqa: S701 - the words of YAML and Markdown, not HTML
_NAMED = {"percent": pages.percent, "decimal": pages.decimal, "epsilon": pages.epsilon_text, "delta": pages.delta_text}
_BOUNDS = (pages.at_most, pages.percent_at_most, pages.right_at_most)  # which are rounded up
_WORDS.filters |= _NAMED | {each.__name__: each for each in _BOUNDS}
_MEANINGS = (pages.delta_caution, pages.least_wrong, pages.most_detected, pages.most_often_right)
_WORDS.globals |= {each.__name__: each for each in _MEANINGS}
_WORDS.globals.update(
    added=_ADDED,
    continuous=_continuous,
    described=lambda events, parts: "; ".join(described_events(events, parts or {})),
    other_content=_other_content,
)
_template = cache(_WORDS.from_string)


def make_dossier(
    root: Path, form: Form, *, signer: tuple[str, Callable[[bytes], bytes]] | None = None, out: Path | None = None
) -> tuple[dict[str, Path], dict[Kind, int]]:
    """Write the dossier, a form about the published run in ``root``, as JSON and as text. Return the paths of both
    files, and the number of lines by kind (``filled``; left to the ``operator``; ``open``, as no file has the answer).

    ``out``: the JSON file; None: ``dossier-FORM.json`` in ``root``. The text is written next to it. ``signer``: the
    operator's public key as text, and a function that maps the content of the dossier to its Ed25519 signature. Errors
    as in :func:`write_bundle`.
    """
    files, values = dossier_values(root)
    lines = dossier_lines(form, values)
    counts: dict[Kind, int] = {kind: sum(line.kind == kind for line in lines) for kind in get_args(Kind)}
    plain: dict[str, Any] = {
        "format": DOSSIER_FORMAT,
        "for": form,
        "files": {name: sha256_of(path) for name, path in sorted(files.items())},
        "counts": counts,
        "lines": [asdict(line) | {"read_from": list(line.read_from)} for line in lines],
    }
    if signer is not None:
        key, sign = signer
        plain = plain | {"signature": {"key": key, "ed25519": sign(_bytes(plain)).hex()}}
    if form == "registry":
        # The registry's YAML, followed by comments that list what its authors have to add.
        nested: dict[str, Any] = {"status": "Draft", "tier": 2}
        for line in lines:
            if line.kind == "filled":
                *sections, name = line.place.split(".")
                at = nested
                for section in sections:
                    at = at.setdefault(section, {})
                at[name] = line.value
        missing = "".join(f"# {line.place}:\n" for line in lines if line.kind != "filled")
        entry = yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, width=10**6)
        words = f"{entry}\n# For the operator to fill in:\n{missing}"
    else:
        titles = {"nist": "Hazards of a differential-privacy guarantee", "egress": "Egress report of a model"}
        rows = [f"# {titles[form]}", "", "| | answer | read from |", "|-|-|-|"]
        for line in lines:
            answer = {"filled": str(line.value), "operator": "for the operator", "open": "open"}[line.kind]
            answer += f" ({line.note})" if line.note else ""
            # Names of classes and groups may hold anything.
            cells = (line.place, answer, ", ".join(line.read_from))
            rows.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
        filled, of_operator, still_open = (counts[kind] for kind in get_args(Kind))
        said = f"{filled} lines are filled in, {of_operator} are for the operator, {still_open} open."
        words = "\n".join([*rows, "", said, ""])
    path = out or root / f"dossier-{form}.json"
    text = path.with_suffix(".yaml" if form == "registry" else ".md")
    write_json(path, plain)
    write_text(text, words)
    return {"dossier": path, "text": text}, counts


def verify_dossier(path: Path, *, signed: Callable[[bytes, bytes], bool]) -> dict[str, Any]:
    """Return the dossier in ``path`` if its signature is valid, that is, if ``signed(signature, content)`` is true.

    RunDirectoryError for a damaged file, DossierError for another file, for a dossier without a signature, and for a
    signature by another key or of another content.
    """
    plain = read_json(path)
    if plain.get("format") != DOSSIER_FORMAT:
        raise DossierError(
            f"{path}: not a dossier (expected format {DOSSIER_FORMAT}); give the JSON file that `fairpate dossier` "
            "wrote."
        )
    signature = plain.pop("signature", None)
    if not isinstance(signature, Mapping):
        raise DossierError(
            f"{path}: not signed; ask the operator for a dossier with a signature (`fairpate dossier --key`)."
        )
    try:
        is_signed = signed(bytes.fromhex(str(signature.get("ed25519"))), _bytes(plain))
    except ValueError:  # no hexadecimal digits, or a number that JSON does not have
        is_signed = False
    if not is_signed:
        raise DossierError(
            f"{path}: not signed by this key, or changed after signing; give the operator's key, or ask the operator "
            "for the original dossier."
        )
    return plain


def _bytes(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
