"""What a command shows: lines, bars, tables, or one document for a program."""
