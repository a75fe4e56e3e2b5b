"""FP8 layers: the classes of converted modules."""
