"""The parts of the training demos that need no framework: text, progress, report and picture.

A plugin's demo trains; these files decide what it trains on and how its numbers are told. Nothing here is
imported by the rest of the package. `[demo]` installs what the picture and the progress bar need.
"""
