"""No option is dropped in silence: each that a command declares is read, or refused where its mode does not read it."""

import ast
import inspect
import textwrap
from typing import Annotated, Any, get_args

import pytest
import typer

from fairpate import cli
from fairpate.cli.commands import Commands, Sets, in_modes, parameters_of
from fairpate.types import UsageError

pytestmark = pytest.mark.usefixtures("light_runs")

Function = Any


def commands(app: typer.Typer, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command, by its words, as Click has it."""

    def walk(command: Any, words: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
        found = {}
        for name, each in getattr(command, "commands", {}).items():
            found |= walk(each, (*words, name))
        return found or {words: command}

    return walk(typer.main.get_command(app), above)


def modes(command: Any) -> dict[str | None, Function]:
    """The functions of a command by the options that select them; a single one reads all of its parameters."""
    return getattr(command.callback, "modes", None) or {None: inspect.unwrap(command.callback)}


def unread(function: Function) -> set[str]:
    """Parameters whose value the function uses nowhere."""
    return set(inspect.signature(function).parameters) - {name.id for name in names(tree(function))}


def read_only_in_a_branch(function: Function) -> set[str]:
    """Parameters that the function reads only behind a condition on another one: modes that were not declared."""
    found = tree(function)
    optional = list(branches(found))
    parameters = set(inspect.signature(function).parameters)
    always = {name.id for name in names(found) if not any(name in names(part) for part, _ in optional)}
    return {
        name
        for name in parameters - always - unread(function)
        if all(conditions & parameters - {name} for part, conditions in optional if name in {n.id for n in names(part)})
    }


def tree(function: Function) -> list[ast.AST]:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(found, ast.FunctionDef)
    return list(found.body)


def names(parts: Any) -> list[ast.Name]:
    parts = parts if isinstance(parts, list) else [parts]
    return [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)]


def branches(parts: list[ast.AST]) -> Any:
    """Everything that runs under a condition, with the names in the condition."""
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.If | ast.IfExp):
                both = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
                conditions = {name.id for name in names(node.test)}
                # What both sides read is read whatever the condition says.
                sides = (node.body, node.orelse)
                shared = set.intersection(*({name.id for name in names(side)} for side in sides))
                for each in both:
                    if not {name.id for name in names(each)} <= shared:
                        yield each, conditions


COMMANDS = commands(cli.app)
REFUSED = [
    (words, selecting, parameter)
    for words, command in COMMANDS.items()
    for selecting, function in modes(command).items()
    for parameter in command.params
    if parameter.name not in parameters_of(function, selecting).keys() | {"as_json"}
    # Another mode's option chooses that mode, unless this one is chosen too.
    and (selecting is not None or parameter.name not in modes(command))
]


def written(parameter: Any) -> list[str]:
    """The option on a command line, with a value that it takes."""
    value = next(iter(get_args(parameter.type_descriptor.annotation)), "3")
    return [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], value]


@pytest.mark.parametrize(
    ("words", "selecting", "parameter"),
    REFUSED,
    ids=[f"{' '.join(words)} {selecting} {parameter.opts[0]}" for words, selecting, parameter in REFUSED],
)
def test_an_option_that_a_mode_does_not_read_is_refused(fairpate, words, selecting, parameter):
    chosen = [word for each in COMMANDS[words].params if each.name == selecting for word in written(each)]
    arguments = [each.name for each in COMMANDS[words].params if each.param_type_name == "argument" and each.required]
    code, output, errors = fairpate(*words, *arguments, *chosen, *written(parameter))
    assert (code, output) == (2, "")
    assert parameter.opts[0] in errors
    assert "read" in errors  # not a fault of the value, nor of the folder, which is none


def test_every_option_has_a_help():
    lacking = [
        f"{' '.join(words)} {each.name}" for words, of in COMMANDS.items() for each in of.params if not each.help
    ]
    assert lacking == []


def test_a_help_is_that_of_the_docstring_and_no_other_command_gets_it():
    def first(path: Annotated[str, Sets("out")] = "", force: bool = False) -> None:
        """Do one thing.

        Args:
            path: Where it is done, which
                takes two lines.
        """

    def second(path: str = "") -> None:
        """Do another thing."""

    app = Commands()
    app.command()(first)
    app.command()(second)
    (words, (path, force, _)) = next(
        (each.help, each.params) for each in commands(app).values() if each.name == "first"
    )
    assert (words, path.help, force.help) == ("Do one thing.", "Where it is done, which takes two lines.", None)


def test_what_a_student_does_not_offer_is_among_them():
    """A student charges nothing and writes no ledger; all that HTTP needs it has like an aggregator."""
    told = {
        parameter.opts[0] for words, selecting, parameter in REFUSED if (words, selecting) == (("serve",), "student")
    }
    assert told == {"--quota", "--take-over", "--detach", "--data-dir", "--stop"}


@pytest.mark.parametrize(
    "line",
    [
        "aggregate votes.csv --unit hospital --classes a,b --label truth",
    ],
)
def test_an_option_that_another_one_leaves_without_effect_is_refused(fairpate, line):
    *arguments, option, value = line.split()
    code, output, errors = fairpate(*arguments, option, value)
    assert (code, output) == (2, "")
    assert option in errors
    assert option not in fairpate(*arguments)[2]


def test_figures_are_as_wide_as_one_option_says(fairpate, tmp_path):
    code, output, errors = fairpate("compare", tmp_path, "--figures", "here", "--columns", "2", "--width-mm", "100")
    assert (code, output) == (2, "")
    assert "--columns and --width-mm" in errors


@pytest.mark.parametrize("option", ["--set=seeds=[0]", "--out=there", "--data-dir=there"])
def test_what_is_only_drawn_takes_no_option_of_a_run(fairpate, tmp_path, option):
    code, output, errors = fairpate("compare", tmp_path, "--figures", "here", option)
    assert (code, output) == (2, "")
    assert f"{option.partition('=')[0]}: not read" in errors


def fields_set_by_options():
    """Every option that sets a field where `--set` may too, with a value that it takes, and each of the fields."""
    values = {
        "--voters": "3",
        "--epsilon": "2",
        "--delta": "0.1",
        "--seed": "5",
        "--test": "t.csv",
        "--max-error": "0.1",
    }
    for words, command in COMMANDS.items():
        if "overrides" not in {each.name for each in command.params}:
            continue
        reads = [parameters_of(function, selecting) for selecting, function in modes(command).items()]
        annotations = {name: each.annotation for own in reads for name, each in own.items()}
        for parameter in command.params:
            marks = getattr(annotations.get(parameter.name), "__metadata__", ())
            for field in (field for mark in marks if isinstance(mark, Sets) for field in mark.fields):
                option = parameter.opts[0]
                yield pytest.param(words, option, values.get(option, "x"), field, id=f"{words[0]} {option} {field}")


@pytest.mark.parametrize(("words", "option", "value", "field"), list(fields_set_by_options()))
def test_a_field_that_an_option_and_set_both_give_is_refused(fairpate, tmp_path, words, option, value, field):
    needed = {"run": {}, "compare": {"config": "x"}, "aggregate": {"votes": "x", "--unit": "x", "--classes": "a,b"}}
    needed["select"] = {"config": "x", "--epsilon": "1", "--out": "x"}
    needed["site plan"] = {"data": "x", "--sites": "x", "--output": "x.json"}
    needed["site simulate"] = {"--data": "x", "--sites": "3", "--out": "x"}
    given = needed[" ".join(words)] | {option: value}
    line = [word for name, each in given.items() for word in ([name, each] if name[0] == "-" else [each])]
    for override in (f"{field}=7", f"{field}.part=7", f"{field.rpartition('.')[0] or field}=null"):
        code, output, errors = fairpate(*words, *line, "--set", override)
        assert (code, output) == (2, "")
        assert f"--set {override} sets the same field" in errors
    assert not list(tmp_path.iterdir())


def test_another_field_of_the_same_section_is_not_refused(fairpate):
    code, _, errors = fairpate("run", "--method", "dp_sgd", "--epsilon", "2", "--set", "target.relation=swap")
    assert code == 2
    assert "same field" not in errors


def test_options_that_set_fields_are_those_that_a_configuration_has():
    """Every typed option of a run, a comparison and votes made elsewhere that is a field says so."""
    told = {(words[0], option) for words, option, *_ in (each.values for each in fields_set_by_options())}
    for command, options in {
        "run": "--method --data --option --epsilon --delta --seed --weights --fair-at --max-error --out --data-dir "
        "--keep",
        "compare": "--fair-at --out --data-dir",
        "select": "--data-dir",
        "aggregate": "--unit --classes --voters --features --id --group --test --label --name --epsilon --delta "
        "--mechanism --out",
    }.items():
        assert {option for word, option in told if word == command and option.startswith("-")} == set(options.split())


def test_an_option_of_the_environment_is_refused_too(monkeypatch):
    app = Commands()
    option = Annotated[int, typer.Option(envvar="NUMBER_OF_A")]

    def without(number: option = 1) -> None:
        assert number

    def with_b() -> None:
        pass

    app.command("both")(in_modes(b=with_b)(without))
    app.command("other")(lambda: None)
    monkeypatch.setenv("NUMBER_OF_A", "4")
    with pytest.raises(UsageError, match="--number"):
        app(["both", "--b"], standalone_mode=False)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_read(words):
    for mode in modes(COMMANDS[words]).values():
        for function in getattr(mode, "parts", (mode,)):
            assert not unread(function)
            assert not read_only_in_a_branch(function)


def test_an_option_that_nobody_reads_is_found():
    def both(folder: str, port: int, rate: float, student: bool) -> list[Any]:
        return [folder, port] if student else [folder]

    assert unread(both) == {"rate"}
    assert read_only_in_a_branch(both) == {"port"}
    with pytest.raises(AssertionError):  # two modes that declare one option differently

        def one(port: int = 1) -> None:
            assert port

        def other(port: int = 2) -> None:
            assert port

        in_modes(port=other)(one)
