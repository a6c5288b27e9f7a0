"""Compute metrics from predictions, and write the pages that report them."""
