"""Renames symbols and attributes as `names.txt` lists them, by scope: a local of the same name stays."""

import re
import sys
from collections import defaultdict
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, QualifiedNameSource

ROOT = Path(__file__).resolve().parent.parent


def read() -> tuple[dict[str, str], dict[str, str]]:
    """Qualified names to new names, and attributes to new names."""
    symbols, attributes = {}, {}
    for row in (Path(__file__).parent / "names.txt").read_text().splitlines():
        if row and not row.startswith("#"):
            module, old, new = row.split()
            if module == ".":
                attributes[old] = new
            else:
                symbols[f"spanax.{module.replace('/', '.')}.{old}"] = new
    return symbols, attributes


class Rename(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, module: str, symbols: dict[str, str], attributes: dict[str, str], near: dict[str, str]):
        self.module, self.symbols, self.attributes = module, symbols, attributes
        self.classes = 0
        self.short: dict[str, set[str]] = defaultdict(set)
        for name, new in near.items():
            self.short[name.rpartition(".")[2]].add(new)

    def _new(self, node: cst.CSTNode) -> str | None:
        for name in self.get_metadata(QualifiedNameProvider, node, set()):
            full = name.name if name.source == QualifiedNameSource.IMPORT else f"{self.module}.{name.name}"
            if full in self.symbols:
                return self.symbols[full]
        return None

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.classes += 1

    def leave_ClassDef(self, node: cst.ClassDef, updated: cst.ClassDef) -> cst.ClassDef:
        self.classes -= 1
        new = self._new(node)
        return updated.with_changes(name=cst.Name(new)) if new else updated

    def leave_FunctionDef(self, node: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        new = self._new(node) or (self.attributes.get(node.name.value) if self.classes else None)
        return updated.with_changes(name=cst.Name(new)) if new else updated

    def leave_Name(self, node: cst.Name, updated: cst.Name) -> cst.Name:
        new = self._new(node)
        return updated.with_changes(value=new) if new else updated

    def leave_Attribute(self, node: cst.Attribute, updated: cst.Attribute) -> cst.Attribute:
        new = self._new(node) or self.attributes.get(node.attr.value)
        return updated.with_changes(attr=cst.Name(new)) if new else updated.with_changes(attr=node.attr)

    def leave_ImportFrom(self, node: cst.ImportFrom, updated: cst.ImportFrom) -> cst.ImportFrom:
        module = cst.helpers.get_full_name_for_node(node.module) if node.module else ""
        if isinstance(updated.names, cst.ImportStar):
            return updated.with_changes(module=node.module)
        names = []
        for alias, old in zip(updated.names, node.names, strict=True):
            new = self.symbols.get(f"{module}.{old.name.value}") if isinstance(old.name, cst.Name) else None
            names.append(alias.with_changes(name=cst.Name(new) if new else old.name, asname=old.asname))
        return updated.with_changes(names=names, module=node.module)

    def leave_Arg(self, node: cst.Arg, updated: cst.Arg) -> cst.Arg:
        if node.keyword is None:
            return updated
        return updated.with_changes(keyword=cst.Name(self.attributes.get(node.keyword.value, node.keyword.value)))

    def leave_AnnAssign(self, node: cst.AnnAssign, updated: cst.AnnAssign) -> cst.AnnAssign:
        if self.classes and isinstance(node.target, cst.Name) and node.target.value in self.attributes:
            return updated.with_changes(target=cst.Name(self.attributes[node.target.value]))
        return updated

    def leave_SimpleString(self, node: cst.SimpleString, updated: cst.SimpleString) -> cst.SimpleString:
        """Annotations in quotes, and names in backticks."""

        def quoted(match: re.Match[str]) -> str:
            new = self.short.get(match[2])
            return (
                f"{match[1]}{next(iter(new))}{match[3]}"
                if new and len(new) == 1 and match[2][0].isupper()
                else match[0]
            )

        text = re.sub(r"(`)(\w+)(`)", quoted, updated.value)
        if re.fullmatch(r'"[\w.|\[\], ]+"', text):
            text = re.sub(r"()\b(\w+)\b()", quoted, text) if len(text) < 60 and self.is_annotation else text
        return updated.with_changes(value=text)

    is_annotation = False

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self.is_annotation = True

    def leave_Annotation(self, node: cst.Annotation, updated: cst.Annotation) -> cst.Annotation:
        self.is_annotation = False
        return updated


def main() -> None:
    symbols, attributes = read()
    modules = {name.rpartition(".")[0] for name in symbols}
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            below = path.relative_to(ROOT / folder).with_suffix("")
            module = below.as_posix().replace("/", ".") if folder == "src" else path.stem
            packages = modules | {name.rpartition(".")[0] for name in modules}
            imports = any(re.search(rf"(?:from|import) {re.escape(name)}\b", text) for name in packages)
            reads = any(re.search(rf"\.{name}\b", text) for name in attributes)
            if module not in modules and not imports and not reads:
                continue
            near = {
                name: new
                for name, new in symbols.items()
                if name.startswith(f"{module}.")
                or re.search(
                    rf"from {re.escape(name.rpartition('.')[0])} import [^)]*?\b{name.rpartition('.')[2]}\b", text
                )
            }
            rename = Rename(module, symbols, attributes, near)
            changed = MetadataWrapper(cst.parse_module(text)).visit(rename).code
            if changed != text:
                path.write_text(changed)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
