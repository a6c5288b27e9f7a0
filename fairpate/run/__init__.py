"""The application: the only code that joins data, teachers, aggregator, student and evaluation."""
