"""The words of this project, each with its meaning in a sentence or two: ``glossary.yaml``, and what is made of it.

Pages show a meaning where a word stands (:mod:`fairpate.pages`); ``python -m fairpate.glossary`` writes
``docs/glossary.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

_TITLE = "Glossary"
_LEAD = "The words of FairPATE's pages. Each page shows the same meanings where a word is underlined with dots."


@dataclass(frozen=True, kw_only=True)
class Term:
    """A word, its other names, what pages write where it explains that, and what it means."""

    name: str
    also: tuple[str, ...]
    labels: tuple[str, ...]
    meaning: str

    @property
    def key(self) -> str:
        """Fit for the id of an element."""
        return "term-" + "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())


@cache
def glossary() -> Mapping[str, tuple[Term, ...]]:
    """All words by chapter, in the order of the file."""
    text = files("fairpate").joinpath("glossary.yaml").read_text(encoding="utf-8")
    return {
        chapter: tuple(
            Term(
                name=name,
                also=tuple(entry.get("also", ())),
                labels=tuple(entry.get("labels", ())),
                meaning=entry["meaning"],
            )
            for name, entry in entries.items()
        )
        for chapter, entries in yaml.safe_load(text).items()
    }


@cache
def _by_name() -> Mapping[str, Term]:
    """All that is looked up, in small letters."""
    terms = [term for chapter in glossary().values() for term in chapter]
    return {name.lower(): term for term in terms for name in (term.name, *term.also, *term.labels)}


def term_of(word: str) -> Term | None:
    """What explains ``word``, whatever its capital letters; None for a word that is not in the glossary."""
    return _by_name().get(word.lower())


@cache
def _by_key() -> Mapping[str, Term]:
    return {term.key: term for term in _by_name().values()}


def term_by_key(key: str) -> Term:
    """The word whose element has this id. KeyError for another."""
    return _by_key()[key]


def markdown() -> str:
    """``docs/glossary.md``."""
    lines = [f"# {_TITLE}", "", _LEAD]
    for chapter, terms in glossary().items():
        lines += ["", f"## {chapter}"]
        for term in terms:
            also = f" Also: {', '.join(term.also)}." if term.also else ""
            lines += ["", f"### {term.name}", "", f"{term.meaning}{also}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
