"""Conversion of models: selection of layers, FP8 modules, and reports."""
