"""The FP8 weight: its storage, its operators, and how it is gathered and saved."""
