"""What a run has released and what it cost: the odometer, a run's log, its folder. Below the methods."""
