"""A noisy sum over sites that share no records: its plan, a site, the coordinator, and the secure sum between them."""
