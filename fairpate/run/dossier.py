"""Forms that others ask for about a published run, filled in from its public files.

- ``registry``: an entry of the registry of differential-privacy deployments, as YAML that its authors complete
  (github.com/opendp/deployments-registry-data, schema of July 2026);
- ``nist``: what can undo a guarantee, layer by layer, with the sections of "Guidelines for Evaluating Differential
  Privacy Guarantees" (NIST SP 800-226): 2 the guarantee, 3 the algorithms, 4 the deployment. Hazards and sections are
  those of its public draft (December 2023); the final text (March 2025) was not compared line by line;
- ``egress``: what a trusted research environment asks before a model leaves it: what the file holds, the bounds on
  every attack, and what attacks were measured to reach.

Each line of a form is *filled* with a value from named fields of public files, or *the operator's*, who alone knows its
answer, or *open* until a file shows it. The lines of each kind are counted; the counts are not a score. Nothing private
is read. The JSON of a dossier names the files with their SHA-256, and may be signed with the operator's Ed25519
key.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fairpate.data.dataset import sha256_of
from fairpate.pages import decimal, epsilon_text, percent
from fairpate.report.records import described_events
from fairpate.run.bundle import published_statement, require_card
from fairpate.run.context import RunDirectoryError, read_json, run_at, write_json, write_text
from fairpate.types import Relation, UserError
from fairpate.words import delta_text, least_wrong, most_detected

FORMAT = "fairpate.dossier/1"
Form = Literal["registry", "nist", "egress"]
FORMS: tuple[Form, ...] = ("registry", "nist", "egress")
Kind = Literal["filled", "operator", "open"]
_FALSE_ALARMS = (0.001, 0.01, 0.1)


class DossierError(UserError):
    """A dossier that is damaged, or whose signature does not hold."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a form: its ``place`` in the form, and its ``value``, computed from the fields ``read_from`` alone.

    A field is ``FILE:NAME.NAME``. The value is None unless the line is filled; the ``note`` of an open line says what
    would fill it.
    """

    place: str
    kind: Kind
    value: Any = None
    read_from: tuple[str, ...] = ()
    note: str = ""


class _Facts:
    """The public files of a run."""

    def __init__(self, root: Path) -> None:
        run = run_at(root)
        require_card(run, published_statement(run))
        names = ("card.json", "metrics.json", "record.json", "statement.json", "audit.json")
        paths = {name: run.public / name for name in names} | {"environment.json": run.environment}
        self.files = {name: path for name, path in paths.items() if path.is_file()}
        self._values = {name: read_json(path) for name, path in self.files.items()}
        self.files["student.safetensors"] = run.student

    def get(self, field: str) -> Any:
        """The value of ``FILE:NAME.NAME``; None where it is missing."""
        name, _, path = field.partition(":")
        value: Any = self._values.get(name)
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def line(
        self,
        place: str,
        *fields: str,
        words: Callable[..., Any] = lambda value: value,
        otherwise: Kind = "operator",
        note: str = "",
    ) -> Line:
        """The line whose value is ``words`` of these fields; if that is None, a line of the kind ``otherwise``."""
        value = words(*map(self.get, fields)) if fields else None
        if value is None:
            return Line(place=place, kind=otherwise, note=note)
        return Line(place=place, kind="filled", value=value, read_from=fields)


def make_dossier(
    root: Path, form: Form, *, sign: Callable[[bytes], Mapping[str, str]] | None = None, out: Path | None = None
) -> tuple[dict[str, Path], dict[Kind, int]]:
    """Write the dossier of the published run in ``root`` as JSON and as a text; return both paths, and the number of
    lines of each kind.

    ``out``: the JSON file; None: ``dossier-FORM.json`` in ``root``, with the text next to it. ``sign`` returns the
    operator's public ``key`` and its ``ed25519`` signature of the content. Errors as
    :func:`fairpate.run.bundle.write_bundle`.
    """
    facts = _Facts(root)
    lines = list({"registry": _registry, "nist": _nist, "egress": _egress}[form](facts))
    counts: dict[Kind, int] = {kind: sum(line.kind == kind for line in lines) for kind in get_args(Kind)}
    plain: dict[str, Any] = {
        "format": FORMAT,
        "for": form,
        "files": {name: sha256_of(path) for name, path in sorted(facts.files.items())},
        "counts": counts,
        "lines": [asdict(line) | {"read_from": list(line.read_from)} for line in lines],
    }
    if sign is not None:
        plain = plain | {"signature": sign(_bytes(plain))}
    path = out or root / f"dossier-{form}.json"
    text = path.with_suffix(".yaml" if form == "registry" else ".md")
    write_json(path, plain)
    write_text(text, _entry(lines) if form == "registry" else _page(form, lines))
    return {"dossier": path, "text": text}, counts


def verify_dossier(path: Path, *, signed: Callable[[bytes, bytes], bool]) -> dict[str, Any]:
    """Return the dossier in ``path`` if ``signed`` holds of its signature and content.

    DossierError for a damaged file, for one without a signature and for one of another key or content.
    """
    try:
        plain = read_json(path)
    except RunDirectoryError as error:
        raise DossierError(str(error)) from error
    if plain.get("format") != FORMAT:
        raise DossierError(f"{path}: not a dossier ({FORMAT}); give the JSON file of `fairpate dossier`.")
    signature = plain.pop("signature", None)
    if not isinstance(signature, Mapping):
        raise DossierError(f"{path}: not signed; ask the operator for a signed one (`fairpate dossier --key`).")
    try:
        is_signed = signed(bytes.fromhex(str(signature.get("ed25519"))), _bytes(plain))
    except ValueError:  # no hexadecimal digits, or a number that JSON does not have
        is_signed = False
    if not is_signed:
        raise DossierError(f"{path}: not signed by this key, or changed since; ask the operator for their file.")
    return plain


def _bytes(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


_S, _C, _R = "statement.json", "card.json", "record.json"
_ADDED: Relation = "add or remove one"


def _guarantee(epsilon: float, delta: float, unit: str, relation: str) -> str:
    return f"ε = {epsilon_text(epsilon)} at δ = {delta_text(delta)} for one {unit}, {relation}"


def _events(events: Sequence[Mapping[str, Any]], parts: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> str:
    return "; ".join(described_events(events, parts or {}))


def _tuned(is_accounted: bool) -> str:
    if is_accounted:
        return "The choice of settings is part of ε."
    return "The choice of settings is not part of ε: if private or test records guided it, ε is too low."


def _covered(metrics: str | None) -> str:
    words = {"private": "covered by ε, from a noisy table", "public": "of records that the operator calls public"}
    return f"Metrics of test records are {words.get(metrics or 'outside', 'exact, and outside of the guarantee')}."


def _noise(noise: str) -> str:
    drawn = "from the operating system's entropy" if noise == "os_entropy" else noise
    return f"Noise is drawn {drawn}."


def _unprotected(words: str | None, metrics: str | None) -> str:
    return f"{f'{words}. ' if words else ''}{_covered(metrics)}"


def _model(architecture: str, classes: Sequence[str], task: str | None) -> str:
    return f"Classifier ({architecture}) of {', '.join(classes)}{f': {task}' if task else ''}"


def _registry(facts: _Facts) -> Iterator[Line]:
    """Yield the fields of the registry's schema, in its order."""
    line = facts.line
    yield line("url_slug")
    yield line("deployment.basic.name")
    yield line("deployment.basic.data_curators")
    yield line("deployment.basic.intended_use", f"{_C}:use.intended")
    yield line("deployment.basic.data_product_type", f"{_C}:model.sha256", words=lambda _: "Machine learning model")
    yield line("deployment.basic.data_product_region")
    yield line(
        "deployment.basic.description",
        f"{_C}:model.architecture",
        f"{_C}:model.classes",
        f"{_C}:data.task",
        words=_model,
    )
    yield line("deployment.basic.publication_date")
    yield line("deployment.basic.data_product_sector")
    variant = lambda delta: "Approximate DP" if delta else "Pure DP"  # noqa: E731
    yield line("deployment.dp_variant.variant_name", f"{_S}:delta", words=variant)
    yield line("deployment.dp_variant.data_domain")
    yield line(
        "deployment.dp_variant.unprotected_quantities", f"{_S}:not_protected", f"{_R}:metrics", words=_unprotected
    )
    yield line("deployment.privacy_loss.privacy_unit", f"{_S}:unit")
    adjacent = "Adjacent data sets differ in one {}: {}.".format
    yield line("deployment.privacy_loss.privacy_unit_details", f"{_S}:unit", f"{_S}:relation", words=adjacent)
    yield line("deployment.privacy_loss.privacy_parameters.epsilon", f"{_S}:epsilon")
    yield line("deployment.privacy_loss.privacy_parameters.delta", f"{_S}:delta")
    yield line("deployment.privacy_loss.privacy_parameters_details", f"{_S}:accounting", words=_accounted)
    yield line("deployment.deployment_model.model_name")
    yield line("deployment.deployment_model.actors")
    yield line("deployment.deployment_model.release_type")
    yield line("deployment.deployment_model.release_type_details", f"{_S}:epsilon_with_earlier", words=_earlier)
    yield line("deployment.deployment_model.data_source_type")
    yield line("deployment.deployment_model.access_type")
    yield line("deployment.accounting.post_processing", *_AFTERWARDS, words=_post_processed)
    yield line("deployment.accounting.composition", f"{_S}:events", f"{_S}:part_events", words=_events)
    yield line(
        "deployment.implementation.preprocessing_and_hyperparameter_tuning", f"{_S}:tuning_accounted", words=_tuned
    )
    made = lambda noise, version: f"{_noise(noise)} FairPATE {version}."  # noqa: E731
    yield line("deployment.implementation.mechanisms", f"{_S}:noise", "environment.json:fairpate", words=made)
    yield line("deployment.implementation.justification")
    yield line("deployment.administrative.sources")
    yield line("deployment.administrative.notes", f"{_S}:remarks", words=lambda remarks: " ".join(remarks) or None)
    yield line("deployment.administrative.registry_authors")


_AFTERWARDS = (
    f"{_R}:config.student.idp3",
    f"{_R}:config.public_data.calibration",
    f"{_R}:config.public_data.self_label",
)


def _post_processed(idp3: Any, calibration: Any, self_label: Any) -> str:
    steps = {"a reject option": idp3, "calibration on public records": calibration, "self-labelling": self_label}
    said = ", ".join(name for name, value in steps.items() if value) or "nothing more"
    return f"The model is learned from what was released and from public records; then {said}."


def _accounted(accounting: str) -> str:
    ways = {"pld": "privacy loss distributions", "rdp": "Renyi divergences"}
    return f"Composed by {ways.get(accounting, accounting)}."


def _earlier(epsilon: float | None) -> str | None:
    return None if epsilon is None else f"Together with earlier releases of the same data: ε = {epsilon_text(epsilon)}."


def _nist(facts: _Facts) -> Iterator[Line]:
    """Yield the hazards of a guarantee, from the top of the pyramid to its base; the number is the section."""
    line = facts.line
    terms = [f"{_S}:{name}" for name in ("epsilon", "delta", "unit", "relation")]
    events = (f"{_S}:events", f"{_S}:part_events")
    yield line("2.2 an epsilon that says nothing", *terms[:2], words=_right)
    yield line("2.3 a delta that allows one unit to be published", terms[1], words=_delta_words)
    yield line("2.4 a unit smaller than a person", terms[2], words=_whole_person)
    yield line("2.4 a difference that the unit and the relation leave out", *terms, words=_guarantee)
    yield line("2.5 comparison at another delta: what epsilon follows from", *events, words=_events)
    yield line("2.6 outputs that it does not cover", f"{_S}:not_protected", f"{_R}:metrics", words=_unprotected)
    yield line(
        "2.6 releases that add up",
        f"{_S}:epsilon_with_earlier",
        words=_earlier,
        note="the odometer lists earlier releases; names_earlier=true states them",
    )
    yield line("3 errors of the accountant", otherwise="open", note="`fairpate verify` recomputes ε of a bundle")
    yield line("3.1 mechanisms and what one unit may change", *events, words=_events)
    yield line("3.2 results too noisy to be useful", "metrics.json:accuracy", words=_accuracy)
    yield line("3.3 groups that are treated worse", "metrics.json:gaps.dp_one_vs_rest", words=_gap)
    yield line("3.3 bias of published numbers", f"{_R}:metrics", words=_biased)
    yield line("3.4 cells that appear only if a record is in them", f"{_C}:model.classes", words=_every_cell)
    yield line("3.4 bounds taken from the records", note="bounds and categories of a declaration are public knowledge")
    yield line("3.5 settings chosen on private records", f"{_S}:tuning_accounted", words=_tuned)
    yield line("3.6 synthetic records without a guarantee", f"{_C}:model.architecture", words=_no_record)
    yield line("3.7 pictures or texts that show more than one unit", note="whom a record is about")
    yield line("4.1 queries that are answered later", note="whether `fairpate serve` goes on answering, and its budget")
    yield line("4.2 who is trusted with the records", note="the operator, or the sites of a plan (docs/sites.md)")
    yield line("4.3 errors of the implementation", *_AUDIT, words=_audited, otherwise="open", note=_AUDIT_NOTE)
    yield line("4.3 noise that can be predicted", f"{_S}:noise", words=_noise)
    yield line("4.3 rounding of floating-point noise", *_DISCRETE, words=_discrete)
    yield line("4.3 time and other side channels", otherwise="open", note="how long a run takes is not hidden")
    yield line("4.3 errors that a record causes", otherwise="open", note="an error of reading depends on records")
    yield line("4.4 theft of records and of private/", note="private/ is for the operator's user alone")
    yield line("4.4 who may read them")
    yield line("4.5 records that need not be collected")


_AUDIT = ("audit.json:headline", "audit.json:has_power")
_AUDIT_NOTE = "`fairpate audit` measures what attacks prove of the claim"
_MEMBERSHIP_NOTE = "the guarantee is for a replaced unit, and does not bound who is among the records"
_DISCRETE = (f"{_S}:events",)


def _biased(metrics: str | None) -> str:
    if metrics == "private":
        return "Noisy sizes below 0 and shares outside 0 to 1 are cut, which moves estimates of small groups inwards."
    return "Metrics have no noise."


def _every_cell(classes: Sequence[str]) -> str:
    return f"Classes are declared ({', '.join(classes)}), and a cell without a record gets noise too."


def _no_record(architecture: str) -> str:
    return f"No record is released: the product is a model ({architecture})."


def _audited(headline: str | None, has_power: bool | None) -> str | None:
    if headline is None:
        return None
    return f"{headline} The control with half the noise was {'found' if has_power else 'not found'}."


def _discrete(events: Sequence[Mapping[str, Any]]) -> str | None:
    continuous = {"PoissonGaussians", "PoissonGaussianLaplaces", "AttributeGaussians", "SecretBatchAttributeGaussians"}
    flat = [each for event in events for of in event.get("trials", [[event]]) for each in of]
    found = sorted({event["kind"] for event in flat} & continuous)
    if found:
        return f"The noise of training steps is floating-point ({', '.join(found)})."
    return "All noise is on whole numbers, drawn exactly."


def _right(epsilon: float, delta: float) -> str:
    right = 1 - least_wrong(epsilon, delta)
    return f"At even odds, a guess about one unit is right at most {percent(right)} of the time."


def _whole_person(unit: str) -> str:
    if unit == "record":
        return "One record is protected: a person with several records is protected less."
    return f"One {unit} is protected as a whole."


def _delta_words(delta: float) -> str:
    return f"δ = {delta_text(delta)}: below 1 / n for n up to {1 / delta:,.0f} units." if delta else "δ = 0."


def _accuracy(accuracy: float | None) -> str | None:
    return None if accuracy is None else f"Accuracy {percent(accuracy)}."


def _gap(gap: Mapping[str, Any] | None) -> str | None:
    if gap is None or gap["value"] is None:
        return None
    return f"Demographic-parity gap {decimal(gap['value'])} ({gap['where']})."


def _egress(facts: _Facts) -> Iterator[Line]:
    """Yield the questions of a trusted research environment about a model, attack by attack."""
    line, bound = facts.line, (f"{_S}:epsilon", f"{_S}:delta", f"{_S}:relation")
    yield line("output: what leaves", f"{_C}:model.sha256", words="student.safetensors, SHA-256 {}".format)
    yield line("output: kind of model", *(f"{_C}:model.{name}" for name in ("architecture", "method")), words=_kind)
    yield line("output: what it is for", f"{_C}:use.intended")
    yield line("output: tables with small cells", f"{_R}:metrics", f"{_C}:evaluation.least_cell", words=_cells)
    yield line("output: guarantee", *(f"{_S}:{n}" for n in ("epsilon", "delta", "unit", "relation")), words=_guarantee)
    present = partial(line, otherwise="open", note=_MEMBERSHIP_NOTE)
    yield present("membership inference: largest advantage", *bound, words=_advantage)
    for alarms in _FALSE_ALARMS:
        place = f"membership inference: most units found at {percent(alarms)} false alarms"
        yield present(place, *bound, words=partial(_detected, alarms))
    yield line("attribute inference: most often right between two contents of a unit", *bound, words=_content)
    yield line("measured attack on the release", *_AUDIT, words=_audited, otherwise="open", note=_AUDIT_NOTE)
    yield line(
        "measured attack: what it read", "audit.json:records", otherwise="open", words=_attacked, note=_AUDIT_NOTE
    )
    yield line(
        "model inversion and reconstruction", otherwise="open", note="bounded by ε like every attack; none was measured"
    )
    yield line("choice of settings", f"{_S}:tuning_accounted", words=_tuned)
    yield line("earlier outputs on the same records", f"{_S}:epsilon_with_earlier", words=_earlier)
    yield line("project, researcher and approval")
    yield line("who receives the output")


def _kind(architecture: str, method: str) -> str:
    return f"{architecture}, learned by {method}; it holds weights, and no record."


def _cells(metrics: str | None, least: int | None) -> str | None:
    if metrics == "private":
        return "Every published count has noise."
    return None if least is None else f"Cells of fewer than {least} test records are not shown."


def _advantage(epsilon: float, delta: float, relation: str) -> str | None:
    if relation != _ADDED:
        return None
    return f"{1 - 2 * least_wrong(epsilon, delta):.3f} (detections less false alarms)"


def _detected(false_alarms: float, epsilon: float, delta: float, relation: str) -> str | None:
    return percent(most_detected(false_alarms, epsilon, delta)) if relation == _ADDED else None


def _content(epsilon: float, delta: float, relation: str) -> str:
    if relation == _ADDED:  # another content: one unit is taken out, and another one put in
        epsilon, delta = 2 * epsilon, min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta)
    return percent(1 - least_wrong(epsilon, delta))


def _attacked(records: str | None) -> str | None:
    return "Shadow releases of made-up records; no private record was read." if records == "made" else None


def _entry(lines: Sequence[Line]) -> str:
    """The registry's YAML, followed by comments that list what its authors have to add."""
    nested: dict[str, Any] = {"status": "Draft", "tier": 2}
    for line in lines:
        if line.kind != "filled":
            continue
        *sections, name = line.place.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = line.value
    missing = "".join(f"# {line.place}:\n" for line in lines if line.kind != "filled")
    text = yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, width=10**6)
    return f"{text}\n# For the operator to fill in:\n{missing}"


def _page(form: Form, lines: Sequence[Line]) -> str:
    titles = {"nist": "Hazards of a differential-privacy guarantee", "egress": "Egress report of a model"}
    rows = [f"# {titles[form]}", "", "| | answer | read from |", "|-|-|-|"]
    for line in lines:
        words = {"filled": str(line.value), "operator": "for the operator", "open": "open"}[line.kind]
        words += f" ({line.note})" if line.note else ""
        # Names of classes and groups may hold anything.
        cells = (line.place, words, ", ".join(line.read_from))
        rows.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    counts = Counter(line.kind for line in lines)
    said = f"{counts['filled']} lines are filled in, {counts['operator']} are for the operator, {counts['open']} open."
    return "\n".join([*rows, "", said, ""])
