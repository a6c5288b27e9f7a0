"""Privacy costs of releases and exact noise, with numpy, scipy and dp-accounting alone."""
