"""The student: the model that is published. It sees public records and released labels, nothing else."""
