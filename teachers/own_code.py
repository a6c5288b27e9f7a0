"""Code of the user's that makes teachers: a factory of models with scikit-learn's ``fit`` and ``predict``.

One record touches one vote only if no two teachers share an object; what can be seen of that from outside is looked at.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from fairpate.named_code import is_own_file, named_object
from fairpate.types import UserError

Factory = Callable[..., Any]


class OwnTeacherError(UserError, ValueError):
    """Code of the user's that cannot vote; the message names it, what was wrong and the remedy."""


def load_factory(place: str) -> Factory:
    """The factory, after it made two teachers that share nothing. OwnTeacherError otherwise."""
    try:
        factory: Factory = named_object(place)
        first, second = (made(factory, 0) for _ in range(2))
    except Exception as error:  # whatever the user's module raises
        raise OwnTeacherError(
            f"teachers.model.python: {place} makes no teacher ({type(error).__name__}: {error}); give module:factory, "
            "its folder in PYTHONPATH or as the working directory."
        ) from error
    lacking = [name for name in ("fit", "predict") if not callable(getattr(first, name, None))]
    if lacking:
        raise OwnTeacherError(
            f"teachers.model.python: {place} makes a {type(first).__name__} without {' and '.join(lacking)}; give a "
            "factory of models that have both."
        )
    require_apart(place, first, [second])
    return factory


def own_modules(factory: Factory) -> list[ModuleType]:
    """The factory's module, and what it uses of other modules in the working directory, in any depth."""
    found: dict[str, ModuleType] = {}
    waiting = [getattr(factory, "__module__", "")]
    while waiting:
        module = sys.modules.get(waiting.pop())
        if module is None or module.__name__ in found or not is_own_file(module):
            continue
        found[module.__name__] = module
        held = vars(module).values()
        waiting += [v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) or "" for v in held]
    return list(found.values())


def made(factory: Factory, seed: int) -> Any:
    """A new teacher; ``random_state`` is given to a factory that takes one."""
    parameters = inspect.signature(factory).parameters.values()
    takes = any(each.name == "random_state" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return factory(random_state=seed) if takes else factory()


def require_apart(place: str, teacher: Any, others: Sequence[Any]) -> None:
    """OwnTeacherError where two teachers are, or hold, the same object: a second fit would change the first."""
    own = {id(part) for part in _parts(teacher)}
    if any(id(part) in own for other in others for part in _parts(other)):
        raise OwnTeacherError(
            f"teachers.model.python: {place} gives the same object twice, so that one record could touch several "
            "votes; make a new one at each call."
        )


def _parts(teacher: Any) -> list[Any]:
    """A teacher with the models in it, whether parameters or attributes, in any depth."""
    found, waiting = {id(teacher): teacher}, [teacher]
    while waiting:
        for value in _held(waiting.pop()):
            if hasattr(value, "fit") and not isinstance(value, type) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())


def _held(model: Any) -> Iterator[Any]:
    """What parameters and attributes hold, and what is in their lists."""
    parameters = model.get_params(deep=False) if callable(getattr(model, "get_params", None)) else {}
    for value in (*parameters.values(), *getattr(model, "__dict__", {}).values()):
        yield value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in inner:
            yield from item if isinstance(item, tuple) else (item,)
