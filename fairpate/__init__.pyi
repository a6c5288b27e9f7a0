"""The public names of ``fairpate`` and where they are defined; docs/python.md is their page."""

from fairpate.data import Dataset as Dataset
from fairpate.data import load_data as load_data
from fairpate.estimators import FairClassifier as FairClassifier
from fairpate.methods.base import Method as Method
from fairpate.methods.base import PrivateMethod as PrivateMethod
from fairpate.methods.base import Trained as Trained
from fairpate.methods.base import Training as Training
from fairpate.methods.base import configured as configured
from fairpate.methods.base import method_names as method_names
from fairpate.releases.directory import RunDirectory as RunDirectory
from fairpate.releases.directory import read_statement as read_statement
from fairpate.report.frontier import SelectionRule as SelectionRule
from fairpate.report.frontier import best_error as best_error
from fairpate.report.frontier import by_panel as by_panel
from fairpate.report.frontier import frontier as frontier
from fairpate.report.frontier import points_of as points_of
from fairpate.report.frontier import select as select
from fairpate.run.assess import assess_predictions as assess_predictions
from fairpate.run.compare import compare_methods as compare_methods
from fairpate.run.folder import open_run_directory as open_run_directory
from fairpate.run.publication import write_card as write_card
from fairpate.run.run import run_method as run_method
from fairpate.run.specify import Demand as Demand
from fairpate.run.specify import specify_guarantees as specify_guarantees
from fairpate.run.sweep import read_rows as read_rows
from fairpate.run.tracking import log_to_mlflow as log_to_mlflow
from fairpate.search import FairSearchCV as FairSearchCV
from fairpate.search import announce_search as announce_search
from fairpate.terminal import Reporter as Reporter

__version__: str
