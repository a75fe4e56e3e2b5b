"""What the noxfile needs beside its sessions; the standard library and nox alone, so that a fresh clone has it."""
