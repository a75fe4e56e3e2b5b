"""Scales of weights, delayed scaling, and agreement between ranks."""
