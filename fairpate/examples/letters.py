"""Make letters to a help desk, invented, with a declaration: short texts from which a model learns privately.

    fairpate new mine --example letters
    python mine/letters.py --out letters
    fairpate run --data letters/letters.yaml --epsilon 1

A letter says in some words whether a case was solved. Its writer's language changes the words, and how often cases are
solved; the model reads the words alone.
"""

import argparse
import csv
import random
from pathlib import Path

DECLARATION = """\
name: letters
kind: text
task: the case was solved
rows: {rows}
files: {{private: letters.csv, public: pool.csv, test: test.csv}}
features:
  letter: {{text: 512}}
label: {{column: solved, classes: [no, yes]}}
group: {{column: language, values: {{English: en, German: de}}}}
identity: {{key: [id]}}
"""
OPENINGS = {
    "en": ["Hello,", "To whom it may concern:", "My order again:", "The heating in our flat:", "About my router:"],
    "de": ["Guten Tag,", "Sehr geehrte Damen und Herren,", "Meine Bestellung:", "Die Heizung:", "Zum Router:"],
}
PHRASES = {
    ("en", "yes"): ["thank you", "it works well now", "very helpful", "solved at once", "a friendly answer"],
    ("en", "no"): ["it is still broken", "I got no answer", "we waited for weeks", "the wrong part came", "not solved"],
    ("de", "yes"): ["vielen Dank", "alles läuft wieder", "sehr hilfreich", "sofort gelöst", "eine freundliche Antwort"],
    ("de", "no"): ["immer noch kaputt", "keine Antwort", "seit Wochen warten wir", "das falsche Teil", "nicht gelöst"],
}
SOLVED = {"en": 0.6, "de": 0.45}
MISTAKEN = 0.1
"""The share of phrases that belong to the other outcome."""


def letters(count: int, *, seed: int, first: int = 0) -> list[dict[str, str]]:
    """Return ``count`` letters as rows with the columns id, letter, language and solved; ids count from ``first``."""
    draws, rows = random.Random(seed), []
    for number in range(first, first + count):
        language = draws.choice(["en", "en", "de"])
        solved = "yes" if draws.random() < SOLVED[language] else "no"
        said = [draws.choice(OPENINGS[language])]
        for _ in range(3):
            outcome = solved if draws.random() > MISTAKEN else {"yes": "no", "no": "yes"}[solved]
            said.append(draws.choice(PHRASES[language, outcome]))
        letter = f"{said[0]} {', '.join(said[1:])}. Case {draws.randrange(10_000)}"
        rows.append({"id": f"l{number}", "letter": letter, "language": language, "solved": solved})
    return rows


def write_letters(folder: Path, *, private: int, public: int, test: int, seed: int = 0) -> Path:
    """Write the files of the data set to ``folder``, and return the path of its declaration; another ``seed`` draws
    other letters."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for part, (name, count) in enumerate({"letters": private, "pool": public, "test": test}.items()):
        rows = letters(count, seed=3 * seed + part, first=first)
        first += count
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    declaration = folder / "letters.yaml"
    declaration.write_text(DECLARATION.format(rows=private), encoding="utf-8")
    return declaration


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("letters"))
    print(write_letters(parser.parse_args().out, private=4000, public=800, test=1000))
