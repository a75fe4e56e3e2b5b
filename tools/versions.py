"""Puts the built site beside those of other versions: `python -m tools.versions FOLDER`, after `nox -s docs`.

FOLDER is what a web server serves: one folder for each version, `versions.json`, which the menu of versions reads (in
the form that mike writes), and a page that leads to the newest version.
"""

import json
import shutil
import sys
from pathlib import Path

from tools import pages

ROOT = Path(__file__).parents[1]
FIRST_PAGE = '<!doctype html><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">Version {0}</a>\n'


def add(site: Path, folder: Path, version: str) -> list[str]:
    """Copy a built site to the folder of its version, in place of what is there, and write the list of versions.

    Returns:
        The versions that the folder holds, the newest first.
    """
    if (folder / version).exists():
        shutil.rmtree(folder / version)
    shutil.copytree(site, folder / version)
    found = [path.name for path in folder.iterdir() if path.is_dir() and path.name[0].isdigit()]
    versions = sorted(found, key=lambda name: [int(number) for number in name.split(".")], reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (folder / "index.html").write_text(FIRST_PAGE.format(versions[0]))
    return versions


if __name__ == "__main__":
    sys.stdout.write("\n".join(add(ROOT / "site", Path(sys.argv[1]), pages.version())) + "\n")
