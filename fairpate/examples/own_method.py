"""Write your own method: noisy class means, released once.

    fairpate new mine --example own-method && cd mine
    fairpate methods own_method:ClassMeans
    fairpate run --method own_method:ClassMeans --epsilon 3

The last layer of the model classifies by the nearest class mean of the features that the layer before it computes. This
layer keeps its initial weights, random ones or those trained on public pictures. A record adds its features, scaled to
an L1 norm of 1, and a count of 1 to the row of its class, so one record changes the table by at most 2 in L1 norm
(Dwork, McSherry, Nissim and Smith 2006).
"""

from typing import ClassVar

from pydantic import Field

from fairpate.config import ConfigError, Positive, Section
from fairpate.methods.base import PrivateMethod, Trained, Training
from fairpate.privacy.accountant import LaplaceReleases
from fairpate.privacy.laplace import add_laplace


class ClassMeansConfig(Section):
    """The settings of the released table of sums and counts."""

    least_count: Positive = Field(5.0, description="Least number of records that a class counts as: public.")


class ClassMeans(PrivateMethod):
    """Classify by the nearest class mean, from one released table with Laplace noise."""

    title: ClassVar[str] = "Noisy class means"
    paper: ClassVar[str] = "Dwork, McSherry, Nissim and Smith 2006"
    family: ClassVar[str] = "records"
    colour: ClassVar[int] = 6

    method: str = "class_means"
    class_means: ClassMeansConfig = ClassMeansConfig()

    def check(self) -> None:
        """Raise ConfigError for a neighbouring relation that the privacy event of :meth:`train` does not cover."""
        if self.target.relation not in (None, "add or remove one"):
            raise ConfigError(f"target.relation: expected add or remove one, got {self.target.relation}; leave it out.")

    def train(self, training: Training) -> Trained:
        """Release the noisy table, and return the model with a last layer computed from it."""
        # Not at the top: listing methods and reading a configuration import every method, and need no torch.
        import torch
        from torch.nn import functional

        private, model = training.dataset.private, training.model
        with torch.no_grad():
            # In float64, so that no sum is off by more than add_laplace allows for.
            features_NF = functional.normalize(model[:-1](private.x).double(), p=1)  # type: ignore[index]
            member_NC = functional.one_hot(private.y, training.dataset.num_classes).double()
            table_CF = member_NC.T @ functional.pad(features_NF, (0, 1), value=1.0)
            noisy = add_laplace(table_CF, l1_sensitivity=2, epsilon=self.target.epsilon, source=self.source)
            noisy_CF = torch.from_numpy(noisy)
            means_CF = noisy_CF[:, :-1] / noisy_CF[:, -1:].clamp(min=self.class_means.least_count)
            model[-1].weight.copy_(means_CF)  # type: ignore[index]
            model[-1].bias.copy_(-means_CF.square().sum(dim=1) / 2)  # type: ignore[index]
        event = LaplaceReleases(count=1, epsilon=self.target.epsilon, unit="record", relation="add or remove one")
        return Trained(model=model.eval(), events=(event,), noise=self.source.label)
