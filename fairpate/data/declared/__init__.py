"""Data sets that are declared: the language, the readers of what it declares, and what helps to write one."""
