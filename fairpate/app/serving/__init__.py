"""A finished run as a service, and those who ask it."""
