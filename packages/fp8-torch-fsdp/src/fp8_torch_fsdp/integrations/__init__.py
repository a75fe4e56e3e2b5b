"""Adapters for training frameworks, one module each.

Each needs its framework; no other module imports them.
"""
