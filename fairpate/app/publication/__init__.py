"""What a finished run hands out: its pages and card, its model for others, one bundle, and that bundle's check."""
