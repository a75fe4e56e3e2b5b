"""`maxtext`: installs MaxText without what it wants for accelerators, and tests our hook in its layers."""

import nox

MAXTEXT = ("maxtext==0.2.5", "pathwaysutils", "cloud-accelerator-diagnostics", "google-cloud-mldiagnostics")
"""Installed without their requirements: the wheel names hundreds of packages."""
IMPORTED_BY_MAXTEXT = (
    *("absl-py", "aqtp", "drjax", "etils", "fastapi", "google-cloud-logging", "google-cloud-monitoring", "jinja2"),
    *("jsonlines", "ml_collections", "omegaconf", "optax", "portpicker", "psutil", "pydantic", "qwix", "tensorboardX"),
    *("tokamax", "transformers", "uvicorn"),
)
"""What its layers import."""


def maxtext(session: nox.Session) -> None:
    """Install MaxText into the session, whose packages are there already, and run the tests."""
    session.install("--no-deps", *MAXTEXT)
    session.install("flax>=0.12", *IMPORTED_BY_MAXTEXT)
    session.run("pytest", "tests/ecosystem/test_with_maxtext.py")
