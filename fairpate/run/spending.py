"""What a run will spend, printed before anything is charged, and the question that a large sum raises."""

from fairpate import types
from fairpate.data import Dataset
from fairpate.methods import base
from fairpate.methods.base import Method, Price
from fairpate.methods.pate import VotingMethod
from fairpate.pages import delta_caution, delta_text, epsilon_text, is_void_delta
from fairpate.releases.odometer import Odometer, spent
from fairpate.terminal import Reporter


def planned_cost(config: Method, dataset: Dataset) -> Price | None:
    """Return the largest privacy cost that a run of ``config`` may publish; None for a run without a guarantee.

    A run with a target epsilon always spends it in full. For a run with a budget of queries instead, the cost is that
    of submitting all queries that fit the budget.
    """
    if isinstance(config, VotingMethod):
        # Every query that fits is charged in full, with any outcome.
        plan = config.plan(dataset)
        events = plan.worst_case(plan.count_fitting())
        return base.price(events, delta=config.target.delta, relation=events[0].relation)
    if not (isinstance(config, base.PrivateMethod) and config.is_private):
        return None
    unit, target, relation = config.unit_of(dataset), config.target, config.target.relation
    if relation is None:  # an attribute is exchanged while its record stays: nothing is added or removed
        relation = "replace one" if unit == "sensitive attribute" else "add or remove one"
    return Price(epsilon=target.epsilon, delta=target.delta, unit=unit, relation=relation, accounting=target.accounting)


def announce_spending(cost: Price | None, data: str, reporter: Reporter, *, is_own: bool) -> None:
    """Print what a release on the data set ``data`` may cost and what earlier releases cost; ask the user for
    confirmation if the total exceeds a limit.

    ``is_own``: the data set is the user's own. If ``cost`` is None, nothing is printed: the run has no guarantee, or
    its noise is seeded and so not private.
    """
    if cost is None:
        return
    odometer = Odometer()
    most = f"at most ε = {epsilon_text(cost.epsilon)} (δ = {delta_text(cost.delta)}) of each {cost.unit}"
    reporter.note("spends", f"{most}; so far {spent(data, odometer, delta=cost.delta)}")
    if question := question_above(data, planned=cost.epsilon, odometer=odometer, delta=cost.delta, is_own=is_own):
        reporter.consent(question)


def announce_delta(delta: float, units: int | None, unit: types.Unit, reporter: Reporter, *, is_own: bool) -> None:
    """Print a caution if ``delta`` is large for the public number of ``units`` (None: not public). Ask for confirmation
    if it is so large that a guarantee says next to nothing, and the records are the user's own (``is_own``)."""
    if caution := delta_caution(delta, units, unit):
        reporter.note("caution", caution)
        if is_own and is_void_delta(delta, units):
            reporter.consent(
                f"δ = {delta_text(delta)} is so large that the guarantee says next to nothing about one {unit}; lower "
                "it with --delta."
            )


# Total epsilon of releases on the user's own records above which a command asks for confirmation, if no limit is set:
# at this epsilon a guess about a record improves by a factor of at most 22,000.
ASK_ABOVE = 10.0


def question_above(data: str, *, planned: float, odometer: Odometer, delta: float, is_own: bool) -> str | None:
    """Return the question to ask the user before releases on ``data`` that cost an epsilon of ``planned`` in sum; None
    if no question is needed.

    A question is needed if the total with earlier releases exceeds the operator's limit, which will refuse some of the
    releases. Without a limit it is needed above :data:`ASK_ABOVE`, if the records are the user's own (``is_own``).
    """
    before = max((total.epsilon for total in odometer.totals(delta=delta, data=data) if total.releases), default=0.0)
    limit, after = min(odometer.limits(data).values(), default=None), before + planned
    if after <= (ASK_ABOVE if limit is None else limit) or (limit is None and not is_own):
        return None
    bound = (
        f"{ASK_ABOVE:g}, and no limit is set" if limit is None else f"the limit of {limit:g}, which refuses the rest"
    )
    return (
        f"The releases on {data} may come to ε = {epsilon_text(after)} in sum ({epsilon_text(before)} so far), above "
        f"{bound}."
    )
