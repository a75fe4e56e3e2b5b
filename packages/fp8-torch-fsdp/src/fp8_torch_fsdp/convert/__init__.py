"""Conversion: which layers of a model become FP8 layers, which weights are gathered in FP8, and what stays and why."""
