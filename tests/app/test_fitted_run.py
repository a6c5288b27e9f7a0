"""`fairpate run` with a data set, a method or an epsilon and nothing else."""

QUICK = ("--set", "noise=seeded", "--set", "data.embedding.graph_share=0")


def test_an_epsilon_alone_is_enough_and_what_is_said_besides_takes_its_place(fairpate, tmp_path):
    code, output, errors = fairpate(
        "run", "--epsilon", "2", "--set", "student.fit.epochs=1", *QUICK, "--out", str(tmp_path / "run")
    )
    assert code == 0, errors
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "method: weighted_votes" in written
    assert "epochs: 1" in written
    assert "2.00 at delta" in output


def test_a_method_gets_what_suits_it(fairpate, tmp_path):
    code, _, errors = fairpate("run", "--method", "dp_sgd", *QUICK, "--out", str(tmp_path / "run"))
    assert code == 0, errors
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "name: logistic" in written
    assert "num_components: 200" in written
