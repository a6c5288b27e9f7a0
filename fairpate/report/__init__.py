"""From predictions to metrics, and from metrics to the pages a person reads."""
