"""The ledger: what was asked, what it cost and what came of it, in a file or a database; anchors and audit."""
