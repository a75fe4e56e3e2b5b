"""FP8 layers: what a module becomes when it is converted."""
