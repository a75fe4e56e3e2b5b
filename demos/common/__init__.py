"""The parts of the training demos that need no framework: text, progress, report and picture.

The picture needs matplotlib, the progress bar rich.
"""
