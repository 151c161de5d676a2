"""Put results into the documents that quote them, so that no number is typed by hand, and write results/README.md.

A document marks a place with `<!-- results:begin FILE -->` and `<!-- results:end -->`. What stands between them is
written here: for a study's table.md its table (`table.md#er,fs-er`: the rows of these methods) with the kilobytes kept
in the place of the seconds, for a run's result.json
the summary that `steppe run` prints, for other JSON a table of one of its lists (`update_cost.json#updates`), for a
study's directory what `steppe show --details` prints (`pmnist#details`) or what each method keeps in the end
(`pmnist#bytes`), for a study of the first tasks only its runs beside those of a longer one after as many tasks
(`results/short#beside=results/long`), for the directory of several studies ACC and BWT in each (`k-study#parts`).

A single value in a sentence is marked by `<!-- result: FILE#PATH -->0.0<!-- end -->`, with as many decimals as stand
there; PATH is `rows.er.acc.mean` and the like. `FILE#PATH - #PATH` is the difference of two.

`--check` changes nothing and fails where a document is not up to date.
"""

from __future__ import annotations

import argparse
import sys

from filling.overview import overview
from filling.places import ROOT, filled


def main() -> int:
    """Fill every document, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document is out of date")
    check = parser.parse_args().check
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {document: filled(document.read_text(encoding="utf-8")) for document in documents}
    texts[ROOT / "results" / "README.md"] = overview(ROOT / "results")
    stale = [document for document, text in texts.items() if document.read_text(encoding="utf-8") != text]
    if not check:
        for document in stale:
            document.write_text(texts[document], encoding="utf-8")
    print("\n".join(str(document.relative_to(ROOT)) for document in stale) if stale else "everything is up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
