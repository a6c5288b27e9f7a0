"""An ensemble of teachers on disjoint shards: pure functions first, Ray actors as a thin shell."""
