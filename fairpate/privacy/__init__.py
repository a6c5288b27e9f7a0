"""Privacy costs of releases and exact noise, with numpy and scipy alone."""
