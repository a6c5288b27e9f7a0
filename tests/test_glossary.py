"""One glossary: every word has a meaning and one place, and the page of the documentation is made of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fairpate.fairness.rates import NOTIONS
from fairpate.pages import glossary, markdown, term_of
from fairpate.types import UNITS

TERMS = [term for chapter in glossary().values() for term in chapter]


def test_the_page_is_that_of_the_file() -> None:
    page = Path(__file__).parents[1] / "docs" / "glossary.md"
    assert page.read_text(encoding="utf-8") == markdown(), "python -m fairpate.pages > docs/glossary.md"


def test_no_word_is_explained_twice() -> None:
    named = Counter(name.lower() for term in TERMS for name in (term.name, *term.also, *term.labels))
    assert [name for name, times in named.items() if times > 1] == []
    keys = Counter(term.key for term in TERMS)
    assert max(keys.values()) == 1
    assert all(term_of(term.key) is term for term in TERMS)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_meaning_is_one_or_two_short_sentences(term) -> None:
    assert term.meaning.endswith(".")
    assert len(term.meaning) <= 260


@pytest.mark.parametrize("word", ["ε", "Epsilon", "δ", "IDP3", *(notion.title for notion in NOTIONS.values())])
def test_a_word_is_found_by_any_of_its_names(word: str) -> None:
    assert term_of(word) is not None


def test_what_is_no_word_of_the_glossary_has_no_meaning() -> None:
    assert term_of("unheard of") is None
    assert "sensitive attribute" in UNITS
    assert term_of("term-unheard-of") is None
