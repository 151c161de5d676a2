"""Fill results into the documents that quote them, so that no number is typed by hand, and write results/README.md.

Documents mark a place with `<!-- results:begin FILE -->` and `<!-- results:end -->`. This script writes between them:

- a study's `table.md`: its table, with memory instead of seconds (`table.md#er,fs-er`: only these methods);
- a run's `result.json`: the summary that `steppe run` prints;
- other JSON: a table of one of its lists (`update_cost.json#updates`);
- a study's directory: the table of `steppe show --details` (`pmnist#details`), or the final memory of each method
  (`pmnist#bytes`);
- a study of the first tasks only: its runs compared with those of a longer one after the same number of tasks
  (`results/short#beside=results/long`);
- a directory of several studies: ACC and BWT in each (`k-study#parts`).

A single value in a sentence is marked by `<!-- result: FILE#PATH -->0.0<!-- end -->`; it keeps the number of decimals.
PATH is `rows.er.acc.mean` and the like. `FILE#PATH - #PATH` is the difference of two values.

`--check` changes nothing and fails if a document is out of date.
"""

from __future__ import annotations

import argparse
import sys

from filling.overview import overview
from filling.places import ROOT, fill_places


def main() -> int:
    """Fill all documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    check = parser.parse_args().check
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {document: fill_places(document.read_text(encoding="utf-8")) for document in documents}
    texts[ROOT / "results" / "README.md"] = overview(ROOT / "results")
    stale = [document for document, text in texts.items() if document.read_text(encoding="utf-8") != text]
    if not check:
        for document in stale:
            document.write_text(texts[document], encoding="utf-8")
    print("\n".join(str(document.relative_to(ROOT)) for document in stale) if stale else "everything is up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
