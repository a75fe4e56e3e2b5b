"""Scales of weights and of earlier steps, and agreement between ranks."""
