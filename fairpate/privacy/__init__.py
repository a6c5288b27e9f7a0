"""What a release costs and how its noise is drawn: numpy, scipy and dp-accounting alone."""
