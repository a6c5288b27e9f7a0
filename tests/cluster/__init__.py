"""A package, so that its cluster ends with its last test: an idle one takes a tenth of a processor."""
