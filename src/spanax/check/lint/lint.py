"""Lint: what is wrong with a plan, rule by rule, each with a code that stays."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from spanax.check.finding import Finding, Severity, gravest_first
from spanax.check.lint import arrays, compiled, costs, mesh_axes, profiles, programs, training
from spanax.check.lint.message import Message
from spanax.check.lint.subject import LintSubject
from spanax.check.measure.profile import StepProfile
from spanax.check.report import Report
from spanax.errors import SpanaxError, nearest
from spanax.hardware.cluster import Cluster
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import in_forms
from spanax.trace.program import Program

WAIVER = re.compile(r"#\s*spanax:\s*allow\s+(SPX\d+)(?:\s+([^\s#]+))?")


PAGE_HEAD = """# Lint: what `spanax check` says of a plan

Every finding names the array or axis, its bytes on one device, and the nearest thing that works. `--fail-on warning`
exits 1 where one is as grave. In the file of a workload `# spanax: allow SPX001 embed` allows one; without a path it
allows all of that code. In a plan file, `"allow": ["SPX001 embed"]` says the same. This page is written from the rules:
`make golden`.
"""


T = TypeVar("T")


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One thing that can be wrong: its code, how much it weighs, and the function that looks for it.

    It inspects a plan (`LintSubject`) or a profile (`StepProfile`). The docstring of the function says when it reports;
    `why` is the cost.
    """

    code: str
    severity: Severity
    find: Callable[[T], Iterable[Message]]
    why: str


RULES: tuple[Rule[LintSubject], ...] = (
    Rule("SPX001", Severity.WARNING, arrays.large_replicated, "Every device holds all of it, and updates all of it."),
    Rule("SPX002", Severity.ERROR, mesh_axes.idle_axis, "Devices are paid for and add nothing."),
    Rule("SPX003", Severity.WARNING, compiled.repeated_work, "Arithmetic that others do as well."),
    Rule("SPX004", Severity.WARNING, arrays.optimizer_unlike_parameter,
         "The optimizer is the larger part of the state: split parameters alone save little."),
    Rule("SPX005", Severity.WARNING, arrays.never_matched, "What was asked for is not what runs."),
    Rule("SPX006", Severity.WARNING, arrays.does_not_divide, "What does not divide stays whole."),
    Rule("SPX007", Severity.WARNING, mesh_axes.few_microbatches, "Stages wait for the first microbatch to come."),
    Rule("SPX008", Severity.WARNING, mesh_axes.slow_links, "The devices wait for the network."),
    Rule("SPX009", Severity.INFO, costs.data_parallel_faster, "Splitting a state that fits moves bytes for nothing."),
    Rule("SPX010", Severity.INFO, costs.hsdp_missed, "Weights cross slow links that need not."),
    Rule("SPX011", Severity.INFO, costs.pipeline_not_needed, "A bubble, where splitting the state is enough."),
    Rule("SPX012", Severity.WARNING, compiled.replicated_by_xla, "Every device receives and holds all of it."),
    Rule("SPX013", Severity.INFO, programs.written_out, "Compile time grows with every layer."),
    Rule("SPX014", Severity.WARNING, costs.short_of_memory, "It may stop at the first step, or after hours."),
    Rule("SPX015", Severity.WARNING, costs.state_forgotten, "Adam holds two more numbers for each parameter."),
    Rule("SPX016", Severity.WARNING, compiled.unplanned_activations, "The compiler moves what no layout asked for."),
    Rule("SPX017", Severity.WARNING, programs.wide_matmuls, "The matrix units are made for bfloat16."),
    Rule("SPX020", Severity.ERROR, mesh_axes.batch_and_weights, "One of both is gathered at every use."),
    Rule("SPX021", Severity.ERROR, training.no_gradient, "The run takes its steps and trains nothing."),
    Rule("SPX022", Severity.WARNING, training.no_gradient_in_part,
         "Their moments take memory, and weight decay shrinks them."),
    Rule("SPX023", Severity.WARNING, training.batch_ignored, "More data changes nothing."),
    Rule("SPX024", Severity.WARNING, training.same_random_numbers, "Dropout always drops the same activations."),
    Rule("SPX025", Severity.INFO, training.unused_parameters,
         "Their moments take memory, and weight decay shrinks them."),
)  # fmt: skip
"""Every rule on a plan, by code."""

PROFILE_RULES: tuple[Rule[StepProfile], ...] = (
    Rule("SPX018", Severity.WARNING, profiles.host_bound, "Faster devices would change nothing."),
    Rule("SPX019", Severity.WARNING, profiles.input_bound, "The devices are paid for while they wait."),
)
"""Every rule on a profile, by code."""


def lint(program: Program, plan: Plan, cluster: Cluster, report: Report | None = None) -> list[Finding]:
    """What every rule says of a plan, the gravest first. Rules on compiled programs need a report.

    Args:
      program: what `spanax.trace` returned.
      plan: what `spanax.plan` returned for it.
      cluster: the devices it was planned for.
      report: what `spanax.check` said of it.

    Raises:
      SpanaxError: the plan was made for another program.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(1024, 1024, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((4096, 1024), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ...     compute_dtype="float32",
      ... )
      >>> machine = spanax.cluster("h100:8")
      >>> [one.code for one in lint(program, spanax.plan(program, machine, layout="data"), machine)]
      ['SPX017']
    """
    checked = LintSubject(in_forms(program, plan), plan, cluster, report)
    return gravest_first(_finding(rule, said) for rule in RULES for said in rule.find(checked))


def lint_profile(found: StepProfile) -> list[Finding]:
    """What every rule says of a profile, the gravest first.

    Example:
      >>> watched = Profiled(10, 8, 1.0, 0.4, 0.1, {}, 0.5, 0.0, 0.0, {})
      >>> [one.message for one in lint_profile(watched)]
      ['50 % of a step of 1 s is waiting for a batch: 0.5 s.']
    """
    return gravest_first(_finding(rule, said) for rule in PROFILE_RULES for said in rule.find(found))


def _finding(rule: Rule[LintSubject] | Rule[StepProfile], said: Message) -> Finding:
    severity = Severity.ERROR if said.is_error else rule.severity
    return Finding(rule.code, severity, said.path, said.message, said.fix, said.num_bytes)


def waived(findings: Sequence[Finding], text: str, allow: Sequence[str] = ()) -> list[Finding]:
    """The findings without those that a comment or the plan allows.

    A comment is `# spanax: allow SPX001 embed`; without a path it allows all of that code.

    Args:
      findings: what `lint` returned.
      text: the source of the workload.
      allow: what the plan allows, `SPX001 embed` or `SPX001` each.

    Raises:
      SpanaxError: a code that does not exist is allowed.

    Example:
      >>> found = [Finding("SPX001", Severity.WARNING, "embed", "it lies whole.")]
      >>> waived(found, "# spanax: allow SPX001 embed"), len(waived(found, "# spanax: allow SPX001 head"))
      ([], 1)
      >>> waived(found, "", ["SPX001"])
      []
    """
    known = [rule.code for rule in _all_rules()]
    by_comment = WAIVER.findall(text)
    by_plan = [(code, path.strip()) for code, _, path in (one.strip().partition(" ") for one in allow)]
    for who, codes in (("a comment", by_comment), ("the plan", by_plan)):
        for code, _ in sorted(codes):
            if code not in known:
                raise SpanaxError(f"{who} allows {code}, and there is no such rule.", fix=nearest(code, known))
    allowed = {*by_comment, *by_plan}
    return [one for one in findings if not {(one.code, ""), (one.code, one.path)} & allowed]


def rules_page() -> str:
    """The page of all rules, in Markdown: code, severity, what each looks for and what it costs."""
    parts = [PAGE_HEAD]
    for rule in _all_rules():
        says = " ".join((rule.find.__doc__ or "").split())
        parts.append(
            f"## {rule.code}: {rule.find.__name__.replace('_', ' ')}\n\n*{rule.severity.value}.* {says} {rule.why}\n"
        )
    return "\n".join(parts)


def _all_rules() -> list[Rule[LintSubject] | Rule[StepProfile]]:
    return sorted((*RULES, *PROFILE_RULES), key=lambda rule: rule.code)
