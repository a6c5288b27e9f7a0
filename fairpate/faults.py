"""What pydantic found wrong with a value, in this project's words: what was expected, which is the remedy too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairpate.meaning import exact_text

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
}
_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_FORMS = {
    "^[a-z][a-z0-9_]*$": "a name of lower-case letters (a to z), digits and underscores that begins with a letter",
    "^[a-z][a-z ]{0,39}$": "at most 40 lower-case letters (a to z) and spaces that begin with a letter",
    "^[0-9a-f]{64}$": "a sha256 of 64 digits 0 to 9 and a to f",
    r"^[\w.]+:[\w.]+$": "module:name",
    r"^(pixels|oriented_gradients|[\w.]+:[\w.]+)$": "'pixels', 'oriented_gradients' or module:function",
}


def expected(fault: Mapping[str, Any]) -> str:
    """What one of pydantic's errors asks for, such as ``expected > 0``; another kind of error in pydantic's words."""
    kind, context = str(fault["type"]), fault.get("ctx", {})
    if kind == "value_error":  # ours, which says what was wrong
        said = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
        # Behind the field's name: by itself it is a sentence.
        return said.replace("Expected", "expected", 1) if said.startswith("Expected ") else said
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"expected {sign} {exact_text(context[name])}"
    if kind in ("too_short", "string_too_short"):
        return f"expected at least {_counted(context['min_length'], kind)}"
    if kind in ("too_long", "string_too_long"):
        return f"expected at most {_counted(context['max_length'], kind)}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"expected {_FORMS.get(context['pattern'], 'text of the form ' + context['pattern'])}"
    # `int_type`, `int_parsing`, `int_from_float` and the like.
    known = next((words for name, words in _KINDS.items() if kind == name or kind.startswith(f"{name}_")), None)
    if known is not None:
        return f"expected {known}"
    message = str(fault["msg"])
    return message.replace("Input should be", "expected", 1).replace("Input should have", "expected", 1)


def _counted(number: int, kind: str) -> str:
    noun = "character" if kind.startswith("string") else "item"
    return f"{number} {noun}{'' if number == 1 else 's'}"
