"""Adapters for training frameworks, one module for each framework.

Each module needs its framework. No other module of this package imports them.
"""
