"""Checks that files differ from a commit only in docstrings, comments, and names of local variables and parameters.

`python renames/same_program.py [--strings] [--names] [COMMIT] [PATH...]` prints each other difference and exits with 1
if there are any. Within each function the old and the new local names must correspond one to one. With `--strings`,
texts may differ as well, and with `--names`, names of modules, classes and attributes; both are printed for review.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree without statements that are only a string."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not is_text(each)] or [ast.Pass()]
    return tree


def bound(scope: ast.AST) -> set[str]:
    """The names that a scope binds, without those of scopes inside."""
    bound_names: set[str] = set()
    outer: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            bound_names.add(node.id)
        elif isinstance(node, ast.arg):
            bound_names.add(node.arg)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            outer.update(node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound_names.add(node.name)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            bound_names.add(node.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound_names.add(node.name)
        for child in ast.iter_child_nodes(node):
            if isinstance(node, SCOPES) and node is not scope:
                continue
            visit(child)

    visit(scope)
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        bound_names.discard(scope.name)
    return bound_names - outer


class Difference(Exception):
    pass


STRINGS, NAMES = "--strings" in sys.argv, "--names" in sys.argv
texts: list[tuple[str, str]] = []
names: dict[str, str] = {}
IDENTIFIERS = {
    (ast.Name, "id"), (ast.Attribute, "attr"), (ast.keyword, "arg"), (ast.arg, "arg"), (ast.FunctionDef, "name"),
    (ast.ClassDef, "name"), (ast.alias, "name"), (ast.ImportFrom, "module"),
}  # fmt: skip


def is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def compare(old: ast.AST, new: ast.AST, scopes: list[tuple[set[str], set[str], dict[str, str]]]) -> None:
    """Raises Difference at the first place where the trees are not the same program."""
    if STRINGS and is_str(old) and is_str(new):
        texts.append((ast.unparse(old), ast.unparse(new)))
        return
    if type(old) is not type(new):
        raise Difference(f"line {getattr(new, 'lineno', '?')}: {type(old).__name__} became {type(new).__name__}")
    if isinstance(old, SCOPES):
        scopes = [*scopes, (bound(old), bound(new), {})]
    for (field, before), (_, after) in zip(ast.iter_fields(old), ast.iter_fields(new), strict=True):
        is_name = (isinstance(old, ast.Name) and field == "id") or (isinstance(old, ast.arg) and field == "arg")
        is_name |= isinstance(old, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and field == "name"
        is_name |= isinstance(old, ast.FunctionDef) and field == "name" and len(scopes) > 1
        if NAMES and (type(old), field) in IDENTIFIERS:
            if before != after:
                names[str(before)] = str(after)
        elif is_name and before is not None:
            same_name(before, after, scopes[:-1] if isinstance(old, ast.FunctionDef) else scopes, new)
        elif field in ("type_comment", "kind", "type_ignores"):
            continue
        elif isinstance(before, list):
            if len(before) != len(after):
                raise Difference(
                    f"line {getattr(new, 'lineno', '?')}: {field} of {type(old).__name__} has another length"
                )
            for one, other in zip(before, after, strict=True):
                compare(one, other, scopes) if isinstance(one, ast.AST) else same(one, other, new)
        elif isinstance(before, ast.AST):
            compare(before, after, scopes)
        else:
            same(before, after, new)


def same(before: object, after: object, new: ast.AST) -> None:
    if before != after or type(before) is not type(after):
        raise Difference(f"line {getattr(new, 'lineno', '?')}: {before!r} became {after!r}")


def same_name(before: str, after: str, scopes: list[tuple[set[str], set[str], dict[str, str]]], new: ast.AST) -> None:
    for old_names, new_names, mapping in reversed(scopes):
        if before in old_names or after in new_names:
            if before not in old_names or after not in new_names:
                raise Difference(f"line {new.lineno}: {before!r} became {after!r}, which another scope binds")
            known = mapping.setdefault(before, after)
            if known != after or list(mapping.values()).count(after) > 1:
                raise Difference(
                    f"line {new.lineno}: {before!r} became {after!r}, and {known!r} or another name elsewhere"
                )
            return
    if before != after:
        raise Difference(f"line {new.lineno}: {before!r} became {after!r}, which is not local")


def main() -> int:
    args = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    commit = args[0] if args else "HEAD"
    changed = subprocess.run(
        ["git", "diff", "--name-only", commit, "--", *(args[1:] or ["src"])],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    bad = 0
    for file in changed:
        if not file.endswith(".py") or not (ROOT / file).exists():
            continue
        before = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True, text=True)
        if before.returncode:
            continue
        trees = [without_docstrings(ast.parse(text)) for text in (before.stdout, (ROOT / file).read_text())]
        try:
            compare(*trees, [])
        except Difference as difference:
            bad += 1
            print(f"{file}: {difference}")
    for before, after in texts:
        if before != after:
            print(f"- {before}\n+ {after}")
    for before, after in names.items():
        print(f"{before} -> {after}")
    print(f"{len(changed)} files changed, {bad} are not the same program")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
