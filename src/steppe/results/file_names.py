"""The names of files in run and study directories."""

CONFIG, LOG, RESULT, CHECKPOINTS = "config.toml", "log.jsonl", "result.json", "checkpoints"
REPORT, PAGE = "report.md", "report.html"
PLAN, TABLES = "study.json", ("table.md", "table.tex", "table.json")
"""Written by a study beside its runs."""
TRACKERS, TENSORBOARD = "trackers.json", "tensorboard"
"""Written with --log."""
LANDSCAPE = "landscape.json"
BESIDE = (LANDSCAPE, "flatness.json")
"""Written by other commands beside the above."""
