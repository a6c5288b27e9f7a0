"""Group fairness with numpy alone: the gate that releases labels, rates by group, and the gaps between them."""
