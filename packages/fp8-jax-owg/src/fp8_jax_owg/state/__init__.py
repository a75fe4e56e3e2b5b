"""State of delayed scaling: stored pairs, live leaves, and shared cotangents."""
