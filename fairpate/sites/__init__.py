"""One noisy sum over sites that share nothing: its plan, a site, the coordinator, and the secure sum between them."""
