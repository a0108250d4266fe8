"""Runs the lint rules on a plan or profile, filters allowed findings, and renders the page of all rules."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from spanax.check.finding import Finding, Severity, most_severe_first
from spanax.check.lint import arrays, compiled, costs, mesh_axes, programs
from spanax.check.lint.subject import LintSubject, Message
from spanax.check.profile import StepProfile
from spanax.check.report import Report
from spanax.errors import UnknownNameError, nearest
from spanax.hardware.cluster import Cluster
from spanax.plan.place import in_variant
from spanax.plan.plan import Plan
from spanax.trace.program import Program

ALLOW_COMMENT = re.compile(r"#\s*spanax:\s*allow\s+(SPX\d+)(?:\s+([^\s#]+))?")


T = TypeVar("T")


@dataclass(frozen=True)
class Rule(Generic[T]):
    """A lint rule on a plan (`LintSubject`) or on a profile (`StepProfile`).

    Attributes:
      code: the permanent code, such as `SPX001`.
      severity: the severity of its findings, unless a message is marked as an error.
      find: yields the problems; its docstring says when a problem is reported.
      why: the cost of the problem.
    """

    code: str
    severity: Severity
    find: Callable[[T], Iterable[Message]]
    why: str


RULES: tuple[Rule[LintSubject], ...] = (
    Rule("SPX001", Severity.WARNING, arrays.large_replicated_array, "Every device stores and updates a full copy."),
    Rule("SPX002", Severity.ERROR, mesh_axes.idle_mesh_axis, "The additional devices do not make the step faster."),
    Rule("SPX003", Severity.WARNING, compiled.redundant_computation, "Devices repeat the work of other devices."),
    Rule(
        "SPX004",
        Severity.WARNING,
        arrays.optimizer_less_sharded,
        "The optimizer state is the larger part of the state, so sharding only the parameters saves little.",
    ),
    Rule("SPX005", Severity.WARNING, arrays.ineffective_annotation, "The program does not run as annotated."),
    Rule("SPX006", Severity.WARNING, arrays.indivisible_dim, "Arrays with this dim are replicated along the axis."),
    Rule("SPX007", Severity.WARNING, mesh_axes.few_microbatches, "Stages idle while the pipeline fills and drains."),
    Rule("SPX008", Severity.WARNING, mesh_axes.slow_links, "The devices wait for the network."),
    Rule("SPX009", Severity.INFO, costs.data_parallel_faster, "Sharding a state that fits adds communication."),
    Rule("SPX010", Severity.INFO, costs.hsdp_faster, "The slow links between nodes carry the all-gathers."),
    Rule("SPX011", Severity.INFO, costs.pipeline_not_needed, "The pipeline bubble costs more than sharding the state."),
    Rule("SPX012", Severity.WARNING, compiled.replicated_by_xla, "Every device receives and stores a full copy."),
    Rule("SPX013", Severity.INFO, programs.unrolled_layers, "Compile time grows with the number of layers."),
    Rule(
        "SPX014",
        Severity.WARNING,
        costs.insufficient_memory,
        "The run may fail with an out-of-memory error, in its first step or hours later.",
    ),
    Rule("SPX015", Severity.WARNING, costs.optimizer_memory, "Adam stores two moments per parameter."),
    Rule("SPX016", Severity.WARNING, compiled.unplanned_activation_transfers, "The excess communication takes time."),
    Rule("SPX017", Severity.WARNING, programs.float32_matmuls, "The matrix units are built for bfloat16."),
    Rule("SPX020", Severity.ERROR, mesh_axes.batch_and_weights_on_one_axis, "One of them is gathered at every use."),
    Rule("SPX021", Severity.ERROR, programs.no_gradient, "The run takes steps but trains nothing."),
    Rule(
        "SPX022",
        Severity.WARNING,
        programs.partial_gradient,
        "Their optimizer state takes memory, and weight decay shrinks them.",
    ),
    Rule("SPX023", Severity.WARNING, programs.batch_ignored, "Training on more data has no effect."),
    Rule("SPX024", Severity.WARNING, programs.constant_random_key, "Dropout drops the same activations in every step."),
    Rule(
        "SPX025",
        Severity.INFO,
        programs.unused_parameters,
        "Their optimizer state takes memory, and weight decay shrinks them.",
    ),
    Rule("SPX026", Severity.WARNING, programs.replicated_kernels, "Every device gathers its operands and computes it."),
)
"""The rules on a plan, sorted by code."""

PROFILE_RULES: tuple[Rule[StepProfile], ...] = (
    Rule("SPX018", Severity.WARNING, costs.host_bound, "Faster devices would not make the step faster."),
    Rule("SPX019", Severity.WARNING, costs.input_bound, "The devices are idle while they wait."),
)
"""The rules on a profile, sorted by code."""


def lint(program: Program, plan: Plan, cluster: Cluster, report: Report | None = None) -> list[Finding]:
    """Returns the findings of all rules on a plan, most severe first.

    Args:
      program: the traced program.
      plan: a plan for it.
      cluster: the devices of the plan.
      report: the report of `spanax.check`; without it, rules on the compiled program report nothing.

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
      >>> [finding.code for finding in lint(program, spanax.plan(program, machine, layout="data"), machine)]
      ['SPX017']
    """
    subject = LintSubject(in_variant(program, plan), plan, cluster, report)
    return most_severe_first(_finding(rule, message) for rule in RULES for message in rule.find(subject))


def lint_profile(profile: StepProfile) -> list[Finding]:
    """Returns the findings of all rules on a profile, most severe first.

    Example:
      >>> profile = StepProfile(10, 8, 1.0, {"compute": 0.5, "idle": 0.0, "host": 0.0, "input wait": 0.5}, {}, {})
      >>> [finding.message for finding in lint_profile(profile)]
      ['50 % of a step of 1 s is spent waiting for a batch: 0.5 s.']
    """
    return most_severe_first(_finding(rule, message) for rule in PROFILE_RULES for message in rule.find(profile))


def _finding(rule: Rule[LintSubject] | Rule[StepProfile], message: Message) -> Finding:
    severity = Severity.ERROR if message.is_error else rule.severity
    return Finding(rule.code, severity, message.path, message.message, message.fix, message.num_bytes)


def without_allowed(findings: Sequence[Finding], text: str, allow: Sequence[str] = ()) -> list[Finding]:
    """Returns the findings that neither a comment nor the plan allows.

    The comment `# spanax: allow SPX001 embed` allows one finding; without a path, it allows all with that code.

    Args:
      findings: the findings of `lint`.
      text: the source of the workload.
      allow: the entries of the plan, `SPX001 embed` or `SPX001`.

    Raises:
      SpanaxError: an allowed code does not exist.

    Example:
      >>> findings = [Finding("SPX001", Severity.WARNING, "embed", "`embed` is replicated.")]
      >>> without_allowed(findings, "# spanax: allow SPX001 embed")
      []
      >>> len(without_allowed(findings, "# spanax: allow SPX001 head"))
      1
      >>> without_allowed(findings, "", ["SPX001"])
      []
    """
    known = sorted([*(rule.code for rule in RULES), *(rule.code for rule in PROFILE_RULES)])
    by_comment = ALLOW_COMMENT.findall(text)
    by_plan = [(code, path.strip()) for code, _, path in (entry.strip().partition(" ") for entry in allow)]
    for source, codes in (("a comment", by_comment), ("the plan", by_plan)):
        for code, _ in sorted(codes):
            if code not in known:
                raise UnknownNameError(f"{source} allows {code}, but there is no such rule.", fix=nearest(code, known))
    allowed = {*by_comment, *by_plan}
    return [finding for finding in findings if not {(finding.code, ""), (finding.code, finding.path)} & allowed]


def source_text(workload: str) -> str:
    """Returns the text of the file that defines a workload, whose comments may allow findings; else empty.

    Example:
      >>> source_text("gpt2")
      ''
    """
    path = Path(workload.partition(":")[0])
    return path.read_text() if path.suffix == ".py" and path.is_file() else ""
