"""The names of files in run and study directories."""

CONFIG, LOG, RESULT, CHECKPOINTS = "config.toml", "log.jsonl", "result.json", "checkpoints"
REPORT, PAGE = "report.md", "report.html"
PLAN, TABLES = "study.json", ("table.md", "table.tex", "table.json")
"""Written by a study beside its runs."""
SEARCH, JOURNAL, TRIALS, BEST = "search.json", "journal.log", ("trials.md", "trials.json"), "best.toml"
"""Written by a search: its plan, Optuna's journal, the tables of its trials, the configuration of the best one."""
TRACKERS, TENSORBOARD = "trackers.json", "tensorboard"
"""Written with --log."""
LANDSCAPE = "landscape.json"
BESIDE = (LANDSCAPE, "flatness.json")
"""Written by other commands beside the above."""
