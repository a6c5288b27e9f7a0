"""Attacks on noisy sums of records: on the cells of a table of counts, and on sums of feature vectors, of their
products and of residuals.

A canary has a cell of the table or a direction of its own. The attacker's score is the likelihood ratio of the released
numbers that the canary alone moves. The control adds noise that the audit draws itself to the exact numbers.

Shapes: M canaries, K prototypes, G groups, C classes, W numbers per class, D coordinates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fairpate.config import EMBEDDED_NORM
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding
from fairpate.data.registry import embedded
from fairpate.methods.base import Audited
from fairpate.methods.shadows import (
    COPIES,
    FEW_OTHERS,
    LOUD,
    MOST_EACH,
    MOST_POOL,
    OTHERS,
    Found,
    both_kinds,
    gaussian_claim,
    joined,
    labels_and_groups,
    log_ratio,
    made_records,
    moments_of,
    own_noise_of,
    reach_of,
    seen_of,
    setting_of,
    squares_seen,
    training_of,
    varied,
)
from fairpate.privacy import mechanism_events
from fairpate.privacy.audit_bounds import Claimed, Coins, Drawn, NoiseSeen, Numbers, Seen, Shadows
from fairpate.releases.directory import ReleasedArrays, read_release
from fairpate.types import FloatArray, IntArray

Shown = Callable[[str, IntArray], IntArray]
_MOST_OF_EIGENVALUE = 128  # canaries of a release with a least eigenvalue
_WORDS = {
    "moments": "second moments off the diagonal",
    "squares": "second moments on the diagonal",
    "eigenvalue": "least eigenvalue",
}


def attack_on_counts(config: Any, audited: Audited, *, unit: int) -> Shadows:
    """Return an attack on the noisy tables of the method record_votes. Each cell of a table has one canary, a record
    that the attacker looks for in this cell. A cell belongs to a prototype (a centre of public records), a label and,
    if the method reads groups, a group. ``unit``: what a record adds to its cell where persons are protected.
    """
    facts, loaded, is_control = audited.facts, audited.loaded, audited.is_control
    stated: Any = audited.events[0]
    kept = read_release(audited.run.released)[0].arrays
    num_classes, num_rows = len(facts.label_names), len(facts.label_names)
    if config.reads_groups:
        num_rows *= len(facts.group_names)
    public_x = varied(facts, min(len(kept["prototype_M"]), MOST_POOL)) if loaded is None else loaded.public.x
    options: dict[str, Any] = {"num_others": FEW_OTHERS, "loaded": loaded, "is_embedded": False}
    nobody = setting_of(facts, public_x, (public_x[:0], *np.zeros((2, 0), np.int64)), **options)

    without_canaries = nobody.with_canaries(np.zeros(0, np.bool_))
    # Found once: they depend on public records and a public seed only, so they are the same in every release.
    found = config.prototypes(without_canaries)

    def without_noise(dataset: Dataset, *, noise: float = 0.0) -> ReleasedArrays:
        def here(exact_RW: IntArray, **_: Any) -> IntArray:
            return exact_RW + own_noise_of(exact_RW.shape, noise)

        return config.measure(training_of(config, dataset, noisy_sum=here), found)

    # Without noise: what the attacker knows of the other records.
    known = without_noise(without_canaries)
    prototypes, places = np.unique(known.arrays["prototype_M"], return_index=True)
    at_M, row_M = np.repeat(places, num_rows), np.tile(np.arange(num_rows), len(places))
    canaries = (public_x[torch.from_numpy(at_M)], row_M % num_classes, row_M // num_classes)
    setting = setting_of(facts, public_x, canaries, **options)
    stddev, added = stated.noise_stddev_votes, 1.0 if isinstance(stated, mechanism_events.VoteTables) else float(unit)
    spread, kurtosis = moments_of(stddev)
    of_claim = stddev / 2 if is_control else stddev

    def table(released: ReleasedArrays) -> IntArray:
        arrays = released.arrays
        return arrays["votes_KC"] if "votes_KC" in arrays else np.hstack([*arrays["votes_GKC"]])

    cells_M, known_KR = (np.repeat(prototypes, num_rows), row_M), table(known)

    def play(included_M: Coins) -> Seen:
        dataset = setting.with_canaries(included_M)
        if is_control:
            shown_KR = table(without_noise(dataset, noise=of_claim))
        else:
            shown_KR = table(config.measure(training_of(config, dataset), found))
        score_M, gain_M = log_ratio((shown_KR - known_KR)[cells_M][None], np.full((1, len(row_M)), added), of_claim)
        exact_KR = known_KR.copy()
        exact_KR[cells_M] += np.int64(added) * included_M
        noise_KR = shown_KR - exact_KR
        # Noise may be missing only on numbers that are otherwise 0.
        noise = both_kinds(noise_KR, exact_KR != known_KR, spread, kurtosis=kurtosis)
        return seen_of([Found(score_M, gain_M, noise, Drawn.of(noise_KR, of_claim))])

    def exact(records: Split) -> dict[str, IntArray]:
        return {"table": table(without_noise(replace(setting.dataset, private=records)))}

    claim = gaussian_claim(added, of_claim, config.target.delta)
    reach = reach_of(facts, public_x, exact)["table"] / added
    return Shadows(
        attack="likelihood ratio of the count in the canary's cell",
        events=known.events,
        num_canaries=len(row_M),
        releases=(Claimed(name="table of votes", claim=claim, reach=reach),),
        play=play,
        is_gaussian=True,
        control_noise=0.5 if is_control else 1.0,
    )


def attack_on_sums(
    config: Any, audited: Audited, *, least_eigenvalue: Callable[[IntArray], IntArray] | None = None
) -> Shadows:
    """Return attacks on noisy sums of feature vectors, of their products and of residuals. For each coordinate of the
    feature vectors there is one canary (a record that the attacker looks for), whose features lie along this
    coordinate.

    ``config``: the method, which computes in this process. ``least_eigenvalue``: the function by which it computes that
    of the second moments, if it releases one.
    """
    facts, loaded, is_control = audited.facts, audited.loaded, audited.is_control
    events: Sequence[Any] = audited.events
    if loaded is not None and loaded.embedding is None:
        loaded = embedded(loaded, Embedding.of(loaded.public.x, config.own.embedding))
    kept = read_release(audited.run.released)[0].arrays["pool_MW"]
    width = kept.shape[1] - 1
    pool_MD = (
        np.random.default_rng(0).normal(size=(min(len(kept), MOST_POOL), width)) * EMBEDDED_NORM / math.sqrt(width)
    )
    public_x = torch.from_numpy(pool_MD.astype(np.float32)) if loaded is None else loaded.public.x
    has_eigenvalue = least_eigenvalue is not None
    # The least eigenvalue is one number of each release: it needs more releases.
    number_M = np.arange(min(width, _MOST_OF_EIGENVALUE if has_eigenvalue else MOST_EACH))
    loud_MD = LOUD * EMBEDDED_NORM * torch.eye(width)[: len(number_M)]
    canaries = (loud_MD, *labels_and_groups(facts, len(number_M)))
    # Many where the number that all records share must not decide about the least eigenvalue.
    num_others = OTHERS if has_eigenvalue else FEW_OTHERS
    setting = setting_of(facts, public_x, canaries, num_others=num_others, loaded=loaded, is_embedded=True)
    num_canaries = len(number_M)
    if has_eigenvalue and loaded is None:
        # In every direction but the last canary's there are records: it alone decides about the least eigenvalue.
        filled_D = np.repeat(np.delete(np.arange(width), num_canaries - 1), COPIES)
        filled_x = LOUD * EMBEDDED_NORM * torch.eye(width)[torch.from_numpy(filled_D)]
        kinds = (filled_D % len(facts.label_names), filled_D % len(facts.group_names))
        filling = made_records(filled_x, *kinds, name="filling", unit=facts.unit)
        setting = replace(setting, others=joined(setting.others, filling))

    def exact_of(records: Split, shown: Shown) -> dict[str, IntArray]:
        return _exact_sums(config, replace(setting.dataset, private=records), shown)

    no_coins_M = np.zeros(num_canaries, np.bool_)
    drawn = config.measure(training_of(config, setting.with_canaries(no_coins_M)))
    of_sums, of_last = events[0], events[-1]
    moments = next((event for event in events if isinstance(event, mechanism_events.MomentSums)), None)
    event_of = {
        name: {"sums": of_sums, "moments": moments, "squares": moments}.get(name, of_last)
        for name in numbers_of(drawn.arrays)
    }
    # Noise off the diagonal has half the variance; both parts are priced by the norm of the whole matrix.
    scale = {name: math.sqrt(0.5) if name == "moments" else 1.0 for name in event_of}
    stddevs = {name: scale[name] * event.noise_stddev_votes for name, event in event_of.items()}
    share = 0.5 if is_control else 1.0
    # Of the moments only numbers above the diagonal are released.
    above = np.triu_indices(width + 1, 1)
    special = setting.canary(num_canaries - 1)

    def eigenvalues(
        exact: dict[str, IntArray], is_in: bool, least: Callable[[FloatArray], float]
    ) -> tuple[float, float]:
        """Return the least eigenvalue of the second moments without the last canary, and with it."""
        matrix_WW, own_WW = (_symmetric(each) for each in (exact, exact_of(special, _shown_of(exact))))
        with_WW = matrix_WW if is_in else matrix_WW + own_WW
        return least(with_WW - own_WW), least(with_WW)

    def play(included_M: Coins) -> Seen:
        dataset = setting.with_canaries(included_M)
        if is_control:
            noisy: dict[str, IntArray] = {}

            def with_own_noise(name: str, exact_RW: IntArray) -> IntArray:
                noisy[name] = exact_RW + own_noise_of(exact_RW.shape, stddevs[name])
                return noisy[name]

            whole_exact = _exact_sums(config, dataset, with_own_noise)
            # A sum that was not asked for has none of the audit's noise: the control is then far from its plan.
            shown = whole_exact | noisy
        else:
            shown = numbers_of(config.measure(training_of(config, dataset)).arrays)
            whole_exact = _exact_sums(config, dataset, _shown_of(shown))
        if has_eigenvalue:
            before, after = eigenvalues(whole_exact, bool(included_M[-1]), lambda each: np.linalg.eigvalsh(each)[0])
            least = np.rint(after if included_M[-1] else before).astype(np.int64)[None, None]
            if is_control:
                shown["eigenvalue"] += least - whole_exact["eigenvalue"]
            whole_exact["eigenvalue"] = least
        added = exact_of(setting.canaries, _shown_of(shown))
        found = []
        for name in event_of:
            noise_RW, stddev = shown[name] - whole_exact[name], stddevs[name]
            # The control halves the noise of one release alone: the rounds that follow were computed under all of it.
            drawn_RW = np.rint(share * noise_RW)
            if name == "eigenvalue":
                score_M, gain_M = (np.full(num_canaries, np.nan) for _ in range(2))
                moved = after - before
                score_M[-1] = (included_M[-1] * moved + drawn_RW[0, 0]) / (share * stddev)
                gain_M[-1] = moved / (share * stddev)
                noise: tuple[NoiseSeen, ...] = (squares_seen(noise_RW, stddev),)
            else:
                # Only this canary moves its own column, and all move the first one, which counts records.
                added_RM = added[name][:, 1 : 1 + num_canaries]
                found_RM = drawn_RW[:, 1 : 1 + num_canaries] + included_M * added_RM
                score_M, gain_M = log_ratio(found_RM, added_RM, share * stddev)
                # Noise may be missing only on numbers that are otherwise 0.
                where = above if name == "moments" else ...
                noise_RW, exact_RW = noise_RW[where], whole_exact[name][where]
                noise = both_kinds(noise_RW, exact_RW != 0, stddev)
            found.append(Found(score_M, gain_M, noise, Drawn.of(noise_RW, stddev)))
        return seen_of(found)

    shown = numbers_of(drawn.arrays)

    def exact(records: Split) -> dict[str, Numbers]:
        found: dict[str, Numbers] = exact_of(records, _shown_of(shown))
        if "moments" in found:
            # Both parts are priced by the norm of the whole matrix.
            found["moments"] = found["squares"] = _symmetric(found)
        return found

    norms = reach_of(facts, loud_MD, exact)
    reaches = {name: norms.get(name, 0.0) / event.norm for name, event in event_of.items()}
    if least_eigenvalue is not None:
        # By the method's own function: its rounding and its scale are part of what is bounded.
        of_others = _exact_sums(config, setting.with_canaries(no_coins_M), _shown_of(shown))
        before, after = eigenvalues(
            of_others, False, lambda each: int(least_eigenvalue(np.rint(each).astype(np.int64))[0, 0])
        )
        reaches["eigenvalue"] = abs(after - before) / event_of["eigenvalue"].norm
    releases = tuple(
        Claimed(
            name=_WORDS.get(name, name),
            claim=gaussian_claim(event.norm, share * event.noise_stddev_votes, config.target.delta),
            reach=reaches[name],
        )
        for name, event in event_of.items()
    )
    return Shadows(
        attack="likelihood ratio of all released numbers that the canary alone moves",
        events=drawn.events,
        num_canaries=num_canaries,
        releases=releases,
        play=play,
        is_gaussian=True,
        control_noise=share,
    )


def numbers_of(arrays: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return the matrices of a release of sums by name, each with one row per sum and one column per coordinate."""
    sums = arrays["sums_CW"] if "sums_CW" in arrays else arrays["sums_GCW"]
    found = {"sums": sums.reshape(-1, sums.shape[-1])}
    if "moments_WW" in arrays:
        found |= {"moments": np.triu(arrays["moments_WW"], 1), "squares": arrays["moments_WW"].diagonal()[None].copy()}
    if "eigenvalue_11" in arrays:
        found["eigenvalue"] = arrays["eigenvalue_11"]
    return found | {f"residuals {k}": each for k, each in enumerate(arrays.get("residuals_RCW", ()))}


def _shown_of(numbers: Mapping[str, Numbers]) -> Shown:
    return lambda name, _: numbers[name]


def _symmetric(exact: Mapping[str, Numbers]) -> FloatArray:
    above = exact["moments"].astype(np.float64)
    return above + above.T + np.diag(exact["squares"][0].astype(np.float64))


def _exact_sums(config: Any, dataset: Dataset, shown: Shown) -> dict[str, IntArray]:
    """Return the exact sums of ``dataset``'s private records that ``config`` computes, by name, as it does where sites
    add up. ``shown`` returns what is released in the place of each: later sums depend on it."""
    found: dict[str, IntArray] = {}

    def here(exact_RW: IntArray, *, name: str, **_: Any) -> IntArray:
        # The names of sums: "class", "sums, class", "moments", "squares", "eigenvalue", "residuals 3, class".
        own = "sums" if name == "class" else name.split(",")[0]
        found[own] = exact_RW
        return shown(own, exact_RW).reshape(exact_RW.shape)

    released = config.measure(training_of(config, dataset, noisy_sum=here))
    # Code that releases a sum without asking for its noise releases the exact one.
    return numbers_of(released.arrays) | found
