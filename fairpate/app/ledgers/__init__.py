"""A run's ledger: where it lies, how it is opened and copied, and what `fairpate ledger` does."""
