"""Frames in, words out: groups from a column, public records beside a pipeline, what a claim remarks, small data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from method_kinds import quick_and_slow
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from two_groups import two_groups

from fairpate import load_data
from fairpate.data.from_arrays import declared_records
from fairpate.estimators import FairClassifier

pytestmark = pytest.mark.usefixtures("light_runs")

X, Y, Z = two_groups(600, 0)
PUBLIC_X, *_ = two_groups(200, 1)
QUICK: dict[str, Any] = {"noise": "seeded", "target": {"accounting": "rdp"}, "random_state": 0}
FEW: dict[str, Any] = {**QUICK, "epsilon": 8.0, "dp_sgd": {"epochs": 3, "batch_size": 100}}
SCALE = np.array([1000.0, 0.01])


def frame(x: Any, z: Any) -> pd.DataFrame:
    return pd.DataFrame({"income": x[:, 0], "sex": z, "score": x[:, 1]})


class TestGroupsInAColumn:
    @pytest.mark.parametrize("column", quick_and_slow(["sex", 1, {"column": "sex"}], ["sex", 1]))
    def test_a_column_is_the_groups_and_no_feature(self, column: Any) -> None:
        table = frame(X, Z)
        named = FairClassifier("raco_dp", **FEW, sensitive_feature=column).fit(table, Y)
        given = FairClassifier("raco_dp", **FEW).fit(table.drop(columns="sex"), Y, sensitive_features=table["sex"])
        np.testing.assert_array_equal(named.predict_proba(table), given.predict_proba(table.drop(columns="sex")))
        assert named.groups_.tolist() == ["a", "b"]
        assert named.feature_names_in_.tolist() == ["income", "sex", "score"]
        assert (named.n_features_in_, given.n_features_in_) == (3, 2)

    def test_predictions_that_are_mixed_by_group_need_no_argument(self) -> None:
        table = frame(X, Z)
        model = FairClassifier("dp_postprocessing", **QUICK, epsilon=50.0, sensitive_feature="sex").fit(table, Y)
        bare = FairClassifier("dp_postprocessing", **QUICK, epsilon=50.0).fit(
            table[["income", "score"]], Y, sensitive_features=Z
        )
        np.testing.assert_array_equal(
            model.predict(table), bare.predict(table[["income", "score"]], sensitive_features=Z)
        )
        with pytest.raises(ValueError, match="among"):
            model.predict(table.assign(sex="c"))

    def test_ages_become_groups_between_public_edges(self) -> None:
        """An edge belongs to the group above it."""
        ages = np.array([17, 18, 64.9, 65] * 150)
        table = pd.DataFrame({"x": X[:, 0], "age": ages})
        edges = {"column": "age", "edges": [18, 65]}
        model = FairClassifier("raco_dp", **FEW, sensitive_feature=edges).fit(table, Y)
        assert model.groups_.tolist() == ["18 to 65", "below 18", "from 65"]
        words = np.array(["below 18", "18 to 65", "18 to 65", "from 65"] * 150)
        given = FairClassifier("raco_dp", **FEW).fit(table[["x"]], Y, sensitive_features=words)
        np.testing.assert_array_equal(model.predict_proba(table), given.predict_proba(table[["x"]]))

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ("sexe", r"sensitive_feature: X has no column 'sexe'; did you mean sex"),
            (3, "sensitive_feature: expected a column from 0 to 2, got 3"),
            ({"column": "income", "edges": [2, 1]}, "edges: expected finite numbers in rising order"),
            ({"column": "income", "edge": [1]}, "edge: unknown field; did you mean edges"),
            ({"column": "sex", "edges": [1]}, "could not convert string to float"),
        ],
    )
    def test_a_column_that_cannot_be_the_groups(self, column: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            FairClassifier("raco_dp", **FEW, sensitive_feature=column).fit(frame(X, Z), Y)

    def test_missing_groups_and_groups_said_twice(self) -> None:
        table = frame(X, Z)
        model = FairClassifier("raco_dp", **FEW, sensitive_feature="sex")
        for nothing in (None, np.nan, pd.NA):
            with pytest.raises(ValueError, match="some records have no group"):
                model.fit(table.assign(sex=pd.Series([*Z[:-1], nothing], dtype=object)), Y)
        with pytest.raises(ValueError, match="give one of the two"):
            model.fit(table, Y, sensitive_features=Z)
        with pytest.raises(ValueError, match="1 feature"):
            model.fit(table[["sex"]], Y)
        with pytest.raises(ValueError, match=r"'sex' is a name, and X has no column names"):
            model.fit(X, Y)
        with pytest.raises(ValueError, match="raco_dp reads groups: give sensitive_features to fit, or name"):
            FairClassifier("raco_dp", **FEW).fit(X, Y)
        with pytest.raises(ValueError, match="private and public groups differ"):
            FairClassifier("raco_dp", **FEW).fit(
                X, Y, sensitive_features=Z, public_X=PUBLIC_X, public_sensitive_features=np.arange(200) % 2
            )


class TestFrames:
    def test_words_nullable_numbers_and_names_of_columns(self) -> None:
        table = pd.DataFrame({"a": pd.array(np.arange(100) % 7, dtype="Int64"), "b": pd.array(X[:100, 0], "Float64")})
        labels = pd.Series(Y[:100], dtype="string")
        model = FairClassifier("dp_sgd", **QUICK, epsilon=3.0, model="logistic").fit(table, labels)
        assert set(model.predict(table)) <= {"no", "yes"}
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(table.rename(columns={"a": "c"}))
        with pytest.raises(ValueError, match="feature names"):
            model.predict(table[["b", "a"]])
        with pytest.raises(ValueError, match="NaN"):
            model.fit(table.assign(a=pd.array([None, *range(99)], dtype="Int64")), labels)

    def test_a_table_of_a_few_records(self) -> None:
        few = FairClassifier("dp_sgd", **QUICK, epsilon=3.0).fit(X[:12], Y[:12])
        assert few.config_.dp_sgd.batch_size == 3
        teachers = FairClassifier(
            "pate", noise="seeded", random_state=0, epsilon=3.0, public_X=10, ray={"num_actors": 0}
        )
        assert teachers.fit(X[:12], Y[:12]).config_.teachers.num_teachers == 3

    @pytest.mark.slow
    def test_searches_go_over_short_and_long_names_of_an_architecture(self) -> None:
        for name in ("model__name", "student__model__name"):
            grid = {name: ["logistic", "mlp"]}
            found = GridSearchCV(FairClassifier("dp_sgd", **FEW), grid, cv=2, error_score="raise").fit(X, Y)
            assert found.best_estimator_.config_.student.model.name == found.best_params_[name]
        with config_context(enable_metadata_routing=True):
            routed = GridSearchCV(
                FairClassifier("raco_dp", **FEW)
                .set_fit_request(sensitive_features=True)
                .set_score_request(sensitive_features=True),
                {"raco_dp__bound": [0.1, 0.3]},
                cv=2,
                error_score="raise",
            )
            assert routed.fit(X, Y, sensitive_features=Z).best_params_["raco_dp__bound"] in (0.1, 0.3)

    def test_a_score_counts_what_is_answered(self) -> None:
        gate = {"max_disparity": 0.05, "min_count": 20}
        model = FairClassifier("dp_sgd", **FEW, idp3=gate).fit(X, Y)
        labels = model.predict(X, sensitive_features=Z)
        answered = ~np.ma.getmaskarray(labels)
        assert 0 < answered.sum() < len(X)
        assert model.score(X, Y, sensitive_features=Z) == pytest.approx((labels.data == Y)[answered].mean())


def scaled_by_hand(x: Any) -> Any:
    return StandardScaler().fit(X * SCALE).transform(x)


class TestAScalerInFront:
    """Features in very different units; a scaler makes them alike."""

    PUBLIC = PUBLIC_X * SCALE

    def test_public_records_that_a_pipeline_does_not_scale_are_an_error(self) -> None:
        kept = make_pipeline(
            StandardScaler(), FairClassifier("weighted_votes", **QUICK, epsilon=3.0, public_X=self.PUBLIC)
        )
        given = make_pipeline(StandardScaler(), FairClassifier("weighted_votes", **QUICK, epsilon=3.0))
        message = r"the pipeline's steps change X and not public_X.*transform_input"
        with pytest.raises(ValueError, match=message):
            kept.fit(X * SCALE, Y)
        with pytest.raises(ValueError, match=message):
            given.fit(X * SCALE, Y, fairclassifier__public_X=self.PUBLIC)
        nested = make_pipeline(StandardScaler(), GridSearchCV(kept[-1], {"epsilon": [3.0]}, error_score="raise"))
        with pytest.raises(ValueError, match=message):
            nested.fit(X * SCALE, Y)
        with pytest.raises(ValueError, match="named columns"):
            clone(kept[-1]).fit(pd.DataFrame(X, columns=["a", "b"]), Y)

    def test_a_pipeline_that_is_told_so_scales_them_too(self) -> None:
        model = FairClassifier("weighted_votes", **QUICK, epsilon=3.0)
        with config_context(enable_metadata_routing=True):
            steps = [("scaler", StandardScaler()), ("model", clone(model).set_fit_request(public_X=True))]
            pipeline = Pipeline(steps, transform_input=["public_X"]).fit(X * SCALE, Y, public_X=self.PUBLIC)
        by_hand = model.fit(scaled_by_hand(X * SCALE), Y, public_X=scaled_by_hand(self.PUBLIC))
        np.testing.assert_array_equal(
            pipeline.predict_proba(X * SCALE), by_hand.predict_proba(scaled_by_hand(X * SCALE))
        )
        assert pipeline.score(X * SCALE, Y) > 0.8
        assert any("by a pipeline: scaler" in remark for remark in pipeline[-1].statement().remarks)
        assert not any("by a pipeline" in remark for remark in by_hand.statement().remarks)
        assert any("Preprocessing outside is not accounted" in remark for remark in by_hand.statement().remarks)

    def test_an_embedding_needs_no_scaler(self) -> None:
        model = FairClassifier("weighted_votes", **QUICK, epsilon=3.0).fit(X * SCALE, Y, public_X=self.PUBLIC)
        assert model.score(X * SCALE, Y) > 0.8

    def test_steps_that_learn_nothing_and_methods_without_public_records(self) -> None:
        only = make_pipeline(FunctionTransformer(), FairClassifier("dp_sgd", **FEW)).fit(X, Y)
        assert not any("by a pipeline" in remark for remark in only[-1].statement().remarks)
        passed = make_pipeline("passthrough", FairClassifier("weighted_votes", **QUICK, epsilon=3.0, public_X=PUBLIC_X))
        assert passed.fit(X, Y).score(X, Y) > 0.8
        drawn = make_pipeline(StandardScaler(), FairClassifier("weighted_votes", **QUICK, epsilon=3.0, public_X=400))
        assert drawn.fit(X * SCALE, Y).score(X * SCALE, Y) > 0.7

    def test_words_become_numbers_in_front(self) -> None:
        columns = ColumnTransformer([("words", OneHotEncoder(), ["sex"])], remainder="passthrough")
        model = FairClassifier("dp_sgd", **FEW)
        assert make_pipeline(columns, model).fit(frame(X, Z), Y).score(frame(X, Z), Y) > 0.6


class TestWhatIsChosen:
    def test_what_is_said_takes_the_place_of_what_follows(self) -> None:
        free = FairClassifier("dp_sgd", **QUICK, epsilon=3.0).fit(X, Y)
        assert (free.config_.dp_sgd.batch_size, free.config_.dp_sgd.epochs) == (32, 5)
        said = FairClassifier("dp_sgd", **QUICK, epsilon=3.0, dp_sgd={"epochs": 2}, student={"model": "mlp"}).fit(X, Y)
        assert (said.config_.dp_sgd.batch_size, said.config_.dp_sgd.epochs) == (32, 2)
        assert (free.config_.student.model.name, said.config_.student.model.name) == ("logistic", "mlp")

    def test_the_default_is_the_command_s(self) -> None:
        model = FairClassifier(epsilon=1.0, noise="seeded", random_state=0).fit(X, Y, public_X=PUBLIC_X)
        assert model.config_.method == "residual_votes"
        assert model.student_.card.model.name == "bounded_logistic"
        assert model.config_.data.embedding is not None
        assert 0.9 < model.privacy_.epsilon <= 1.0
        with pytest.raises(ValueError, match=r"residual_votes needs public records.* public_X=1000 draws"):
            FairClassifier(epsilon=1.0).fit(X, Y)

    def test_a_number_of_records_that_decides_is_told(self) -> None:
        words = "Settings were chosen by the real number of private records"
        chosen = FairClassifier("dp_sgd", **QUICK, epsilon=3.0).fit(X, Y)
        declared = FairClassifier("dp_sgd", **QUICK, epsilon=3.0, num_records=5000).fit(X, Y)
        fixed = FairClassifier("weighted_votes", **QUICK, epsilon=3.0, public_X=PUBLIC_X).fit(X, Y)
        few = FairClassifier("weighted_votes", **QUICK, epsilon=3.0, public_X=PUBLIC_X, num_records=5000).fit(X, Y)
        assert words in " ".join(chosen.statement().remarks)
        assert (fixed.config_.data.embedding.num_components, few.config_.data.embedding.num_components) == (200, 50)
        for other in (declared, fixed, few):
            assert words not in " ".join(other.statement().remarks)
        assert declared.config_.dp_sgd.num_records == 5000
        assert declared.config_.dp_sgd.batch_size == 100
        assert "The sampling rate was set for the real number" not in " ".join(declared.statement().remarks)

    def test_drawn_public_records_depend_on_no_private_one(self) -> None:
        """Another record moves the one row of sums that it is in; the pool stays."""
        model = FairClassifier("weighted_votes", **QUICK, epsilon=3.0, public_X=50)
        one = clone(model).fit(X, Y).student_.embedding
        other = clone(model).fit(-7 * X[:300], Y[:300]).student_.embedding
        np.testing.assert_array_equal(one(np_tensor(X)).numpy(), other(np_tensor(X)).numpy())
        for wrong in (1, -3, 10**9):
            with pytest.raises(ValueError, match="expected records, or how many to draw, from 2"):
                clone(model).set_params(public_X=wrong).fit(X, Y)
        grouped = FairClassifier("fair_dp_sgd", **FEW, public_X=50, sensitive_feature=1)
        with pytest.raises(ValueError, match=r"sensitive_feature\.edges: drawn public records"):
            grouped.fit(np.column_stack([X, Z == "a"])[:, [0, 2, 1]], Y)

    def test_progress_is_told(self, capfd: pytest.CaptureFixture[str]) -> None:
        FairClassifier("dp_sgd", **FEW).fit(X, Y)
        assert capfd.readouterr() == ("", "")
        FairClassifier("dp_sgd", **FEW, progress=True).fit(X, Y)
        assert "dp_sgd" in capfd.readouterr().err


def np_tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))


BANK: dict[str, Any] = {
    "name": "bank",
    "decimal": ",",
    "files": {"private": "private.csv"},
    "label": {"column": "granted", "classes": ["no", "yes"]},
    "group": {"column": "sex", "values": ["F", "M"]},
    "person": "customer",
    "trim": [{"columns": "term", "start": "0"}],
    "features": {
        "amount": {"bounds": [0, 50_000], "missing": 10_000, "unknown": "k. A."},
        "asked": {"date": "year", "date_format": "%d.%m.%Y", "bounds": [2010, 2024]},
        "born": {"date": "age", "age_on": "2025-01-01", "date_format": "%d.%m.%y", "bounds": [0, 110], "missing": 50},
        "term": {"categories": ["12", "24"]},
    },
}


def export(count: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """A bank's export as text, and its features by hand: amount, its absence, year, age, its absence, two terms."""
    draw = np.random.default_rng(seed)
    amount, days = np.round(draw.uniform(1000, 50_000, count), 2), draw.integers(0, 5000, count)
    ages, terms, lacks = draw.integers(18, 95, count), draw.integers(1, 3, count) * 12, draw.random(count) < 0.1
    asked = [pd.Timestamp("2011-01-01") + pd.Timedelta(days=int(each)) for each in days]
    # Half of all have their birthday on New Year's Day, when the age is taken.
    halves = draw.random(count) < 0.5
    born = [(1, 1, 2025 - age) if half else (2, 1, 2024 - age) for age, half in zip(ages, halves, strict=True)]
    german = [f"{each:,.2f}".translate(str.maketrans(",.", ".,")) for each in amount]
    frame = pd.DataFrame(
        {
            "amount": np.where(lacks, "k. A.", german),
            "asked": [f"{each:%d.%m.%Y}" for each in asked],
            "born": [f" {day:02}.{month:02}.{year % 100:02}" for day, month, year in born],
            "term": [f"0{each}" for each in terms],
            "customer": [f"K{place // 2}" for place in range(count)],
            "sex": np.tile(["F", "M"], count)[:count],
            "granted": np.where(ages > 55, "yes", "no"),
        }
    )
    frame.loc[0, "born"] = ""
    years = np.array([each.year for each in asked])
    no_birth = np.arange(count) == 0
    features = [
        np.where(lacks, 10_000, amount) / 50_000, lacks, (years - 2010) / 14, np.where(no_birth, 50, ages) / 110,
        no_birth, terms == 12, terms == 24,
    ]  # fmt: skip
    return frame, np.stack(features, axis=1)


def parsed(frame: pd.DataFrame) -> pd.DataFrame:
    """As somebody parses it: floats, days and moments, whole numbers."""
    amount = frame["amount"].replace("k. A.", None).str.replace(".", "").str.replace(",", ".").astype(float)
    short = pd.to_datetime(frame["born"].str.strip().replace("", None), format="%d.%m.%y")
    born = short.where(short < "2025-01-02", short - pd.DateOffset(years=100)).dt.tz_localize("Europe/Berlin")
    asked = pd.to_datetime(frame["asked"], format="%d.%m.%Y").dt.date
    return frame.assign(amount=amount, born=born, asked=asked, term=frame["term"].astype(int))


class TestFramesByTheirDeclaration:
    @pytest.mark.parametrize("form", [pd.DataFrame, parsed, lambda frame: frame.astype("category"), dict])
    def test_decimal_commas_dates_and_trimmed_codes_are_read_as_in_files(self, form: Any, tmp_path: Path) -> None:
        frame, expected = export(200, 0)
        found = declared_records(BANK, form(frame))
        np.testing.assert_allclose(found.x, expected, atol=1e-5)
        frame.to_csv(tmp_path / "private.csv", index=False, encoding="utf-16")
        read = load_data(BANK | {"encoding": "utf-16"}, data_dir=tmp_path)
        np.testing.assert_array_equal(found.x, read.private.x.numpy())
        np.testing.assert_array_equal(found.x, load_data(BANK, private=form(frame)).private.x.numpy())
        assert found.persons is not None
        assert len(set(found.persons)) == 100

    def test_a_model_fits_predicts_and_scores_text_and_parsed_frames_alike(self) -> None:
        (frame, _), (pool, _), (unseen, _) = export(600, 0), export(300, 1), export(300, 2)
        models = [
            FairClassifier.from_declaration(BANK, "weighted_votes", **QUICK, epsilon=8.0).fit(
                form(frame), public_X=form(pool)
            )
            for form in (pd.DataFrame, parsed)
        ]
        answers = [model.predict(form(unseen)).tolist() for model in models for form in (pd.DataFrame, parsed)]
        assert answers[0] == answers[1] == answers[2] == answers[3]
        scores = {model.score(form(unseen)) for model in models for form in (pd.DataFrame, parsed)}
        assert len(scores) == 1 and scores.pop() > 0.8
        assert models[0].statement().unit == "person"

    def test_dates_whose_points_a_reader_dropped_are_refused_everywhere(self) -> None:
        (frame, _), (pool, _) = export(600, 0), export(300, 1)
        model = FairClassifier.from_declaration(BANK, "weighted_votes", **QUICK, epsilon=8.0)

        def dropped(given: pd.DataFrame) -> pd.DataFrame:
            return given.assign(asked=given["asked"].str.replace(".", "").astype(int))

        refused = r"{}: column asked: expected a date written as %d\.%m\.%Y, not a number, got .* in {} rows"
        with pytest.raises(ValueError, match=refused.format("X", 600)):
            model.fit(dropped(frame), public_X=pool)
        with pytest.raises(ValueError, match=refused.format("public_X", 300)):
            model.fit(frame, public_X=dropped(pool))
        model.fit(frame, public_X=pool)
        for ask in (model.predict, model.score, model.predict_proba):
            with pytest.raises(ValueError, match=refused.format("X", 300)):
                ask(dropped(pool.assign(granted="no")))
        # Declared as a bare number, nearly every one is beyond the bounds.
        number = BANK | {"features": BANK["features"] | {"asked": {"bounds": [2010, 2024]}}}
        with pytest.raises(ValueError, match=r"X: column asked: expected values within its `bounds`, got nearly all"):
            FairClassifier.from_declaration(number, "weighted_votes", **QUICK).fit(dropped(frame), public_X=pool)
