"""Methods of which `make test` trains each; what others share with one of them is left to the campaigns."""

# By votes for labels, by a release of sums, by steps, by steps with a dual variable, by a game, by randomised reports.
OF_EACH_KIND = ("fairpate", "sf_pate", "weighted_votes", "residual_votes", "teacher_votes", "sgd", "dp_sgd", "raco_dp")
OF_EACH_KIND += ("pf_ld", "dp_oracle_learner", "randomised_response")
