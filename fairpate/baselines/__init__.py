"""Methods that FairPATE is compared with, one paper per file: they train, and report events instead of an epsilon."""
