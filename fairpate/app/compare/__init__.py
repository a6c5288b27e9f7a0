"""The compare driver: from a sweep's configuration to cells, tasks, tables and the frontier's report."""
