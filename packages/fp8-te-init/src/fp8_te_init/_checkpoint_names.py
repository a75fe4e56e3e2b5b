"""Names of what belongs to an FP8 weight in a checkpoint, after the name of the weight."""

SCALE, HISTORY = "_quant_scale", "_amax_history"
"""The scales into FP8, and the history of delayed scaling."""
