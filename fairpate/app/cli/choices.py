"""`fairpate methods`, `plan`, `filter-cost` and `specify`: what there is, what a budget allows, what was achieved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from fairpate.app.cli.endings import checked_arguments
from fairpate.app.cli.options import DataDir, data_config
from fairpate.app.terminal.output import Output
from fairpate.app.terminal.progress import waiting


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Its fields, defaults and paper; none lists all."),
    ] = None,
) -> Output:
    """List every method with what it protects and its source, or one with all of its fields."""
    from fairpate.app.terminal.catalogue import describe_method, list_methods

    return list_methods() if name is None else describe_method(name)


def plan(
    data: Annotated[
        str,
        typer.Option(
            help="A name from `fairpate data list`: its classes and its public pool.",
        ),
    ],
    epsilon: Annotated[float, typer.Option(min=0, help="Target.")],
    delta: Annotated[float, typer.Option(min=0, max=1, help="Target.")] = 1e-5,
    teachers: Annotated[list[int] | None, typer.Option(min=2, help="Numbers of teachers to look at.")] = None,
    queries: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of queries to look at.")] = None,
    agreement: Annotated[
        float | None, typer.Option(help="Assumed share of teachers that are right, on average; none: 0.75.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Assumed standard deviation of that share over queries; none: 0.2.")
    ] = None,
    votes: Annotated[Path | None, typer.Option(help="A run's real votes instead. For the operator: private.")] = None,
    data_dir: DataDir = None,
) -> Output:
    """Who could vote at an epsilon, with the command of each; and of trained teachers every way to spend it."""
    from fairpate.app.planning.candidates import candidates, describe_candidates
    from fairpate.app.planning.plan import plan_for
    from fairpate.app.planning.plan_text import describe, proposal_json
    from fairpate.methods.fitted import method_for

    config = data_config(data, None, data_dir)
    with checked_arguments(), waiting("plan"):
        proposal = plan_for(
            config,
            epsilon=epsilon,
            delta=delta,
            teacher_counts=teachers or None,
            query_counts=queries or [100, 300, 1000],
            agreement=agreement,
            spread=spread,
            votes=votes,
        )
        found = (
            []
            if votes is not None
            else candidates(config, data, epsilon=epsilon, delta=delta, agreement=agreement, spread=spread)
        )
    words = [describe_candidates(found, epsilon=epsilon, chosen=method_for(config))] if found else []
    return Output(
        facts=proposal_json(proposal) | {"candidates": found, "chosen": method_for(config) if found else None},
        words=Group(*words, describe(proposal)),
    )


def filter_cost(
    epsilon: Annotated[float, typer.Option(min=0, help="Of one record in what sees only the records kept.")],
    disparity: Annotated[
        float, typer.Option(min=0, help="The filter's gamma: what two groups' shares of a label may differ by.")
    ],
    delta: Annotated[float, typer.Option(min=0, help="Beside it.")] = 1e-5,
) -> Output:
    """What private training costs behind a filter of private records for parity, and what may be spent behind it."""
    from fairpate.app.planning.filtering import cost_of_filter, describe_cost

    with checked_arguments():
        cost = cost_of_filter(epsilon, delta, disparity)
    return Output(facts=cost, words=describe_cost(cost))


def specify(
    epsilon: Annotated[float | None, typer.Option(help="At most this privacy budget.")] = None,
    disparity: Annotated[float | None, typer.Option(help="At most this gap of demographic parity.")] = None,
    fairness: Annotated[
        list[str] | None,
        typer.Option(help="NOTION=LIMIT: at most this, such as equalized_odds=0.1; once for each notion."),
    ] = None,
    coverage: Annotated[float | None, typer.Option(help="At least this share of records answered.")] = None,
    accuracy: Annotated[float | None, typer.Option(help="At least this accuracy on them.")] = None,
    frontier: Annotated[Path | None, typer.Option(help="A results.parquet; none takes the newest in runs/.")] = None,
    data: Annotated[str | None, typer.Option(help="Only this data set of the table.")] = None,
    transfer: Annotated[Path | None, typer.Option(help="Another table: apply there what is chosen here.")] = None,
) -> Output:
    """Which guarantees are achievable together: at what accuracy, by which configuration; or the nearest ones."""
    from fairpate.app.compare.specify import fairness_limits, specify_guarantees
    from fairpate.app.compare.specify_text import describe_answer
    from fairpate.evaluation.demands import Demand

    with checked_arguments():
        limits = fairness_limits(fairness or [])
        demand = Demand(epsilon=epsilon, disparity=disparity, coverage=coverage, accuracy=accuracy, fairness=limits)
    with waiting("specify"):
        answer = specify_guarantees(demand, frontier, data=data, transfer_to=transfer)
    return Output(facts=answer.to_json(), words=describe_answer(answer))
