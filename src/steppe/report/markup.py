"""The parts of the page that need no script: tables, settings, versions, commands. Text from files is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from steppe.report.differences import default_reference, difference_rows
from steppe.report.sections import Section, Variant
from steppe.results.grouping import flat_settings, format_setting
from steppe.results.published import footnotes
from steppe.results.statistics import MeanStd
from steppe.results.tables import TIME_LABELS, VALIDATION_NOTE, Row, format_score, rows
from steppe.runtime.environment import format_machine

MEASURES = {"acc": "ACC", "bwt": "BWT"}


def lede(section: Section) -> str:
    """The introduction of a section: benchmark, methods, tasks and seeds."""
    every = sorted({seed for variant in section.variants for seed in variant.seeds})
    counts = [_counted(len(section.variants), "method"), _counted(len(section.tasks), "task"), _seeds(every)]
    format_machine = f"{_description(section.benchmark)} Here: {', '.join(counts)}.".removeprefix(" Here: ")
    return f"<p class='lede'>{escape(format_machine)}</p>"


def _description(benchmark: str) -> str:
    """A benchmark's description in the catalogue; empty for a plugin's benchmark."""
    pages = json.loads(files("steppe").joinpath("catalogue.json").read_text(encoding="utf-8"))
    first = str(pages.get(benchmark, "")).split("\n", 1)[0]
    return first.partition(": ")[2] if benchmark else ""


def results_table(section: Section) -> str:
    """The table of results: mean ± standard deviation of every method, with published figures."""
    lines = [rows([run.result for run in variant.runs], section.timed_by)[0] for variant in section.variants]
    sources = [source for source in ("paper", "released") if any(getattr(line, source) for line in lines)]
    best, ahead = _best(section.variants, lines), any(line.forward_transfer is not None for line in lines)
    heads = [("here", "here"), ("paper", "paper"), ("released", "its code")]
    kept = [words for source, words in heads if source == "here" or source in sources]
    group = "".join(f"<th scope='colgroup' colspan='{len(kept)}'>{words}</th>" for words in MEASURES.values())
    under = "".join(f"<th scope='col' class='n{' opens' if words == 'here' else ''}'>{words}</th>" for words in kept)
    body = "".join(
        _result_row(variant, line, sources, best, ahead) for variant, line in zip(section.variants, lines, strict=True)
    )
    further = "<th scope='col' rowspan='2' class='n'>forward<br>transfer</th>" if ahead else ""
    return (
        "<div class='scroll' tabindex='0' role='region' aria-label='Results'><table class='results'><thead>"
        "<tr><th scope='col' rowspan='2'>method</th><th scope='col' rowspan='2' class='n'>seeds</th>"
        f"{group}<th scope='col' rowspan='2' class='n opens'>learning<br>accuracy</th>"
        f"<th scope='col' rowspan='2' class='n'>forgetting</th>{further}"
        f"<th scope='col' rowspan='2' class='n'>{TIME_LABELS[section.timed_by]}<br>per run</th></tr>"
        f"<tr>{under * len(MEASURES)}</tr></thead><tbody>{body}</tbody></table></div>"
        f"<p class='note'>{' '.join([_table_note(section, sources, ahead), *footnotes(body)])}</p>"
    )


def _result_row(variant: Variant, line: Row, sources: Sequence[str], best: Mapping[str, Row], ahead: bool) -> str:
    cells = [_cell(str(len(line.seeds)))]
    for measure in MEASURES:
        own = format_number(getattr(line, measure))
        cells.append(_cell(f"<b>{own}</b>" if best.get(measure) is line else own, "n opens"))
        cells += [_cell(format_number(getattr(line, source).get(measure)), "n quoted") for source in sources]
    cells += [_cell(format_number(line.learning_acc), "n opens"), _cell(format_number(line.forgetting))]
    cells += [_cell(format_number(line.forward_transfer))] if ahead else []
    cells.append(_cell("" if line.seconds is None else f"{line.seconds.mean:.0f}"))
    return f"<tr><th scope='row'>{escape(variant.label)}</th>{''.join(cells)}</tr>"


def _best(variants: Sequence[Variant], lines: Sequence[Row]) -> dict[str, Row]:
    """The best row of each measure among methods that learn sequentially, if there are several."""
    found = {}
    in_order = [
        line
        for variant, line in zip(variants, lines, strict=True)
        if line.bwt is not None and variant.runs[0].result.is_sequential
    ]
    for measure in MEASURES:
        able = [line for line in in_order if getattr(line, measure) is not None]
        if len(able) > 1:
            found[measure] = max(able, key=lambda line: getattr(line, measure).mean)
    return found


def _table_note(section: Section, sources: Sequence[str], ahead: bool) -> str:
    several = any(len(variant.seeds) > 1 for variant in section.variants)
    words = ["Percent, mean ± standard deviation over seeds. " if several else "Percent, of one seed. "]
    words.append("ACC: mean accuracy over all tasks at the end. BWT: mean change on earlier tasks since each was ")
    words.append("learned (over T − 1 tasks). ")
    if ahead:
        words.append("Forward transfer: mean accuracy on a task before it is learned, minus the untrained network’s. ")
    if sources:
        quoted = {
            "paper": "paper: the figures of the FS-DGPM paper",
            "released": "its code: its released code, run again",
        }
        words.append("; ".join(quoted[source] for source in sources) + " (± over 5 seeds). ")
    results = [run.result for variant in section.variants for run in variant.runs]
    if any(result.on_validation for result in results):
        words.append(f"<b>{VALIDATION_NOTE}</b> ")
    if any(not (result.is_canonical or result.on_validation) for result in results):
        words.append("Tasks or training differ from the benchmark’s own, so published figures do not apply. ")
    if len(section.variants) > 1:
        words.append("Bold: the best sequential method.")
    return "".join(words)


def differences(section: Section) -> str:
    """Every method compared with a reference, once for each reference; the script shows one of them."""
    if len(section.variants) < 2:
        return ""
    chosen = default_reference(section)
    options = "".join(
        f"<option value='{place}'{' selected' if place == chosen else ''}>{escape(variant.label)}</option>"
        for place, variant in enumerate(section.variants)
    )
    bodies = "".join(
        f"<tbody data-reference='{place}'{'' if place == chosen else ' hidden'}>"
        + "".join(
            f"<tr><th scope='row'>{escape(line.label)}</th>" + "".join(_cell(text) for text in line.cells()) + "</tr>"
            for line in difference_rows(section, place)
        )
        + "</tbody>"
        for place in range(len(section.variants))
    )
    heads = "".join(
        f"<th scope='col' class='n opens'>Δ {words}</th><th scope='col' class='n'>p</th>"
        f"<th scope='col' class='n'>n</th>"
        for words in MEASURES.values()
    )
    name = escape(section.variants[chosen].label)
    return (
        "<section class='part' data-part='differences'><h3>Are the differences real?</h3>"
        "<div class='controls'><label class='scripted'>compare with "
        f"<select data-role='reference'>{options}</select></label>"
        f"<span class='unscripted'>compared with {name}</span></div>"
        "<div class='scroll' tabindex='0' role='region' aria-label='Differences'><table class='differences'>"
        f"<thead><tr><th scope='col'>method</th>{heads}</tr></thead>{bodies}</table></div>"
        "<p class='note'>Δ: method minus reference, in percentage points. p: two-sided t-test, paired over the n seeds "
        "they share (Welch’s test if they share fewer than two: n | m), with Holm’s correction for the comparisons "
        "in the column. Bold: p below 0.05.</p></section>"
    )


def settings(section: Section) -> str:
    """Settings that differ from the presets, then all settings, folded."""
    every = [variant.changes for variant in section.variants]
    shared = {key: value for key, value in every[0].items() if all(each.get(key) == value for each in every)}
    changed = [("tasks", section.changes), ("all methods" if len(every) > 1 else section.variants[0].label, shared)]
    for variant in section.variants:
        changed.append((variant.label, {key: value for key, value in variant.changes.items() if key not in shared}))
    differing = [f"<li><b>{escape(name)}</b>: {_assigned(changes)}</li>" for name, changes in changed if changes]
    front = (
        f"<ul class='plain'>{''.join(differing)}</ul>"
        if differing
        else "<p>All settings are the presets of this benchmark.</p>"
    )
    return (
        f"<section class='part'><h3>Settings</h3>{front}"
        f"<details><summary>All settings</summary>{_all_settings(section)}</details></section>"
    )


def _assigned(values: Mapping[str, Any]) -> str:
    return ", ".join(f"<code>{escape(key)}={escape(format_setting(value))}</code>" for key, value in values.items())


def _all_settings(section: Section) -> str:
    first = section.variants[0].runs[0].result.config
    blocks = [_settings_block("tasks", flat_settings(first, ("benchmark",)))]
    blocks += [
        _settings_block(variant.label, flat_settings(variant.runs[0].result.config, ("training", "method")))
        for variant in section.variants
    ]
    return f"<div class='settings'>{''.join(blocks)}</div>"


def _settings_block(name: str, values: Mapping[str, Any]) -> str:
    lines = "".join(f"<dt>{escape(key)}</dt><dd>{escape(format_setting(value))}</dd>" for key, value in values.items())
    return f"<div><h4>{escape(name)}</h4><dl>{lines}</dl></div>"


def left_out(unfinished: Sequence[str], damaged: Sequence[str]) -> str:
    """The names of the runs that are not on the page."""
    kinds = {"Left out, since they are unfinished": unfinished, "Left out, since their results cannot be read": damaged}
    return "".join(f"<p class='note'>{kind}: {escape(', '.join(names))}.</p>" for kind, names in kinds.items() if names)


def provenance(section: Section) -> str:
    """Remarks, commands, versions and machines."""
    runs = [run for variant in section.variants for run in variant.runs]
    remarks = "".join(f"<li>{escape(remark[:1].upper() + remark[1:])}</li>" for remark in section.remarks)
    commands = "\n".join(dict.fromkeys(run.result.command for run in runs))
    studies = "\n".join(dict.fromkeys(study.command for study in section.studies))
    shown = f"<pre>{escape(studies)}</pre>" if studies else ""
    folded = f"<pre>{escape(commands)}</pre>"
    if studies or len(runs) > 5:
        folded = f"<details><summary>The {_counted(len(runs), 'run')} one by one</summary>{folded}</details>"
    versions = [_named(run.result.versions) for run in runs]
    machines = [escape(format_machine(run.result.machine)) for run in runs]
    return (
        (f"<section class='part'><h3>Remarks</h3><ul>{remarks}</ul></section>" if remarks else "")
        + f"<section class='part'><h3>How to repeat it</h3>{shown}{folded}</section>"
        + f"<section class='part'><h3>Versions and machine</h3>{_each_once(versions)}{_each_once(machines)}</section>"
    )


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{escape(str(name))} <code>{escape(str(value))}</code>" for name, value in values.items())


def _each_once(found: Sequence[str]) -> str:
    """One line for each different text, with the number of its runs if there are several lines."""
    unique = dict.fromkeys(found)
    lines = [
        f"<li>{line}" + (f" ({_counted(found.count(line), 'run')})" if len(unique) > 1 else "") + "</li>"
        for line in unique
    ]
    return f"<ul class='plain'>{''.join(lines)}</ul>"


def format_number(score: MeanStd | None) -> str:
    """Mean ± standard deviation with proper minus signs."""
    return format_score(score).replace("-", "−")


def _cell(text: str, kind: str = "n") -> str:
    return f"<td class='{kind}'>{text}</td>"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) == 2:
        return f"seeds {seeds[0]} and {seeds[1]}"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"
