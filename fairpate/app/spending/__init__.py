"""What releases cost: stated by a run, counted before anything is visible, added up over a data set."""
