"""Private names: only `spanax.compat` uses them, all exist in this JAX, and no public name replaces one."""

import ast
import io
import re
from pathlib import Path

import jax
import jax.extend
import numpy as np
import pytest
import tyro

from spanax import compat

PACKAGE = Path(compat.__file__).parent
PRIVATE = re.compile(r"\bjax\._src\b|\bjaxlib\b|\btyro\._|\bthreading\._")


def private_names(root: Path) -> list[str]:
    """Returns the imports of private modules, and the private attributes, of every module but `compat`."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute) else ""
            if path.name != "compat.py" and PRIVATE.search(text):
                problems.append(f"{path.relative_to(root)}:{node.lineno}: {text}")
    return problems


def test_only_one_module_uses_private_names(tmp_path: Path) -> None:
    assert private_names(PACKAGE) == []
    (tmp_path / "a.py").write_text("def f():\n    from jax._src import mesh\nx = threading._register_atexit\n")
    assert len(private_names(tmp_path)) == 2


def test_every_private_name_exists() -> None:
    assert compat.coordination().client is None
    assert isinstance(compat.has_backend(), bool)
    assert {"SlurmCluster", "K8sCluster", "GceTpuCluster", "GkeTpuCluster"} <= set(compat.cluster_kinds())
    cudnn = compat.cudnn_attention()
    assert {"_dot_product_attention_fwd_impl", "_dot_product_attention_bwd_impl", "MaskType"} <= set(dir(cudnn))
    with compat.ir_context():
        assert compat.pass_manager("builtin.module(canonicalize)") is not None
    assert "ansi_codes" in tyro._experimental_options
    with compat.unsharded_tracers():
        assert jax.make_jaxpr(lambda x: x if hasattr(x, "sharding") else 2 * x)(1.0).eqns


@pytest.mark.usefixtures("devices")
def test_a_serialized_module_compiles() -> None:
    program = jax.jit(lambda x: x + 1).lower(np.float32(0)).compiler_ir("stablehlo")
    file = io.BytesIO()
    program.operation.write_bytecode(file)
    executable = compat.compiled(file.getvalue(), np.array(jax.devices()[:1]), {})
    assert executable.hlo_modules()


def test_no_public_name_replaces_a_private_one() -> None:
    # A new name may replace a private one: if it does, use it, else add it here.
    published = {name for name in dir(jax.distributed) if not name.startswith("_")}
    assert published == {"initialize", "is_initialized", "shutdown"}
    assert not [name for name in dir(jax.extend.backend) if "initialized" in name or "collectives" in name]
    assert not [name for name in dir(tyro.conf) if "color" in name.lower() or "ansi" in name.lower()]
