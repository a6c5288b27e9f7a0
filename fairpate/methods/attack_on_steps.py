"""An attack on trainings by noisy steps, those of the DP-SGD family.

A canary has a feature of its own. The score is the likelihood ratio of the noisy sums of all steps, in the direction of
the canary's gradient. Models without such a direction (convolutions) are attacked by how much the published model
raised the odds of the canary's label, which is weak. Releases of a step beside its gradients (histograms, sizes,
matrices, shares) are attacked in one step on all records.

The method names its releases and their noise (``noise_of_steps``). The control is the method itself, planned for what
half the noise costs.

Shapes: M canaries, H hidden units, D features, P numbers of one release.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.methods.base import Audited, Trained, Watch, price
from fairpate.methods.shadows import (
    LOUD,
    MANY,
    MOST_EACH,
    OTHERS,
    AuditError,
    ShadowData,
    gaussian_claim,
    joined,
    labels_and_groups,
    reach_of,
    setting_of,
    training_of,
)
from fairpate.nn.models import scale_bytes
from fairpate.privacy.accountant import LaplaceReleases, PoissonGaussians, SpentError
from fairpate.privacy.audit_bounds import (
    Claimed,
    Coins,
    Drawn,
    IdealAttack,
    NoiseSeen,
    NoiseTest,
    Seen,
    Shadows,
    gaussian_mu,
    normal_scores,
    spread_of_samples,
)
from fairpate.releases.directory import DataRecord
from fairpate.types import FloatArray, IntArray

_FAR = 50.0  # of a logarithm of odds
_MOST_NUMBERS = 4096  # of a parameter, whose noise is looked at
_MOST_DRAWS, _MOST_PLACES = 1024, 1024  # steps and numbers of a step, whose noise is looked at one by one
_SAMPLED, _MOST_ALONE = 60, 64  # expected samples with a canary that is alone, and trainings of it
_STILL = 0.05  # standard deviations of the noise, within which weights move as released


def attack_on_steps(config: Any, audited: Audited) -> Shadows:
    """Return the attack on trainings of the method ``config`` (:func:`_on_trainings`), or its control."""
    if not audited.is_control:
        return _on_trainings(config, audited)
    events: Sequence[Any] = audited.events
    # The same method, planned for what half the noise costs.
    weaker: list[Any] = [
        replace(event, **{name: value / 2 for name, value in _noises(event).items()}) for event in events
    ]
    epsilon = price(weaker, delta=config.target.delta, accounting=config.target.accounting).epsilon
    half = config.model_copy(update={"target": config.target.model_copy(update={"epsilon": epsilon})})
    shadows = _on_trainings(half, audited)
    share = min(
        less / noise
        for of_run, of_control in zip(events, shadows.events, strict=True)
        for noise, less in zip(_noises(of_run).values(), _noises(of_control).values(), strict=True)
    )
    # Not always half: the control is planned by its epsilon, and group shares keep their noise.
    return replace(shadows, control_noise=share)


def _noises(event: Any) -> dict[str, float]:
    """Return the noise scales of a privacy event by the names of its fields. For Laplace noise the only scale is
    1/epsilon, under the name ``epsilon``."""
    if isinstance(event, LaplaceReleases):
        return {"epsilon": 1 / event.epsilon}
    return {
        name: value
        for name, value in vars(event).items()
        if isinstance(value, float)
        and (name.startswith("noise_") or name.endswith(("_stddev_votes", "_multiplier", "laplace_scale")))
    }


def _trained(config: Any, audited: Audited, dataset: Dataset, *, watch: Watch) -> Trained:
    """Train on ``dataset`` from the model with which a run starts; ``watch`` sees what each step releases."""
    trained: Trained = config.train(training_of(config, dataset, audited.initial_model(config, dataset), watch=watch))
    return trained


@dataclass(kw_only=True)
class _Sums:
    """What a training's noisy sums showed by name: squares of the noise over its claim, and the largest exact norm."""

    total: float = 0.0
    num: int = 0
    norm: float = 0.0


def _on_trainings(config: Any, audited: Audited) -> Shadows:
    """Return an attack on trainings of the DP-SGD family. Each canary (a record that the attacker looks for) has a
    feature of its own, which is 0 in every other record, so that the model's weights of this feature depend on the
    canary alone.

    The attacker sees the noisy sums of all steps, which the guarantee is for. The noise that is claimed is that of the
    run's privacy events; of a control that of its own training's events.
    """
    facts, loaded, stated = audited.facts, audited.loaded, audited.events
    rates = {rate for event in stated if (rate := getattr(event, "sampling_rate", 1.0)) < 1}
    # The rate of the run, with which the number of records was published; coins must not change it.
    size = config.dp_sgd.num_records or round(config.dp_sgd.batch_size / min(rates, default=1.0))
    config = config.model_copy(update={"dp_sgd": config.dp_sgd.model_copy(update={"num_records": size})})
    canaries = _Canaries.of(facts)
    public_x = torch.zeros(MOST_EACH, *facts.record_shape, dtype=canaries.x.dtype)
    # Half of the canaries are included on average: a shadow release is as large as that of the run.
    setting = setting_of(
        facts,
        public_x if loaded is None else loaded.public.x,
        (canaries.x, *labels_and_groups(facts, len(canaries))),
        num_others=max(0, size - len(canaries) // 2),
        loaded=loaded,
        is_embedded=False,
    )
    # A convolution shares its weights among places: no canary has a direction of its own.
    first = next(audited.initial_model(config, setting.dataset).parameters())
    has_direction = first.ndim == 2 and first.shape[1] == math.prod(facts.record_shape)
    # Where shadow releases do not show who is sampled, as many steps as it takes to see twice the rate.
    wanted = 0.0 if has_direction and loaded is None else _SAMPLED / min(rates, default=math.inf)
    of_one = _sums_of_one(config, audited, setting, num_canaries=len(canaries), least_steps=wanted)
    one_step = _OneStep.of(config, audited, canaries.x)
    whole, names = setting.with_canaries(np.ones(len(canaries), np.bool_)), set[str]()
    events = _trained(config, audited, whole, watch=lambda name, *_, **__: names.add(name)).events
    multipliers = config.noise_of_steps(tuple(events if audited.is_control else stated))
    if unknown := names - set(multipliers):
        raise AuditError(f"method: {config.method} releases {', '.join(sorted(unknown))}, for which no audit is known.")
    attack = _AttackOnSteps(
        config=config,
        audited=audited,
        setting=setting,
        canaries=canaries,
        multipliers=multipliers,
        names=[name for name in multipliers if name in names],
        events=events,
        direction=first.shape if has_direction else None,
        of_one=of_one,
        one_step=one_step,
    )
    # Without sampling, a step is Gaussian itself.
    is_gaussian = attack.rate == 1 or sum(getattr(event, "count", 0) for event in events) >= MANY
    words = (
        "likelihood ratio of the noisy sums of all steps in the direction of the canary's gradient"
        if has_direction
        else "how much the published model raised the odds of the canary's label"
    )
    return Shadows(
        attack=words,
        events=events,
        num_canaries=len(canaries),
        releases=attack.claims(),
        play=attack.play,
        is_gaussian=is_gaussian,
        more=attack.more,
    )


@dataclass(frozen=True, kw_only=True)
class _Canaries:
    """The canaries of a training: ``number_M``, the feature that each has alone; their features ``x``, and as a model
    reads them ``seen_x``; their labels."""

    number_M: IntArray
    x: Tensor
    seen_x: Tensor
    label_M: Tensor

    @classmethod
    def of(cls, facts: DataRecord) -> Self:
        width, is_picture = math.prod(facts.record_shape), facts.kind == "image"
        number_M = np.random.default_rng(0).permutation(width)[:MOST_EACH]
        loud_MD = torch.zeros(len(number_M), width)
        loud_MD[torch.arange(len(number_M)), torch.from_numpy(number_M)] = 255 if is_picture else LOUD
        x = loud_MD.reshape(-1, *facts.record_shape)
        x = x.to(torch.uint8) if is_picture else x
        label_M, _ = labels_and_groups(facts, len(number_M))
        return cls(number_M=number_M, x=x, seen_x=scale_bytes(x), label_M=torch.from_numpy(label_M))

    def __len__(self) -> int:
        return len(self.number_M)

    def odds(self, model: torch.nn.Module) -> FloatArray:
        """Return the log odds that ``model`` gives to every canary's label."""
        with torch.no_grad():
            logits_MC = model.eval()(self.seen_x).double()
        own_M = logits_MC.gather(1, self.label_M[:, None])
        rest_MC = logits_MC.scatter(1, self.label_M[:, None], -math.inf)
        return (own_M[:, 0] - rest_MC.logsumexp(dim=1)).numpy()

    def along(self, model: torch.nn.Module, shown_HD: Tensor, norm: float) -> tuple[FloatArray, FloatArray]:
        """Return the norm of every canary's gradient by its own feature's weights, over the clipping bound ``norm``,
        and the released sum ``shown_HD`` in its direction."""
        weights = next(model.parameters())
        with torch.enable_grad():
            said = model(self.seen_x.to(weights.device))
            loss = torch.nn.functional.cross_entropy(said, self.label_M, reduction="sum")
            # Only its own canary has a feature, so that one gradient of the sum has that of each in its column.
            (slopes_HD,) = torch.autograd.grad(loss, [weights])
        columns = torch.from_numpy(self.number_M)
        slope_HM, shown_HM = (each.detach().cpu()[:, columns].double().numpy() for each in (slopes_HD, shown_HD))
        length_M = np.linalg.norm(slope_HM, axis=0)
        return length_M / norm, (slope_HM * shown_HM).sum(axis=0) / np.maximum(length_M, 1e-30) / norm


def _sums_of_one(
    config: Any, audited: Audited, setting: ShadowData, *, num_canaries: int, least_steps: float
) -> dict[str, _Sums]:
    """Train on one canary alone, of each label in turn, until there were ``least_steps`` steps. Return by release how
    far it moves the exact sums of all steps, and how often it is sampled, whatever is drawn."""
    facts, sums = audited.facts, dict[str, _Sums]()

    def reached(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:  # noqa: ARG001
        kept, length = sums.setdefault(name, _Sums()), _length(name, exact) / norm
        kept.norm, kept.num, kept.total = max(kept.norm, length), kept.num + 1, kept.total + (length > 0)

    labels = min(len(facts.label_names), num_canaries)
    # Of so few records noisy group shares may be all 0.
    public = config.with_public_shares(num_groups=len(facts.group_names), num_classes=len(facts.label_names))
    for number in range(_MOST_ALONE):
        if number >= labels and sums["gradients"].num >= least_steps:
            break
        alone = replace(setting.dataset, private=setting.canary(number % labels))
        _trained(public, audited, alone, watch=reached)
    return sums


@dataclass(frozen=True, kw_only=True)
class _AttackOnSteps:
    """The attack on trainings of ``config``, planned as :func:`_on_trainings` says.

    ``multipliers``: by release, its stated noise (``noise_of_steps``); ``names``: the releases that are made;
    ``direction``: the shape of the weights in which each canary has a direction of its own, None if there are none;
    ``of_one``, ``one_step``: what one canary alone, and a step on all records, showed.

    Of all that is played it keeps how often canaries were ``sampled``, how weights ``moved``, and how many numbers and
    steps of each release were looked at.
    """

    config: Any
    audited: Audited
    setting: ShadowData
    canaries: _Canaries
    multipliers: dict[str, tuple[float, float, float]]
    names: list[str]
    events: Sequence[Any]
    direction: torch.Size | None
    of_one: dict[str, _Sums]
    one_step: "_OneStep"
    num_rows: Counter[str] = field(default_factory=Counter)
    num_places: dict[str, int] = field(default_factory=dict)
    sampled: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return next((r for event in self.events if (r := getattr(event, "sampling_rate", 1.0)) < 1), 1.0)

    def play(self, included_M: Coins) -> Seen:
        dataset = self._dataset(included_M)
        model = self.audited.initial_model(self.config, dataset)
        # Subtract the odds under the initial model, whose weights a public seed draws.
        before, watched = self.canaries.odds(model), _Watched(self, model)
        result = self.config.train(training_of(self.config, dataset, model, watch=watched))
        if self.direction is not None:
            score_M, gain_M = watched.scores()
        else:
            # Of unknown gain: this attack alone has no power, whatever it finds.
            score_M, gain_M = self.canaries.odds(result.model) - before, np.zeros(len(self.canaries))
        if self.direction is not None and self.audited.loaded is None:
            self.sampled.extend(watched.counts_M[included_M].tolist())
            self.moved.append(watched.steps.apart)
            self.num_steps.append(watched.steps.num)
        scores, gains = zip((score_M, gain_M), *self.one_step.seen(included_M), strict=True)
        noise, draws = [], []
        for name in self.names:
            kurtosis, rows = self.multipliers[name][2], watched.rows[name]
            kinds = (NoiseSeen.of_squares(each.total, each.num, kurtosis=kurtosis) for each in watched.seen[name])
            noise.append(tuple(kinds))
            scores_RP = np.array(rows) if rows else np.zeros((0, self.num_places.get(name, 0)))
            self.num_places[name] = scores_RP.shape[1]
            draws.append(Drawn(scores_RP=scores_RP))
        return Seen(scores_SM=np.stack(scores), gains_SM=np.stack(gains), noise=tuple(noise), draws=tuple(draws))

    def _dataset(self, included_M: Coins) -> Dataset:
        """Return the records of one training; if neighbours replace a record, one at the origin for each canary that is
        not included."""
        dataset = self.setting.with_canaries(included_M)
        if getattr(self.events[0], "relation", "") == "replace one":
            rows = np.flatnonzero(np.repeat(~included_M, self.setting.copies))
            rest = self.setting.canaries.take(rows.tolist())
            dataset = replace(dataset, private=joined(dataset.private, replace(rest, x=torch.zeros_like(rest.x))))
        return dataset

    def more(self) -> dict[str, tuple[NoiseSeen | NoiseTest, ...]]:
        """Return what all trainings showed together: how weights moved, and how canaries were sampled."""
        found: list[NoiseSeen | NoiseTest] = []
        if self.moved:
            most = max(self.moved)
            found.append(NoiseTest(what="weights", value=most, p_value=float(most <= _STILL)))
        if self.rate < 1:
            # Of canaries without a direction, as it was seen of one alone.
            in_samples = self.of_one["gradients"]
            if self.sampled:
                in_samples = _Sums(total=sum(self.sampled), num=self.num_steps[0] * len(self.sampled))
                found.append(spread_of_samples(self.sampled, num_steps=self.num_steps[0], rate=self.rate))
            found.append(NoiseSeen.of_samples(int(in_samples.total), in_samples.num, rate=self.rate))
        return {"gradients": tuple(found)}

    def claims(self) -> tuple[Claimed, ...]:
        """Return what is claimed of each release alone: of gradients over all steps, of the others in one step on all
        records, where no sample of others hides a canary."""
        delta, found = self.config.target.delta, []
        for name in self.names:
            of_one = self.of_one[name].norm if name in self.of_one else 0.0
            reach = max(of_one, self.one_step.reach.get(name, 0.0))
            is_joint = name == "gradients"
            claim = self._claim_of_gradients(delta) if is_joint else self.one_step.claim(name, delta)
            found.append(Claimed(name=name, claim=claim, is_joint=is_joint, reach=reach))
        return tuple(found)

    def _claim_of_gradients(self, delta: float) -> IdealAttack:
        """Return the strongest attack on the gradients alone, where each step may release more."""
        rate = self.rate
        count = sum(getattr(event, "count", 0) for event in self.events if getattr(event, "sampling_rate", 1.0) == rate)
        alone = PoissonGaussians(
            count=count,
            noise_multiplier=self.multipliers["gradients"][0],
            sampling_rate=rate,
            relation=self.events[0].relation,
        )
        epsilon = price([alone], delta=delta, accounting=self.config.target.accounting).epsilon
        return IdealAttack(epsilon=epsilon, mu=gaussian_mu(epsilon, delta) if epsilon else 0.0)


class _Watched:
    """What the attacker and the audit see of one training, step by step.

    ``seen``: by release, squares of the noise on sums that are 0 and on others; ``rows``: the noise of some steps, as
    numbers; ``counts_M``: how often each canary was in a sample; ``steps``: how the weights moved.
    """

    def __init__(self, attack: _AttackOnSteps, model: torch.nn.Module) -> None:
        self._attack, self._model = attack, model
        self.seen = {name: [_Sums(), _Sums()] for name in attack.multipliers}
        self.rows = {name: list[FloatArray]() for name in attack.multipliers}
        self.counts_M, self.steps = np.zeros(len(attack.canaries)), _Steps(attack.config, attack.canaries.number_M)
        # Log-likelihood ratio of every canary, and the square of its gain.
        self._ratio_M, self._squared_M = np.zeros(len(attack.canaries)), np.zeros(len(attack.canaries))

    def __call__(self, name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:
        self._see_noise(name, exact, released, norm)
        if name == "gradients" and self._attack.direction is not None:
            exact_HD, shown_HD = (
                next(each for each in parts if each.shape == self._attack.direction) for parts in (exact, released)
            )
            self._see_gradients(exact_HD, shown_HD, norm)

    def scores(self) -> tuple[FloatArray, FloatArray]:
        """Return the scores and gains (M,) of the canaries."""
        gain_M = np.sqrt(self._squared_M)
        return self._ratio_M / np.maximum(gain_M, 1e-30) + gain_M / 2, gain_M

    def _see_noise(self, name: str, exact: Sequence[Any], released: Sequence[Any], norm: float) -> None:
        multiplier, variance, _ = self._attack.multipliers[name]
        pairs = [
            (was_P[:_MOST_NUMBERS], shown_P[:_MOST_NUMBERS])
            for was_P, shown_P in zip(_flat(exact), _flat(released), strict=True)
        ]
        # Noise may be missing on empty samples alone.
        of = self.seen[name][any(was_P.any() for was_P, _ in pairs)]
        for was_P, shown_P in pairs:
            of.total += float((((shown_P - was_P) / (norm * multiplier)) ** 2).sum()) / variance
            of.num += len(was_P)
        if self._attack.num_rows[name] < _MOST_DRAWS:
            self._attack.num_rows[name] += 1
            each = max(1, _MOST_PLACES // len(pairs))
            noise_P = np.concatenate([(shown_P - was_P)[:each] for was_P, shown_P in pairs])
            stddev = norm * multiplier * math.sqrt(variance)
            self.rows[name].append(normal_scores(noise_P, stddev, laplace=name == "histograms"))

    def _see_gradients(self, exact_HD: Tensor, shown_HD: Tensor, norm: float) -> None:
        attack, rate = self._attack, self._attack.rate
        multiplier = attack.multipliers["gradients"][0]
        # Its own feature's weights show in the exact sum whether a canary is in the sample.
        self.counts_M += (exact_HD.detach().cpu()[:, attack.canaries.number_M] != 0).any(dim=0).numpy()
        self.steps.see(self._model, shown_HD, stddev=norm * multiplier)
        shift_M, score_M = attack.canaries.along(self._model, shown_HD, norm)
        weight_M, projected_M = np.minimum(shift_M, 1.0) / multiplier, score_M / multiplier
        # The likelihood ratio of a Poisson sample: the canary is in it with the sampling rate.
        raised_M = np.clip(projected_M * weight_M - weight_M**2 / 2, -_FAR, _FAR)
        self._ratio_M += raised_M if rate == 1 else np.log1p(rate * np.expm1(raised_M))
        self._squared_M += weight_M**2 if rate == 1 else rate**2 * np.expm1(np.minimum(weight_M**2, _FAR))


class _Steps:
    """Compares how the weights of the canaries' features move with what the steps of a training release."""

    def __init__(self, config: Any, number_M: IntArray) -> None:
        self._momentum, self._number_M = config.dp_sgd.momentum, number_M
        self._scale = config.dp_sgd.batch_size / config.dp_sgd.learning_rate
        self._weights_HM = self._velocity_HM = np.zeros((0, 0))
        self.num, self.apart = 0, 0.0
        """The number of steps, and the largest difference in standard deviations of the noise."""

    def see(self, model: torch.nn.Module, shown_HD: Tensor, *, stddev: float) -> None:
        """See the weights before a step that releases ``shown_HD``."""
        weights_HM, shown_HM = (
            each.detach().cpu()[:, self._number_M].double().numpy() for each in (next(model.parameters()), shown_HD)
        )
        if self.num:
            apart = np.abs((self._weights_HM - weights_HM) * self._scale - self._velocity_HM).max()
            # Weights are rounded to floats of 24 bits.
            rounded = 2.0**-22 * max(1.0, float(np.abs(weights_HM).max())) * self._scale
            self.apart = max(self.apart, (float(apart) - rounded) / stddev)
            shown_HM = shown_HM + self._momentum * self._velocity_HM
        self._weights_HM, self._velocity_HM, self.num = weights_HM, shown_HM, self.num + 1


def _length(name: str, arrays: Sequence[Any]) -> float:
    """Return the length of what a step releases, in the norm of its sensitivity; infinite if it has NaN."""
    order = 1 if name == "histograms" else 2
    return float(np.nan_to_num(np.linalg.norm(np.concatenate(_flat(arrays)), ord=order), nan=math.inf))


@dataclass(frozen=True, kw_only=True)
class _OneStep:
    """Trainings of one step on all records, with the noise that the target asks for: the releases of a step beside its
    gradients are attacked there, and every kind of unit shows what it adds.

    ``own``: by release, what each canary adds (M, P), in units of the bound; ``reach``: the most that any unit adds.
    """

    config: Any
    audited: Audited
    setting: ShadowData
    multipliers: dict[str, tuple[float, float, float]]
    own: dict[str, FloatArray]
    reach: dict[str, float]

    @classmethod
    def of(cls, config: Any, audited: Audited, canary_x: Tensor) -> Self:
        facts = audited.facts
        sgd = {"epochs": 1.0, "batch_size": OTHERS, "num_records": OTHERS}
        single = config.model_copy(update={"dp_sgd": config.dp_sgd.model_copy(update=sgd)})
        canaries = (canary_x, *labels_and_groups(facts, len(canary_x)))
        setting = setting_of(facts, canary_x[:1] * 0, canaries, num_others=OTHERS, loaded=None, is_embedded=False)
        public = single.with_public_shares(num_groups=len(facts.group_names), num_classes=len(facts.label_names))

        def exact(records: Split) -> dict[str, FloatArray]:
            dataset, found = replace(setting.dataset, private=records), dict[str, FloatArray]()

            def watch(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:  # noqa: ARG001
                found[name] = np.concatenate(_flat(exact)) / norm

            # Shares that are released may all be 0 for so few records; the steps do not depend on declared ones.
            for each in (single, public)[: 1 + (public is not single)]:
                with suppress(SpentError):
                    _trained(each, audited, dataset, watch=watch)
            return found

        names = set[str]()
        events = _trained(single, audited, setting.dataset, watch=lambda name, *_, **__: names.add(name)).events
        # Without NaN, of which a training warns.
        reach = reach_of(facts, canary_x, exact, odd=(0.0, 0.01, 1 / LOUD), l1=("histograms",))
        own: dict[str, FloatArray] = {}
        beside = sorted(names - {"gradients"})
        if beside:
            alone = setting.others.take([0])
            of_one, of_each = exact(alone), [exact(joined(alone, setting.canary(m))) for m in range(len(canary_x))]
            own = {name: np.stack([of_both[name] - of_one[name] for of_both in of_each]) for name in beside}
        multipliers = single.noise_of_steps(events)
        return cls(config=single, audited=audited, setting=setting, multipliers=multipliers, own=own, reach=reach)

    def claim(self, name: str, delta: float) -> IdealAttack:
        """Return the strongest attack on what is claimed of this release of the one step."""
        scale = self.multipliers[name][0]
        return IdealAttack(epsilon=1 / scale, mu=None) if name == "histograms" else gaussian_claim(1.0, scale, delta)

    def seen(self, included_M: Coins) -> list[tuple[FloatArray, FloatArray]]:
        """Draw one step with these canaries; return the scores and gains (M,) of each release but the gradients."""
        if not self.own:
            return []
        noise: dict[str, FloatArray] = {}

        def watch(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:
            noise[name] = (np.concatenate(_flat(released)) - np.concatenate(_flat(exact))) / norm

        dataset = self.setting.with_canaries(included_M)
        _trained(self.config, self.audited, dataset, watch=watch)
        found = []
        for name in self.multipliers:
            if name == "gradients":
                continue
            own_MP, (scale, variance, _) = self.own[name], self.multipliers[name]
            # The attacker does not know the coins of the others: each adds half of what it adds, give or take.
            found_P = noise[name] + (included_M - 0.5) @ own_MP
            spread_PP = scale**2 * variance * np.eye(own_MP.shape[1]) + own_MP.T @ own_MP / 4
            along_MP = np.linalg.solve(spread_PP, own_MP.T).T
            squared_M = (along_MP * own_MP).sum(axis=1)
            # Without the canary's own coin, by Sherman and Morrison.
            rest_M = 1 - squared_M / 4
            gain_M = np.sqrt(squared_M / rest_M)
            score_M = (along_MP @ found_P + squared_M / 2) / rest_M / np.maximum(gain_M, 1e-30)
            found.append((score_M, gain_M))
        return found


def _flat(arrays: Sequence[Any]) -> list[FloatArray]:
    """Return the numbers of arrays or tensors, each as one row."""
    on_cpu = (each.detach().cpu() if isinstance(each, Tensor) else each for each in arrays)
    return [np.asarray(each, np.float64).ravel() for each in on_cpu]
