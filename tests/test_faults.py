"""What was wrong is said as what is expected, whatever pydantic calls it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from fairpate.config import expected
from fairpate.data.dataset import SourceFile
from fairpate.data.declaration import Declaration
from fairpate.data.pictures import PicturesConfig
from fairpate.methods.own_votes import VotesConfig

pytestmark = pytest.mark.usefixtures("light_runs")


class Settings(BaseModel):
    """A field of each kind that configurations have."""

    count: Annotated[int, Field(gt=0, le=2**31 - 1)] = 1
    share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0
    kind: Literal["loop", "stacked"] = "loop"
    widths: tuple[int, ...] = Field((1,), min_length=1)
    word: Annotated[str, Field(pattern="^[a-z]+$", max_length=3)] = "a"
    flag: bool = True
    place: Path = Path()
    options: dict[str, Any] = {}
    step: Annotated[int, Field(multiple_of=2)] = 2


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("count", 0, "expected > 0"),
        ("count", 2**31, "expected <= 2147483647"),
        ("count", "many", "expected a whole number"),
        ("count", 1.5, "expected a whole number"),
        ("count", None, "expected a whole number"),
        ("share", 1, "expected < 1"),
        ("share", -0.5, "expected >= 0"),
        ("share", "half", "expected a number"),
        ("share", float("inf"), "expected a finite number"),
        ("kind", "both", "expected 'loop' or 'stacked'"),
        ("widths", 3, "expected a list"),
        ("widths", (), "expected at least 1 item"),
        ("word", "A", "expected text of the form ^[a-z]+$"),
        ("word", "long", "expected at most 3 characters"),
        ("word", 7, "expected text"),
        ("flag", "maybe", "expected true or false"),
        ("place", 7, "expected a path"),
        ("options", 7, "expected a mapping"),
        ("step", 3, "expected a multiple of 2"),
    ],
)
def test_a_fault_says_what_is_expected(field, value, words):
    with pytest.raises(ValidationError) as raised:
        Settings.model_validate({field: value})
    (fault,) = raised.value.errors()
    assert expected(fault) == words


@pytest.mark.parametrize(
    ("schema", "field", "value", "words"),
    [
        (Declaration, "name", "Klinik Zürich", "lower-case letters"),
        (VotesConfig, "unit", "Hospital", "lower-case letters"),
        (SourceFile, "sha256", "unknown", "64 digits"),
        (PicturesConfig, "features", "edges", "module:function"),
    ],
)
def test_a_form_is_told_in_words(schema, field, value, words):
    with pytest.raises(ValidationError) as raised:
        schema.model_validate({field: value})
    (fault,) = (each for each in raised.value.errors() if each["type"] == "string_pattern_mismatch")
    assert words in expected(fault)
    assert "^" not in expected(fault)


@pytest.mark.parametrize(
    ("value", "text"), [(5.0, "5"), (1e-5, "1e-05"), (0.1234567, "0.1234567"), (2**31, "2147483648")]
)
def test_a_number_is_typed_in_few_digits_and_none_is_lost(value, text):
    said = expected({"type": "greater_than", "ctx": {"gt": value}, "msg": ""})
    assert said == f"expected > {text}"
    assert float(said.split()[-1]) == value
