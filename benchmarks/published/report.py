"""The result of `plan_accuracy.py` in words."""

from typing import Any

HEAD = "{:<46} {:>5} {:>7} {:>7} {:>7} {:>7}".format("", "rows", "MAE %", "median", "P90", "bias")
LINE = "{:<46} {:>5} {:>7.1f} {:>7.1f} {:>7.1f} {:>+7.1f}"
KEYS = ("mae", "median", "p90", "bias")


def table(result: dict[str, Any], worst: int = 8) -> str:
    """Returns the result in words."""
    lines = []
    if "leave_one_out" in result:
        lines += _leave_one_out(result["leave_one_out"], worst)
    lines += ["Step time, rows that the constants of Spanax were not fitted on", HEAD, *_summaries(result["files"])]
    lines += _summaries(
        {"all of them together": result["held_out"], "(the rows that were fitted on)": result["fitted"]}
    )
    lines += _worst([row for row in result["rows"] if not row["fitted"]], worst)
    lines += _ranks(result["ranks"])
    lines += ["", "Memory of one device", HEAD, *_summaries(result["memory"]), "", "Rows that are not expressed"]
    lines += [f"  {count:>5}  {reason}" for reason, count in result["skipped"].items()]
    lines += [f"  {count:>5}  {reason}" for reason, count in result["memory_skipped"].items()]
    lines += ["", f"{len(result['constants'])} fitted constants"]
    line = "  {name:<20} {value:>10.4g}  {fitted_on:<20} {prior:>9.4g}  {source}"
    lines.append("  {:<20} {:>10}  {:<20} {:>9}  {}".format("", "value", "fitted on", "prior", "source of the prior"))
    lines += [line.format(**constant) for constant in result["constants"]]
    return "\n".join(lines)


def _leave_one_out(result: dict[str, Any], worst: int) -> list[str]:
    if "refused" in result:
        return [f"Leave-one-source-out: {result['refused']}", ""]
    lines = ["Step time, each source predicted by constants fitted without it", HEAD, *_summaries(result["sources"])]
    lines += _summaries({"all rows": result["rows"], "XLA rows": result["xla"]})
    lines.append(f"{'mean over sources':<46} {len(result['sources']):>5} {100 * result['mean_over_sources']:>7.1f}")
    lines += _summaries({"(all rows, fitted on all)": result["fitted_on_all"]["rows"]})
    if regret := result["regret"]:
        lines.append(
            f"regret of the first choice: median {100 * regret['median_regret']:.1f} %, worst "
            f"{100 * regret['worst_regret']:.1f} %; best among the first three in "
            f"{100 * regret['top3_holds_best']:.0f} % of {regret['groups']} groups; "
            f"error of the ratio of two plans: median {100 * regret['ratio_error']:.1f} %"
        )
    lines += ["", "By group", HEAD, *_summaries(result["groups"])]
    return [*lines, *_worst(result["predictions"], worst), *_ranks(result["ranks"]), ""]


def _summaries(summaries: dict[str, Any]) -> list[str]:
    return [LINE.format(name, of["rows"], *(100 * of[key] for key in KEYS)) for name, of in summaries.items() if of]


def _worst(rows: list[dict[str, Any]], worst: int) -> list[str]:
    lines = ["", "The worst of them"]
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:worst]:
        times = f"{row['measured']:9.3f} s, predicted {row['predicted']:9.3f} s"
        lines.append(f"  {row['id']:<40} {times}, {100 * row['error']:+5.0f} %")
    return lines


def _ranks(files: dict[str, Any]) -> list[str]:
    lines = ["", "Rank: runs of one model, batch and number of devices, four plans or more"]
    for file, of in files.items():
        lines.append(
            f"  {file}: {of['groups']} groups of {of['plans']} plans; regret of the first choice, median "
            f"{100 * of['median_regret']:.1f} %, mean {100 * of['mean_regret']:.1f} %, worst "
            f"{100 * of['worst_regret']:.1f} %; first is best in {100 * of['first_is_best']:.0f} %, best among the "
            f"first three in {100 * of['top3_holds_best']:.0f} % (at worst {100 * of['top3_worst_regret']:.1f} % off)"
        )
    return lines
