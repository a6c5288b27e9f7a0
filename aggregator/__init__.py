"""The aggregator: what is released (mechanism), what it cost (ledger), and the two together (session)."""
