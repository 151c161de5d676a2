"""The names of files in run and study directories."""

CONFIG, LOG, RESULT, CHECKPOINTS = "config.toml", "log.jsonl", "result.json", "checkpoints"
REPORT, PAGE = "report.md", "report.html"
PLAN, TABLES = "study.json", ("table.md", "table.tex", "table.json")
"""What a study writes beside its runs."""
BESIDE = ("landscape.json", "flatness.json")
"""What other commands write there."""
