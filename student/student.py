"""Train, store and use the published student: a model of public records and released labels.

Training and prediction are post-processing of what the mechanism released, so they cost no privacy. ``supervised``
trains on the answered records only. ``pseudo_label`` adds in a second round the records of which the first round's
student is confident (Lee 2013). ``fixmatch`` requires that a strongly augmented image gets the label that the model
gives to a weakly augmented version (Sohn et al. 2020, arXiv 2001.07685), and returns a moving average of the weights.
Refused records are used without labels: their features are public.

A student is one safetensors file with weights and card. A prediction may be refused: with IDP3 (FairPATE, Algorithm 2)
the gate answers only while the demographic disparity of the answers stays within its margin; its counts start at zero
in every call and depend on the order of records. A student may be randomised, in one of two ways: a uniform mixture of
networks, one of which is drawn for each prediction, or a table of probabilities with which a label that the network
predicts is replaced, by group. A student of embedded records has the public embedding in a file next to it, which its
card names by checksum.

A student may be exported as an ONNX graph from a record to the probabilities of its labels, which is compared in
onnxruntime with the student on public records. A JSON file describes how a raw row becomes features, how a label is
obtained from probabilities, and the reject option with its state.

Shapes: N answered records, M unlabelled ones, C classes, G groups.
"""

import copy
import hashlib
import importlib.util
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fairpate.config import AugmentConfig, StudentTraining
from fairpate.data.dataset import sha256_of
from fairpate.data.embedding import Embedding, read_embedding
from fairpate.encoders import Encoder, installed_encoders
from fairpate.fairness.bounded_errors import is_confident
from fairpate.fairness.gate import filter_stream
from fairpate.nn import fit
from fairpate.nn.models import build_model, scale_bytes
from fairpate.types import Advance, IntArray, UserError
from student.card import EMBEDDING_FILE, FORMAT, StudentCard, content_digest, read_student_file, readable

_NEEDS_GROUPS = "This student predicts by group and needs sensitive_features, a group per record."


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """N predictions: ``probabilities_NC``, the most likely ``labels``, and a mask ``answered``, False for a refusal.

    For a randomised student ``probabilities_NC`` are the probabilities of predicting each label, and ``labels`` are
    drawn from them.
    """

    labels: IntArray
    probabilities_NC: npt.NDArray[np.float32]
    answered: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Student:
    """A published model: a network with its card (its description), the ``embedding`` that is applied to records before
    the network, or None, and the ``encoder`` that is applied to pictures before both, or None if records are given as
    its vectors."""

    card: StudentCard
    network: nn.Module
    embedding: Embedding | None = None
    encoder: Encoder | None = None

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one input record."""
        if self.encoder is not None:
            return self.encoder.public.picture_shape
        return self.card.input_shape if self.embedding is None else self.embedding.record_shape

    def predict(
        self,
        x: Tensor,
        sensitive_features: IntArray | None = None,
        *,
        generator: np.random.Generator | None = None,
        one_by_one: bool = False,
    ) -> Prediction:
        """Predict labels for N records with the features ``x`` (N, ...).

        Predictions may be refused: those of too little confidence, each by itself (``answers`` in the card), then by
        IDP3 in the order of records. ``sensitive_features`` (N,) are the records' groups; they are needed by a student
        that reads them (``needs_group`` in its card), else ValueError. ``generator`` draws the labels of a randomised
        student; None: a new generator. ``one_by_one``: compute the probabilities of each record separately, so that
        their last digits depend on no other record.
        """
        # Checked here too: `probabilities` needs groups only if predictions are mixed by group.
        if self.card.needs_group and sensitive_features is None:
            raise ValueError(_NEEDS_GROUPS)
        probabilities = self.probabilities(x, sensitive_features, one_by_one=one_by_one)
        labels = probabilities.argmax(axis=1)
        if self.card.is_randomised:
            draws = generator or np.random.default_rng()
            # One number per record; the last class takes what rounding leaves of the mass.
            passed_NC = draws.random(len(probabilities))[:, None] >= probabilities.cumsum(axis=1)[:, :-1]
            labels = passed_NC.sum(axis=1)
        answered = np.ones(len(labels), dtype=np.bool_)
        if self.card.answers is not None:
            answered = is_confident(self.card.answers, probabilities, labels, sensitive_features)
        if self.card.idp3 is not None:
            assert sensitive_features is not None
            numbers = {"num_groups": len(self.card.group_names), "num_classes": len(self.card.label_names)}
            offered = np.flatnonzero(answered)
            kept = filter_stream(labels[offered], sensitive_features[offered], rule=self.card.idp3, **numbers)
            answered[offered] = kept
        return Prediction(labels=labels, probabilities_NC=probabilities, answered=answered)

    def probabilities(
        self, x: Tensor, sensitive_features: IntArray | None = None, *, one_by_one: bool = False
    ) -> npt.NDArray[np.float32]:
        """Return the probability of predicting each label for each record, shape (N, C). ``one_by_one`` as in
        :meth:`predict`. ValueError if the student needs the records' groups and they are not given."""
        if tuple(x.shape[1:]) != self.record_shape:
            raise ValueError(f"Expected features of shape (N, *{self.record_shape}), got {tuple(x.shape)}.")
        for change in (self.encoder, self.embedding):
            if change is not None:
                x = torch.cat([change(row) for row in x.split(1)]) if one_by_one else change(x)
        if self.card.mixing is None:
            return fit.predict_probabilities(self.network, x, one_by_one=one_by_one).numpy()
        if sensitive_features is None:
            raise ValueError(_NEEDS_GROUPS)
        # The table mixes labels that the network predicts, not its probabilities.
        mixing_NCC = np.array(self.card.mixing, dtype=np.float32)[sensitive_features]
        said_NC = fit.said_labels(self.network, x, one_by_one=one_by_one)
        rows = [slice(row, row + 1) for row in range(len(x))] if one_by_one else [slice(None)]
        return np.concatenate([np.einsum("nj,njk->nk", said_NC[part], mixing_NCC[part]) for part in rows])


def student_bytes(student: Student) -> bytes:
    """Return the bytes of a student's file, with weights and card. The card identifies a file of pretrained initial
    weights by its checksum, without its path."""
    architecture = student.card.model.model_dump(mode="json", exclude={"weights": {"path"}})
    card = {"format": FORMAT} | asdict(student.card) | {"model": architecture}
    # Settings that most students lack are left out, so that their files stay as they were.
    for field in ("answers", "encoder"):
        if getattr(student.card, field) is None:
            del card[field]
    # safetensors stores contiguous tensors only.
    tensors = {name: tensor.cpu().contiguous() for name, tensor in student.network.state_dict().items()}
    # Of the card before the checksum is added to it.
    card["sha256"] = content_digest(card, {name: tensor.numpy() for name, tensor in tensors.items()})
    # Several keys would be written in random order.
    return save(tensors, metadata={"card": json.dumps(card)})


def save_student(student: Student, path: Path) -> None:
    """Write a student's file (:func:`student_bytes`) to ``path``."""
    path.write_bytes(student_bytes(student))
    # The model is public; a strict umask would hide it from the processes that serve it.
    path.chmod(0o644)


def load_student(path: Path) -> Student:
    """Read a student from a file that :func:`save_student` wrote, with the embedding that its card names.

    StudentFileError if a file is missing or damaged, or if its weights do not fit the network.
    """
    with readable(path):
        card, weights = read_student_file(path)
        network = build_network(card)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        embedding = None if card.embedding is None else read_embedding(path.with_name(EMBEDDING_FILE))
        return Student(card=card, network=network.eval(), embedding=embedding)


def with_encoder(student: Student, path: Path) -> Student:
    """Return a student that reads pictures, with the encoder that its card names; a student without one is unchanged.
    The weights of the encoder are in an installed package, or in a file next to the student's file ``path``.

    EncoderError or WeightsError if they are missing or other ones.
    """
    public = student.card.encoder
    if public is None:
        return student
    beside = (each for suffix in (".pth", ".safetensors") for each in sorted(path.parent.glob(f"*{suffix}")))
    found = None
    if public.name not in installed_encoders():
        found = next((each for each in beside if sha256_of(each) == public.sha256), None)
    return replace(student, encoder=Encoder.of(public, found))


def build_network(card: StudentCard) -> nn.Module:
    """Build the network that ``card``, a student's description, specifies; without its trained weights."""
    members = [
        build_model(card.model, input_shape=card.input_shape, num_classes=len(card.label_names))
        for _ in range(card.num_members or 1)
    ]
    return members[0] if card.num_members is None else fit.Mixture(members)


_AVERAGE_HORIZON_STEPS = 100
_UNLABELLED_PER_LABELLED = 4


@dataclass(frozen=True, kw_only=True)
class PublicRecords:
    """The training records of a student: features (N, ...) of answered records, at least one, their labels, and
    features (M, ...) of unlabelled ones.

    ``labels`` are classes (N,) ``int64``, or probabilities of every class (N, C) ``float32``. The loss is the cross
    entropy in both cases; label smoothing s moves both towards the uniform distribution: (1 - s) p + s / C.
    """

    answered_x: Tensor
    labels: Tensor
    unlabelled_x: Tensor


def train_student(
    records: PublicRecords,
    config: StudentTraining,
    *,
    num_classes: int,
    generator: torch.Generator,
    augmentation: AugmentConfig = fit.UNCHANGED,
    on_progress: Advance = lambda *_: None,
    initial_model: nn.Module | None = None,
    penalty: fit.Penalty | None = None,
) -> nn.Module:
    """Train a student on answered and unlabelled records, and return it.

    With the method ``pseudo_label`` and unlabelled records, training has two rounds: the second learns also from the
    first student's confident predictions. ``on_progress(done, total)`` counts epochs over all rounds. Every round
    starts from a copy of ``initial_model`` or, without one, from new random weights. ``penalty(model)`` is added to the
    loss of every step.

    ValueError for ``fixmatch`` on records that are not images.
    """
    if config.method == "fixmatch" and records.answered_x.ndim != 4:
        raise ValueError("student.method: fixmatch changes images; use pseudo_label for a table.")
    x, targets, unlabelled_x = records.answered_x, records.labels, records.unlabelled_x

    def new_model() -> nn.Module:
        if initial_model is not None:
            # A copy: each round starts from the same weights.
            return copy.deepcopy(initial_model)
        seed = int(torch.randint(2**62, (), generator=generator))
        shape = tuple(records.answered_x.shape[1:])
        return build_model(config.model, input_shape=shape, num_classes=num_classes, generator_seed=seed)

    if config.method == "fixmatch" and len(unlabelled_x):
        return _fixmatch(records, config, new_model(), generator, augmentation, on_progress, penalty)
    # One supervised fit, then another with confident pseudo-labels if the method asks for it.
    total_rounds = 2 if config.method == "pseudo_label" and len(unlabelled_x) else 1
    total_epochs = total_rounds * config.fit.epochs
    epochs = itertools.count(1)

    def advance(*_: float) -> None:
        on_progress(next(epochs), total_epochs)

    shared: dict[str, Any] = {"generator": generator, "augmentation": augmentation, "penalty": penalty}
    for done in range(total_rounds):
        model = new_model()
        fit.fit(model, x, targets, config.fit, on_epoch=advance, **shared)
        if done + 1 < total_rounds:
            probability, label = fit.predict_probabilities(model, unlabelled_x).max(dim=1)
            sure = probability >= config.confidence
            added = label[sure]
            if records.labels.ndim == 2:
                added = F.one_hot(added, records.labels.shape[1]).to(records.labels.dtype)
            # From the released labels anew in each round: a label that this round's student doubts is dropped.
            x = torch.cat([records.answered_x, unlabelled_x[sure]])
            targets = torch.cat([records.labels, added])
    return model


def _fixmatch(
    records: PublicRecords,
    config: StudentTraining,
    model: nn.Module,
    generator: torch.Generator,
    augmentation: AugmentConfig,
    on_progress: Advance,
    penalty: fit.Penalty | None,
) -> nn.Module:
    """Train ``model`` by FixMatch (semi-supervised learning from weakly and strongly augmented images), and return a
    model with the moving average of its weights.

    A batch has four unlabelled records for each answered one. An epoch visits every record at least once; if answered
    or unlabelled records run out first, they are repeated. The supervised and the unsupervised loss have the same
    weight.
    """

    def endless(total: int, batch_size: int) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(total, generator=generator).split(batch_size)

    def augmented(x: Tensor, how: AugmentConfig, *, erase: float = 0.0) -> Tensor:
        return fit.augment(scale_bytes(x), how, generator, erase=erase).contiguous(memory_format=torch.channels_last)

    def averaging(average: Any, parameters: Any, count: Tensor | int) -> None:
        # A plain mean at first, so that early weights do not linger; then an exponential moving average.
        torch._foreach_lerp_(average, parameters, max(1 / _AVERAGE_HORIZON_STEPS, 1 / (int(count) + 1)))

    stronger = fit.strengthened(augmentation)
    size, chunk = config.fit.batch_size, config.fit.batch_size * _UNLABELLED_PER_LABELLED
    answered, unlabelled = endless(len(records.labels), size), endless(len(records.unlabelled_x), chunk)
    num_steps = max(math.ceil(len(records.labels) / size), math.ceil(len(records.unlabelled_x) / chunk))
    optimizer = fit.Optimizer((p for p in model.parameters() if p.requires_grad), config.fit)
    # `fit` does the same for images: convolutions are two to three times as fast on this layout.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    averaged = AveragedModel(model.train(), multi_avg_fn=averaging)
    # Drawn only so that a seed gives the same student as in versions that used this number.
    torch.randint(2**62, (), generator=generator)
    for epoch in range(config.fit.epochs):
        for _ in range(num_steps):
            # The order of these draws is part of the meaning of a seed.
            others, rows = next(unlabelled), next(answered)
            with fit.precision_of(config.fit, records.unlabelled_x.device):
                answered_x = augmented(records.answered_x[rows], augmentation)
                weak_x = augmented(records.unlabelled_x[others], augmentation)
                strong_x = augmented(records.unlabelled_x[others], stronger, erase=fit.ERASED)
                # No gradient: a pseudo-label is a target, which the loss must not move towards the prediction.
                with torch.no_grad():
                    probability, label = model(weak_x).softmax(dim=1).max(dim=1)
                sure = probability >= config.confidence
                both_x = torch.cat([answered_x, strong_x[sure]]).contiguous(memory_format=torch.channels_last)
                logits = model(both_x)
                targets, smoothing = records.labels[rows], config.fit.label_smoothing
                loss = F.cross_entropy(logits[: len(rows)], targets, label_smoothing=smoothing)
                # The sum over confident records is divided by the number of all: a student that is sure of few
                # records learns little from them.
                consistency = F.cross_entropy(logits[len(rows) :], label[sure], reduction="sum") / len(others)
                loss = loss + consistency
                if penalty is not None:
                    loss = loss + penalty(model)
            if not math.isfinite(loss.item()):
                raise ValueError(f"The student diverged in epoch {epoch}; lower student.fit.learning_rate.")
            loss.backward()
            optimizer.step_from_backward(epoch)
            averaged.update_parameters(model)
        on_progress(epoch + 1, config.fit.epochs)
    return averaged.module.eval()


PORTABLE_FORMAT = "fairpate.portable/1"
OPSET = 18
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_TOLERANCE, _MOST_APART = 1e-4, 0.01
_FLOAT, _DOUBLE = 1, 11  # as ONNX numbers them
_COLD = {"group": "n", "cell": "counts[g][k]", "all_groups": "the smallest group's sum of counts"}
_OTHER = {
    "one_vs_rest": "(answers k of all other groups together) / (their answers)",
    "pairwise": "(the least rate of k among other groups that have answers)",
    "overall": "(answers k of all groups, this one included) / (all answers, this one included)",
}


class PortableError(UserError):
    """A student cannot be written as an ONNX graph, or its graph predicts differently."""


@dataclass(frozen=True, kw_only=True)
class PortableStudent:
    """A student exported for use without this library: the bytes of ``model.onnx`` and the values of ``model.json``."""

    graph: bytes
    description: dict[str, Any]


def missing_packages() -> tuple[str, ...]:
    """Return those packages needed for an export (:data:`PACKAGES`) that are not installed."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)


def portable(student: Student, records: Tensor, *, encoding: Mapping[str, Any] | None = None) -> PortableStudent:
    """Export a student: return its ONNX graph and the description of how to use it.

    The graph is checked on ``records`` (N, ...), public inputs of the student. ``encoding`` describes how a raw row
    becomes an input of the graph. PortableError if torch cannot write the graph, or if its predictions differ from the
    student's.
    """
    # Every group in turn, so that the mixing of each is checked.
    mixes = student.card.mixing is not None
    groups = torch.arange(len(records)) % len(student.card.group_names) if mixes else None
    # Two records: with one, the exporter takes the number of records for a constant.
    graph = _graph(_Whole(student).eval(), records[:2], None if groups is None else groups[:2])
    _check(graph, student, records, None if groups is None else groups.numpy())
    card = student.card
    inputs = [{"name": "records", "type": str(records.numpy().dtype), "shape": ["N", *records.shape[1:]]}]
    if card.mixing is not None:
        inputs.append({"name": "groups", "type": "int64", "shape": ["N"]})
    description: dict[str, Any] = {
        "format": PORTABLE_FORMAT,
        "sha256": hashlib.sha256(graph).hexdigest(),
        "opset": OPSET,
        "inputs": inputs,
        "output": {"name": "probabilities", "type": "float32", "shape": ["N", len(card.label_names)]},
        "classes": list(card.label_names),
        "label": "draw one from the probabilities" if card.is_randomised else "the class of the largest probability",
        "groups": {"attribute": card.sensitive_attribute, "names": list(card.group_names), "needed": card.needs_group},
        "encoding": encoding,
        "least_confidence": None,
        "reject_option": None,
    }
    if card.answers is not None:
        description["least_confidence"] = {
            "rule": asdict(card.answers),
            "steps": [
                "Of a record of group g with label k: its confidence is the largest of its probabilities.",
                "Answer if it is at least thresholds_GC[g][k]; null never answers."
                + (" All groups have the same thresholds." if not card.answers.needs_group else ""),
                "Otherwise give no label. This comes before the reject option, if there is one.",
            ],
        }
    if card.idp3 is not None:
        margin = card.idp3.max_disparity
        # IDP3 (FairPATE, Algorithm 2): the rule, and the state that the caller has to keep.
        description["reject_option"] = {
            # JSON has no infinity: null is a margin that refuses nothing.
            "rule": asdict(card.idp3) | {"max_disparity": margin if np.isfinite(margin) else None},
            "state": {
                "name": "counts",
                "shape": [len(card.group_names), len(card.label_names)],
                "starts_with": 0,
                "means": "answers so far, by group and class; the order of records matters",
            },
            "steps": [
                "Of a record of group g with label k: n = sum(counts[g]).",
                f"While {_COLD[card.idp3.cold_start]} < min_count, or no other group has an answer: answer.",
                f"Otherwise r = (counts[g][k] + 1) / (n + 1), and answer if r - {_OTHER[card.idp3.gap]} < "
                "max_disparity, compared exactly; null never refuses.",
                "Answered: counts[g][k] += 1. Refused: give no label, and change nothing.",
            ],
        }
    return PortableStudent(graph=graph, description=description)


class _Whole(nn.Module):
    """All steps from records to the probabilities of labels, as one module for export. The steps are the encoder of
    pictures, the embedding of records, the student's network, and the random change of predictions by group
    (``mixing``); a student may lack all but the network."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.network, self._embedding, self._encoder = student.network, student.embedding, student.encoder
        self.encoder_network = None if student.encoder is None else student.encoder.network
        self._is_mixture = isinstance(student.network, fit.Mixture)
        mixing = student.card.mixing
        self.register_buffer("mixing_GCC", None if mixing is None else torch.tensor(mixing, dtype=torch.float32))

    def forward(self, records: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the probabilities of labels (N, C) for records (N, ...) and their groups (N,)."""
        x = records if self._encoder is None else self._encoder.at_once(records)
        x = x if self._embedding is None else self._embedding(x, at_once=True)
        probabilities: Tensor = self.network(x).softmax(dim=1)
        if self.mixing_GCC is None or groups is None:
            return probabilities
        assert isinstance(self.mixing_GCC, Tensor)
        if not self._is_mixture:
            said = probabilities.argmax(dim=1)
            probabilities = F.one_hot(said, probabilities.shape[1]).to(probabilities.dtype)
        return (probabilities[:, None, :] @ self.mixing_GCC[groups])[:, 0]


def _graph(whole: nn.Module, records: Tensor, groups: Tensor | None) -> bytes:
    """Export the module ``whole`` to ONNX and return the bytes of the file, which contains the weights, accepts any
    number of records, and contains no local path.

    ``records`` and ``groups`` are example inputs.
    """
    from onnxscript import opset18

    def hypot(one: Any, other: Any) -> Any:
        # The square of a 24-bit number is exact in 53 bits, so the root is rounded as torch rounds it.
        wide: list[Any] = [opset18.Cast(side, to=_DOUBLE) for side in (one, other)]
        squares: list[Any] = [opset18.Mul(side, side) for side in wide]
        root: Any = opset18.Sqrt(opset18.Add(*squares))
        return opset18.Cast(root, to=_FLOAT)

    count = torch.export.Dim("records")
    arguments = {"records": records} | ({} if groups is None else {"groups": groups})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own internals
        try:
            program = torch.onnx.export(
                whole,
                args=tuple(arguments.values()),
                input_names=list(arguments),
                output_names=["probabilities"],
                dynamic_shapes=tuple({0: count} for _ in arguments),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                custom_translation_table={torch.ops.aten.hypot.default: hypot},
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise PortableError(
                f"model.onnx: torch {torch.__version__} cannot write this model ({reason}); use another model."
            ) from error
    assert program is not None
    model: Any = program.model_proto
    # Documentation strings and metadata, where the exporter writes paths and lines of code.
    parts = [model, model.graph, *model.functions]
    for graph in (model.graph, *model.functions):
        parts += graph.node
    for entries in (model.graph.input, model.graph.output, model.graph.value_info, model.graph.initializer):
        parts += entries
    for part in parts:
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    # Equal students give equal bytes, and so equal digests.
    return model.SerializeToString(deterministic=True)


def _check(graph: bytes, student: Student, records: Tensor, groups: IntArray | None) -> None:
    """Raise PortableError unless the ONNX ``graph`` predicts the same as the student, for one record and for all
    ``records``.

    For a randomised student, the predictions of at most one record in a hundred may differ. Its probabilities depend on
    the network's most likely label, and rounding may decide a tie between two labels differently.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    expected = student.probabilities(records, groups)
    # One record too: a graph may have stored the number of records that it was made with.
    for count in (1, len(records)):
        given = {"records": records[:count].numpy()} | ({} if groups is None else {"groups": groups[:count]})
        (found,) = session.run(["probabilities"], given)
        apart = (np.abs(found - expected[:count]).max(axis=1) > _TOLERANCE).mean()
        if found.shape != expected[:count].shape or not apart <= (_MOST_APART if student.card.is_randomised else 0):
            what = f"predicts something other than the student on {apart:.0%} of {count} public records"
            raise PortableError(f"model.onnx: {what}, so it is not written; report this as a defect.")
