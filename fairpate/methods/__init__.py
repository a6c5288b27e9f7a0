"""All methods, one file per family of papers with its equations and classes; ``base`` defines what a method is."""
