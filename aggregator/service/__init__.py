"""The aggregator over HTTP: one Ray actor, its routes for analysts and operators, its page, tokens and metrics."""
