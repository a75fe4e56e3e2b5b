"""Scales: how ranks agree on those of weights, and those that come from earlier steps."""
