"""Which recipe is causal, batch-invariant, idempotent ...? The table of `fp8 certify`, from runs.

    python -m benchmarks.certificates [--quick]

Not a measurement: the rows are the same on every machine. `--quick` asks what needs no other processes.
"""

import dataclasses
import logging

from benchmarks._common import options, save
from fp8_common.testing.certify import PROPERTIES, rows, table


def main() -> None:
    """Ask, and write both files."""
    chosen = options(__doc__).parse_args()
    logging.disable(logging.WARNING)  # of models that are made and thrown away
    properties = ("causal", "idempotent") if chosen.quick else PROPERTIES
    found = {name: make() for name, make in rows(properties)}
    facts = {name: {each: dataclasses.asdict(answer) for each, answer in row.items()} for name, row in found.items()}
    save(chosen.results, "certificates", {"certificates": facts}, table(found, properties))


if __name__ == "__main__":
    main()
