"""Run a method from data to published files, and everything that reads or serves finished runs: the only package that
joins data, teachers, aggregator, student and evaluation."""
