"""What a fitted estimator leaves: a folder without pickle, a card of the right records, a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from two_groups import two_groups

from fairpate.estimators import FairClassifier
from student.card import StudentFileError
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")

X, Y, Z = two_groups(600, 0)
PUBLIC_X, *_ = two_groups(200, 1)
TEST_X, TEST_Y, TEST_Z = two_groups(300, 2)
QUICK: dict[str, Any] = {"noise": "seeded", "target": {"accounting": "rdp"}, "random_state": 0, "epsilon": 3.0}


@pytest.fixture(scope="module")
def voted() -> FairClassifier:
    return FairClassifier("weighted_votes", **QUICK, public_X=PUBLIC_X).fit(X, Y)


def same(loaded: FairClassifier, fitted: FairClassifier, x: Any) -> None:
    np.testing.assert_array_equal(loaded.predict_proba(x), fitted.predict_proba(x))
    np.testing.assert_array_equal(loaded.predict(x), fitted.predict(x))
    assert loaded.statement() == fitted.statement()
    assert loaded.events_ == fitted.events_
    assert loaded.privacy_ == fitted.privacy_
    assert loaded.classes_.dtype == fitted.classes_.dtype


class TestAFolder:
    def test_an_embedding_and_its_student_predict_the_same(self, voted: FairClassifier, tmp_path: Path) -> None:
        folder = voted.save(tmp_path / "model")
        assert {path.suffix for path in folder.iterdir()} == {".json", ".yaml", ".safetensors"}
        loaded = FairClassifier.load(str(folder))
        same(loaded, voted, TEST_X)
        again = clone(loaded).fit(X, Y, public_X=PUBLIC_X)
        np.testing.assert_array_equal(again.predict_proba(TEST_X), voted.predict_proba(TEST_X))
        assert load_student(folder / "student.safetensors").record_shape == (2,)

    def test_settings_that_others_leave_unread_are_those_of_the_next_fit(self, tmp_path: Path) -> None:
        model = FairClassifier("dp_postprocessing", **QUICK, dp_sgd={"epochs": 7}).fit(X, Y, sensitive_features=Z)
        loaded = FairClassifier.load(model.save(tmp_path / "model"))
        assert loaded.config_ == model.config_
        assert loaded.get_params()["dp_sgd"].epochs == 7  # of the base that was not trained

    def test_pictures_and_their_graph(self, tmp_path: Path) -> None:
        pictures = np.random.default_rng(0).integers(256, size=(90, 1, 12, 12), dtype=np.uint8)
        model = FairClassifier("weighted_votes", **QUICK, public_X=pictures[60:]).fit(pictures[:60], np.arange(60) % 3)
        assert model.student_.embedding.graph is not None
        same(FairClassifier.load(model.save(tmp_path / "model")), model, pictures)

    def test_a_column_of_groups_and_labels_of_any_type(self, tmp_path: Path) -> None:
        table = pd.DataFrame({"a": X[:, 0], "sex": Z, "b": X[:, 1]})
        for number, labels in enumerate((Y == "yes", (Y == "yes") * 2 - 1, Y.astype(object))):
            settings = {**QUICK, "epsilon": 50.0}
            model = FairClassifier("dp_postprocessing", **settings, sensitive_feature="sex").fit(table, labels)
            loaded = FairClassifier.load(model.save(tmp_path / str(number)))
            same(loaded, model, table)
            assert loaded.feature_names_in_.tolist() == ["a", "sex", "b"]
            with pytest.raises(ValueError, match="feature names"):
                loaded.predict(table[["a", "b", "sex"]])

    def test_what_cannot_be_read_or_written(self, voted: FairClassifier, tmp_path: Path) -> None:
        with pytest.raises(NotFittedError):
            FairClassifier("weighted_votes").save(tmp_path / "none")
        folder = voted.save(tmp_path / "model")
        with pytest.raises(FileExistsError, match="give a new folder"):
            voted.save(folder)
        with pytest.raises(StudentFileError, match=r"holds no estimator \(no estimator\.json\)"):
            FairClassifier.load(tmp_path)
        with pytest.raises(StudentFileError, match="modle: no such folder; give one that `save` wrote"):
            FairClassifier.load(tmp_path / "modle")
        for path in sorted(folder.iterdir()):
            whole = path.read_bytes()
            for damaged in (whole[: len(whole) // 2], whole.replace(b"weighted_votes", b"dp_sgd"), b""):
                if damaged == whole:
                    continue
                path.write_bytes(damaged)
                if path.name != "estimator.json" or damaged != whole.replace(b"weighted_votes", b"dp_sgd"):
                    with pytest.raises(StudentFileError, match="restore it from a copy"):
                        FairClassifier.load(folder)
            path.unlink()
            with pytest.raises(StudentFileError, match="restore it from a copy"):
                FairClassifier.load(folder)
            path.write_bytes(whole)
        same(FairClassifier.load(folder), voted, TEST_X)
        assert sorted(tmp_path.iterdir()) == [folder]

    def test_a_label_that_json_cannot_hold(self, tmp_path: Path) -> None:
        model = FairClassifier("dp_sgd", **QUICK).fit(X, Y)
        model.classes_ = np.array([pd.Timestamp(0), pd.Timestamp(1)], dtype=object)
        with pytest.raises(ValueError, match="expected text or numbers"):
            model.save(tmp_path / "model")
        assert not list(tmp_path.iterdir())


class TestACard:
    def test_it_certifies_the_records_that_it_was_measured_on(self, voted: FairClassifier, tmp_path: Path) -> None:
        page, values = voted.card(tmp_path / "run", TEST_X, TEST_Y, sensitive_features=TEST_Z, intended_use="A test.")
        card = json.loads(values.read_text())
        assert card["data"]["given_from_python"]
        assert card["data"]["name"] == "records"
        assert card["evaluation"]["num_records"] == 300
        assert card["evaluation"]["accuracy"] == pytest.approx(voted.score(TEST_X, TEST_Y))
        said = voted.predict(TEST_X) == "yes"
        assert card["model"]["groups"] == ["a", "b"]
        rates = [said[group == TEST_Z].mean() for group in "ab"]
        assert card["evaluation"]["gaps"]["dp_pairwise"]["value"] == pytest.approx(abs(rates[0] - rates[1]))
        assert card["privacy"]["epsilon"] == voted.privacy_.epsilon
        assert "Preprocessing outside is not accounted" in page.read_text()
        assert "A test." in page.read_text()
        written = [(tmp_path / "run" / name).read_text() for name in ("config.yaml", "data.json")]
        assert not any("digits" in text for text in [*written, page.read_text(), values.read_text()])

    def test_a_loaded_model_has_the_same_card(self, voted: FairClassifier, tmp_path: Path) -> None:
        loaded = FairClassifier.load(voted.save(tmp_path / "model"))
        both = [
            json.loads(model.card(tmp_path / name, TEST_X, TEST_Y, sensitive_features=TEST_Z)[1].read_text())
            for name, model in (("one", voted), ("two", loaded))
        ]
        assert both[0] == both[1]

    def test_what_no_card_can_say(self, voted: FairClassifier, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="sgd has no privacy guarantee"):
            FairClassifier("sgd", random_state=0).fit(X, Y).card(
                tmp_path / "run", TEST_X, TEST_Y, sensitive_features=TEST_Z
            )
        with pytest.raises(ValueError, match=r"y: expected 300 labels among \['no', 'yes'\]"):
            voted.card(tmp_path / "run", TEST_X, np.full(300, "perhaps"), sensitive_features=TEST_Z)
        grouped = FairClassifier("dp_postprocessing", **QUICK).fit(X, Y, sensitive_features=Z)
        # Between two known names, where it would be counted as one of them.
        with pytest.raises(
            ValueError,
            match=r"sensitive_features: expected groups among \['a', 'b'\], those of `fit`, got \['aa', 'b'\]",
        ):
            grouped.card(tmp_path / "run", TEST_X, TEST_Y, sensitive_features=np.where(TEST_Z == "a", "aa", "b"))
        assert not (tmp_path / "run").exists()


def test_a_plot_holds_accuracy_by_group_the_common_label_and_the_cost(voted: FairClassifier) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    # Four times: the errors of each group are then ten or more, and its accuracy is shown.
    x, y, z = np.tile(TEST_X, (4, 1)), np.tile(TEST_Y, 4), np.tile(TEST_Z, 4)
    drawn = voted.plot(x, y, sensitive_features=z, ax=Figure().subplots())
    right = voted.predict(TEST_X) == TEST_Y
    expected = [right.mean(), right[TEST_Z == "a"].mean(), right[TEST_Z == "b"].mean()]
    assert [bar.get_height() for bar in drawn.patches] == pytest.approx(expected)
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["all", "a", "b"]
    common = max((label == TEST_Y).mean() for label in ("yes", "no"))
    assert drawn.lines[0].get_ydata()[0] == pytest.approx(common)
    assert "ε = 3.00, seeded: not private" in drawn.get_title()
    assert "demographic-parity gap" in drawn.get_title()
    few = voted.plot(TEST_X[:8], TEST_Y[:8], sensitive_features=TEST_Z[:8], ax=Figure().subplots())
    assert not few.lines  # of fewer than ten records nothing is shown
    assert all(np.isnan(bar.get_height()) for bar in few.patches)
    bare = voted.plot(TEST_X, TEST_Y)
    assert "gap" not in bare.get_title()
