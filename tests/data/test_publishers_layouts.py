"""Loaders of files that cannot be shipped, on small files in the publishers' layout."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fairpate.config import DataConfig
from fairpate.data import REGISTRY, DataError, Dataset, load_data, pictures

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(buffer.getvalue(), encoding="utf-8")


def write_picture(path: Path, level: int, shape: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*shape, 3), level, np.uint8)).save(path)


def load(name: str, folder: Path, *, sizes: tuple[int, int, int | None] = (10, 0, 10), **options: object) -> Dataset:
    num_public, num_validation, num_test = sizes
    return load_data(
        DataConfig(
            name=name,
            data_dir=folder,
            options={
                **({"image_size": 32} if name in ("utkface", "fairface", "celeba", "chexpert") else {}),
                **options,
            },
            num_public=num_public,
            num_validation=num_validation,
            num_test=num_test,
        )
    )


def by_id(dataset: Dataset) -> dict[str, tuple[int, int, torch.Tensor, str]]:
    """Label, group, features and split of every record."""
    return {
        record_id: (int(split.y[i]), int(split.z[i]), split.x[i], name)
        for name, split in dataset.splits.items()
        for i, record_id in enumerate(split.record_id)
    }


def test_utkface_reads_names_and_counts_malformed_ones(tmp_path: Path) -> None:
    faces = tmp_path / "utkface" / "UTKFace"
    for place in range(80):
        write_picture(faces / f"{place}_{place % 2}_{place // 2 % 5}_2017{place:04d}.jpg.chip.jpg", place)
    for malformed in ("61_1_20170109142408075.jpg.chip.jpg", "24_0_7_20170116220224657.jpg.chip.jpg", "_.jpg"):
        write_picture(faces / malformed, 0)
    dataset = load("utkface", tmp_path, sizes=(30, 0, 20))
    records = by_id(dataset)
    assert dataset.notes == ("pictures left out for their malformed names: 3",)
    assert len(records) == 80
    label, group, x, _ = records["utkface-37_1_20170037"]
    assert (label, group) == (1, 3)
    assert x.shape == (3, 32, 32)
    assert (x.int() - 37).abs().max() <= 1


def test_utkface_offers_age_by_any_group(tmp_path: Path) -> None:
    class_of = {0: 0, 9: 0, 10: 1, 19: 1, 20: 2, 35: 3, 45: 4, 55: 5, 65: 6, 79: 7, 80: 8, 116: 8}
    faces, ages = tmp_path / "utkface" / "UTKFace", list(class_of)
    for place in range(240):
        age, gender, race = ages[place // 20], place % 2, place // 2 % 5
        write_picture(faces / f"{age}_{gender}_{race}_2017{place:04d}.jpg", place)

    by_race = load("utkface", tmp_path, label="age", sizes=(30, 0, 30))
    assert by_race.label_names[0] == "0 to 9"
    assert by_race.label_names[7:] == ("70 to 79", "80 or older")
    assert by_race.group_names == pictures.facts_of("utkface")["names"]["race"]
    for name, (label, *_) in by_id(by_race).items():
        assert label == class_of[int(name.removeprefix("utkface-").split("_")[0])]

    by_both = load("utkface", tmp_path, label="age", sensitive="race_and_gender", sizes=(40, 0, 40))
    assert (by_both.sensitive_attribute, len(by_both.group_names)) == ("race and gender", 10)
    for name, (_, group, *_) in by_id(by_both).items():
        place = int(name.rpartition("_")[2].removeprefix("2017"))
        assert by_both.group_names[group] == f"{by_race.group_names[place // 2 % 5]} & {('male', 'female')[place % 2]}"

    with pytest.raises(DataError, match=r"data\.options\.sensitive: expected race if the label is gender"):
        load("utkface", tmp_path, sensitive="gender")


def test_fairface_reads_both_label_files_and_only_present_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, names = (pictures.facts_of("fairface")[each] for each in ("files", "names"))
    for name in ("train", "val"):
        monkeypatch.setitem(files, name, files[name].model_copy(update={"sha256": None}))
    for part, prefix, count in (("train", "", 70), ("val", "fairface/", 28)):
        rows = [
            {
                "file": f"{prefix}{part}/{i}.jpg",
                "age": "20-29",
                "gender": names["gender"][i % 2],
                "race": names["race"][i % 7],
                "service_test": "True",
            }
            for i in range(count)
        ]
        write_csv(tmp_path / "fairface" / f"fairface_label_{part}.csv", rows)  # type: ignore[arg-type]
        for i in range(count - 7):
            write_picture(tmp_path / "fairface" / "pictures" / part / f"{i}.jpg", i)
    dataset = load("fairface", tmp_path, sizes=(30, 0, None))
    records = by_id(dataset)
    assert dataset.notes == ("14 labelled pictures that are not present left out",)
    assert set(dataset.test.record_id) == {f"val/{i}.jpg" for i in range(21)}
    assert len(records) == 63 + 21
    label, group, x, _ = records["train/12.jpg"]
    assert (label, group) == (0, 5)
    assert (x.int() - 12).abs().max() <= 1


CELEBA_NAMES = [f"{i:06d}.jpg" for i in range(1, 41)]
CELEBA_MARKS = {name: (1 - 2 * (i % 2), 1 - 2 * (i // 2 % 2)) for i, name in enumerate(CELEBA_NAMES)}
CELEBA_PARTITION = {name: min(i // 14, 2) for i, name in enumerate(CELEBA_NAMES)}


class TestCelebA:
    """Attribute and partition lists as text and as CSV; pictures in a folder."""

    @pytest.fixture(params=["txt", "csv"])
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        celeba = tmp_path / "celeba"
        for i, name in enumerate(CELEBA_NAMES):
            write_picture(celeba / "img_align_celeba" / name, 5 * i, (218, 178))
        if request.param == "csv":
            rows = [{"image_id": n, "Smiling": s, "Young": 1, "Male": m} for n, (s, m) in CELEBA_MARKS.items()]
            write_csv(celeba / "list_attr_celeba.csv", rows)  # type: ignore[arg-type]
            write_csv(
                celeba / "list_eval_partition.csv",
                [{"image_id": n, "partition": p} for n, p in CELEBA_PARTITION.items()],
            )
        else:
            lines = [f"{n}  {s:2d} -1 {m:2d}" for n, (s, m) in CELEBA_MARKS.items()]
            (celeba / "list_attr_celeba.txt").write_text("\n".join(["40", "Smiling Young Male ", *lines, ""]))
            parts = [f"{n} {p}" for n, p in CELEBA_PARTITION.items()]
            (celeba / "list_eval_partition.txt").write_text("\n".join([*parts, ""]))
        return tmp_path

    def test_smiling_by_gender_with_the_publishers_test_part(self, folder: Path) -> None:
        records = by_id(load("celeba", folder, sizes=(8, 0, 12)))
        assert len(records) == 40
        for i, name in enumerate(CELEBA_NAMES):
            label, group, x, split = records[name]
            assert (label, group) == tuple((mark + 1) // 2 for mark in CELEBA_MARKS[name])
            assert (split == "test") == (CELEBA_PARTITION[name] == 2)
            assert (x.int() - 5 * i).abs().max() <= 1

    def test_a_missing_picture_is_named(self, folder: Path) -> None:
        (folder / "celeba" / "img_align_celeba" / "000007.jpg").unlink()
        with pytest.raises(DataError, match=r"img_align_celeba: 000007\.jpg of the publisher's list is missing"):
            load("celeba", folder)


@pytest.mark.parametrize("content", [b"", b"40\n", b"\xff\xfe\x00"])
@pytest.mark.parametrize("name", ["list_attr_celeba", "list_eval_partition"])
def test_a_damaged_list_of_celeba_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "celeba" / "img_align_celeba").mkdir(parents=True)
    attributes = b"1\nSmiling Male\n000001.jpg 1 -1\n"
    for each, whole in (("list_attr_celeba", attributes), ("list_eval_partition", b"000001.jpg 0\n000002.jpg 0\n")):
        (tmp_path / "celeba" / f"{each}.txt").write_bytes(content if each == name else whole)
    with pytest.raises(DataError, match=rf"celeba/{name}\.txt: not a readable table .* restore the file"):
        load("celeba", tmp_path)


class TestCheXpert:
    """CheXpert-v1.0-small: 60 patients with one frontal and one lateral picture each."""

    RACES = ("White, non-Hispanic", "Black or African American", "Asian", "Unknown", "Other")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rows = []
        for patient in range(1, 61):
            for view, side in (("view1_frontal", "Frontal"), ("view2_lateral", "Lateral")):
                path = f"CheXpert-v1.0-small/train/patient{patient:05d}/study1/{view}.jpg"
                findings = dict.fromkeys(REGISTRY["chexpert"].options["finding"].allowed, "") | {
                    "No Finding": "1.0" if patient % 2 else "",
                    "Edema": ("1.0", "0.0", "-1.0", "")[patient // 5 % 4],
                }
                rows.append(
                    {"Path": path, "Sex": "Male", "Age": 50, "Frontal/Lateral": side, "AP/PA": "AP", **findings}
                )
                write_picture(tmp_path / "chexpert" / path, patient)
        write_csv(tmp_path / "chexpert" / "CheXpert-v1.0-small" / "train.csv", rows[:-10])  # type: ignore[arg-type]
        write_csv(tmp_path / "chexpert" / "CheXpert-v1.0-small" / "valid.csv", rows[-10:])  # type: ignore[arg-type]
        demographics = [
            {"PATIENT": f"patient{p:05d}", "GENDER": "Male", "AGE_AT_CXR": 50, "PRIMARY_RACE": self.RACES[p % 5]}
            for p in range(1, 61)
        ]
        write_csv(tmp_path / "chexpert" / "CHEXPERT DEMO.csv", demographics)  # type: ignore[arg-type]
        return tmp_path

    def test_frontal_pictures_of_three_races(self, folder: Path) -> None:
        dataset = load("chexpert", folder, sizes=(10, 0, 8))
        records = by_id(dataset)
        assert dataset.group_names == ("White", "Black", "Asian")
        assert dataset.notes == ("24 frontal pictures of patients of another or unknown race left out",)
        assert len(records) == 36
        label, group, x, _ = records["CheXpert-v1.0-small/train/patient00011/study1/view1_frontal.jpg"]
        assert (label, group) == (1, 1)
        assert x.shape == (1, 32, 32)
        assert (x.int() - 11).abs().max() <= 1

    def test_patients_are_protected(self, folder: Path) -> None:
        for patient in range(1, 61, 2):  # a second study of every other patient
            path = f"CheXpert-v1.0-small/train/patient{patient:05d}/study2/view1_frontal.jpg"
            write_picture(folder / "chexpert" / path, patient)
            with (folder / "chexpert" / "CheXpert-v1.0-small" / "train.csv").open("a") as stream:
                header = (folder / "chexpert" / "CheXpert-v1.0-small" / "train.csv").read_text().splitlines()[0]
                values = {"Path": path, "Frontal/Lateral": "Frontal", "Age": "50"}
                stream.write(",".join(values.get(column, "") for column in header.split(",")) + "\n")
        dataset = load("chexpert", folder, sizes=(10, 0, 8))
        assert dataset.unit == "person"
        for split in dataset.splits.values():
            assert all(person in name for person, name in zip(split.person_id, split.record_id, strict=True))
        assert dataset.private.num_protected < len(dataset.private)

    def test_uncertain_and_blank_findings_count_as_absent(self, folder: Path) -> None:
        labels = {
            int(name.split("patient")[1][:5]): record[0]
            for name, record in by_id(load("chexpert", folder, sizes=(10, 0, 8), finding="Edema")).items()
        }
        assert {patient for patient, label in labels.items() if label} == {
            p for p in labels if ("1.0", "0.0", "-1.0", "")[p // 5 % 4] == "1.0"
        }

    def test_a_spreadsheet_alone_is_explained(self, folder: Path) -> None:
        (folder / "chexpert" / "CHEXPERT DEMO.csv").rename(folder / "chexpert" / "CHEXPERT DEMO.xlsx")
        with pytest.raises(DataError, match=r"CHEXPERT DEMO\.xlsx: save this spreadsheet as CSV"):
            load("chexpert", folder)


class TestRetiredAdult:
    """The reconstruction's column order and exact incomes."""

    @pytest.fixture
    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "hours-per-week": 20 + i,
                "age": 40,
                "capital-gain": 0,
                "capital-loss": 0,
                "workclass": "?" if i == 0 else "State-gov",
                "education": "HS-grad",
                "education-num": 9,
                "marital-status": "Divorced",
                "relationship": "Other-relative",
                "race": "White",
                "gender": "Male" if i % 2 else "Female",
                "native-country": "United-States",
                "income": 50_000 + (i // 2 % 2),
                "occupation": "?",
            }
            for i in range(40)
        ]

    def test_income_above_50000_by_gender(self, rows: list[dict[str, object]], tmp_path: Path) -> None:
        write_csv(tmp_path / "retired_adult" / "adult_reconstruction.csv", rows)
        dataset = load("retired_adult", tmp_path)
        assert len(dataset.feature_names) == 101
        hours = dataset.feature_names.index("hours-per-week")
        records = list(by_id(dataset).values())
        assert len(records) == 40
        for label, group, x, _ in records:
            i = round(float(x[hours]) * 99) - 20
            assert (label, group) == (i // 2 % 2, i % 2)

    def test_an_unknown_category_names_column_and_value(self, rows: list[dict[str, object]], tmp_path: Path) -> None:
        rows[3]["race"] = "Martian"
        write_csv(tmp_path / "retired_adult" / "adult_reconstruction.csv", rows)
        with pytest.raises(
            DataError,
            match=r"adult_reconstruction\.csv: column race: expected a declared category, got 'Martian' in 1 row",
        ):
            load("retired_adult", tmp_path)

    def test_a_missing_column_is_named(self, rows: list[dict[str, object]], tmp_path: Path) -> None:
        write_csv(
            tmp_path / "retired_adult" / "adult_reconstruction.csv",
            [{key: value for key, value in row.items() if key != "age"} for row in rows],
        )
        with pytest.raises(DataError, match=r"adult_reconstruction\.csv: no column age"):
            load("retired_adult", tmp_path)


class TestFolktables:
    """A Census person file: zero-padded codes, empty fields, columns that nobody uses."""

    @pytest.fixture
    def rows(self) -> list[dict[str, object]]:
        working = [
            {
                "RT": "P",
                "SERIALNO": f"2018GQ{i:07d}",
                "SPORDER": f"{1 + i % 2:02d}",
                "PWGTP": "00075",
                "AGEP": 17 + i % 60,
                "COW": 1 + i % 8,
                "SCHL": f"{1 + i % 24:02d}",
                "MAR": 1 + i % 5,
                "OCCP": f"{(10, 4110, 9920)[i % 3]:04d}",
                "POBP": f"{(1, 303, 72)[i % 3]:03d}",
                "RELP": f"{i % 18:02d}",
                "WKHP": f"{40:02d}",
                "SEX": 1 + i % 2,
                "RAC1P": 1 + i % 9,
                "PINCP": f"{50_000 + 1000 * (i // 2 % 2):07d}",
                "WAGP": "",
            }
            for i in range(120)
        ]
        left_out = [
            working[0] | {"SERIALNO": "young", "AGEP": 16},
            working[0] | {"SERIALNO": "poor", "PINCP": 100},
            working[0] | {"SERIALNO": "idle", "WKHP": "", "OCCP": "", "COW": ""},
            working[0] | {"SERIALNO": "weightless", "PWGTP": 0},
            working[0] | {"SERIALNO": "child", "AGEP": 3, "PINCP": "", "WKHP": "", "SCHL": "", "OCCP": "", "COW": ""},
        ]
        return random.Random(0).sample([*working, *left_out], 125)

    @pytest.mark.parametrize("sensitive", ["SEX", "RAC1P"])
    def test_the_acs_income_filter_and_label(
        self, rows: list[dict[str, object]], sensitive: str, tmp_path: Path
    ) -> None:
        write_csv(tmp_path / "folktables" / "psam_p01.csv", rows)
        dataset = load("folktables", tmp_path, sizes=(40, 0, 40), state="AL", sensitive=sensitive)
        records = by_id(dataset)
        assert len(records) == 120
        race = (0, 1, 3, 3, 3, 2, 3, 3, 3)
        for i in range(120):
            label, group, x, _ = records[f"acs-2018GQ{i:07d}-{1 + i % 2:02d}"]
            assert (label, group) == (i // 2 % 2, i % 2 if sensitive == "SEX" else race[i % 9])
            on = {name for name, value in zip(dataset.feature_names, x.tolist(), strict=True) if value == 1}
            assert f"OCCP={('MGR', 'EAT', 'UNEMPLOYED')[i % 3]}" in on
            assert f"POBP={('US state', 'Americas', 'US territory')[i % 3]}" in on
            assert f"SCHL={1 + i % 24}" in on
        assert not any(name.startswith(f"{sensitive}=") for name in dataset.feature_names)
