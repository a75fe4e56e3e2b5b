"""State of delayed scaling: pairs of scale and history at rest, live leaves inside of a loss, and how uses meet."""
