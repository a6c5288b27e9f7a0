"""Who could vote at an epsilon, and with which noise."""
