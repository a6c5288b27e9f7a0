"""Group fairness: the gate that decides which labels are released, rates by group, and the gaps between groups."""
