"""Accuracy of the default method on the made-up letters of docs/text.md, over the vectors that a text may become.

    python benchmarks/papers/letters.py [--seeds 0 1 2]

Letters are drawn anew for each seed. GloVe's words need `pip install 'fairpate[words]'`. It writes
docs/results/letters.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import measured
import papers
import torch

from fairpate.examples.letters import write_letters
from fairpate.methods.defaults import resolved
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

NAME = "letters"
VECTORS = {
    "words_512": "{text: 512}",
    "characters_512": "{text: 512, ngrams: characters}",
    "glove": "{text: 50, ngrams: glove}",
}
EPSILONS = (0.1, 1.0)
"""Published; of one record, added or removed."""


def main() -> None:
    """Measure what is missing, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured.read(NAME)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            declaration = write_letters(Path(folder), private=4000, public=800, test=1000, seed=seed)
            declared = declaration.read_text(encoding="utf-8")
            for vectors, features in VECTORS.items():
                declaration.write_text(declared.replace("{text: 512}", features), encoding="utf-8")
                for epsilon in EPSILONS:
                    name = f"letters/{vectors}/epsilon={epsilon:g}"
                    if seed in found.get(name, {}).get("seeds", ()):
                        continue
                    # As `fairpate run --data letters.yaml --epsilon E --set noise=seeded --set seed=S` chooses them.
                    settings = [
                        *(("data.name", "letters"), ("data.declaration", str(declaration)), ("noise", "seeded")),
                        *(("seed", seed), ("target.epsilon", epsilon), ("out", f"{folder}/{vectors}-{epsilon}")),
                    ]
                    run = run_method(resolved(settings), Reporter(quiet=True))
                    numbers = papers.numbers_of(run)
                    print(f"{name}, seed {seed}: {numbers['accuracy']}", flush=True)
                    papers.add(found, name, seed, numbers)
                    measured.write(NAME, command="python benchmarks/papers/letters.py", cells=found)


if __name__ == "__main__":
    main()
