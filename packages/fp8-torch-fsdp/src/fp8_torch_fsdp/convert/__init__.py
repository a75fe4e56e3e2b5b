"""Conversion of models: selection of layers, change of their classes, and reports."""
