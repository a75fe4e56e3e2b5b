"""The changelog check before a release: the newest section is this version's, and dated."""

import re
import sys

from tests.helpers.repository import ROOT, packages


def complaint(version: str, changelog: str) -> str | None:
    """Return what keeps `version` from being released, or None."""
    headings = re.findall(r"^## \[([^\]]+)\](.*)$", changelog, re.MULTILINE)
    if not headings or headings[0][0] != version:
        newest = headings[0][0] if headings else "nothing"
        return f"CHANGELOG.md begins with {newest}, the packages carry {version}. Make one of them right."
    if not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", headings[0][1]):
        return f"CHANGELOG.md says {headings[0][1].strip(' -')!r} for {version}. Write the date: 'YYYY-MM-DD'."
    return None


def main(tag: str | None) -> None:
    """Check the changelog; with a tag, check that it is the version and that the section is dated."""
    version = packages()["fp8-common"].config["project"]["version"]
    if tag and tag.removeprefix("v") != version:
        sys.exit(f"The tag {tag} is not the version {version} of the packages.")
    wrong = complaint(version, (ROOT / "CHANGELOG.md").read_text())
    if wrong and (tag or "begins with" in wrong):
        sys.exit(wrong)
    print(wrong or f"{version} is ready to be tagged")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
