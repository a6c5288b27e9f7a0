"""Privacy costs of releases and exact noise; depends only on numpy and scipy."""
