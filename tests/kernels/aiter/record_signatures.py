"""Signatures of AITER's native operations, read from its sources; they can be imported only where ROCm is.

    python -m tests.kernels.aiter.record_signatures SOURCES NAME

SOURCES: the folder of the package `aiter`, of a wheel or a checkout. NAME: its release or commit, and the name of the
file in `signatures/`. `inspect` would not do: it sees `*args` alone of what is compiled at its first call.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).with_name("signatures")

OPERATIONS = [
    "aiter.flash_attn_varlen_func",
    "aiter.fused_add_rms_norm_cu",
    "aiter.fused_qk_norm_rope_cache_quant_shuffle",
    "aiter.pa_fwd_asm",
    "aiter.reshape_and_cache",
    "aiter.rms_norm",
    "aiter.rope_cached_positions_2c_fwd_inplace",
    "aiter.silu_and_mul",
    "aiter.tuned_gemm.TunedGemm.mm",
    "aiter.dist.device_communicators.custom_all_reduce.CustomAllreduce.__init__",
    "aiter.dist.device_communicators.custom_all_reduce.CustomAllreduce.custom_all_reduce",
    "aiter.ops.triton.gluon.pa_decode_gluon.pa_decode_gluon",
    "aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits",
]
"""Of what `worker.kernels.aiter` calls by these names."""


def read_signatures(sources: Path) -> dict[str, list[dict[str, Any]]]:
    """Operation → its parameters; without those that these sources do not have."""
    found = {}
    for operation in OPERATIONS:
        function = _find(sources, operation.split(".")[1:])
        if function is not None:
            found[operation] = _parameters(function)
    return found


def _find(sources: Path, path: list[str]) -> ast.FunctionDef | None:
    """By module, then class and function. What is at the top of `aiter` comes from modules that it star-imports."""
    module = sources
    while path and ((module / path[0]).is_dir() or (module / f"{path[0]}.py").is_file()):
        module, path = module / path[0], path[1:]
    files = _star_imports(sources) if module == sources else [module.with_suffix(".py")]
    found = [node for file in files if file.is_file() for node in _walk(ast.parse(file.read_text()), path)]
    return found[-1] if found else None


def _star_imports(sources: Path) -> list[Path]:
    tree = ast.parse((sources / "__init__.py").read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    return [sources / (module.replace(".", "/") + ".py") for module in modules if module]


def _walk(node: ast.AST, path: list[str]) -> list[ast.FunctionDef]:
    inner = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == path[0]]
    if len(path) == 1:
        return [child for child in inner if isinstance(child, ast.FunctionDef)]
    return [function for child in inner for function in _walk(child, path[1:])]


def _parameters(function: ast.FunctionDef) -> list[dict[str, Any]]:
    arguments = function.args
    assert not (arguments.posonlyargs or arguments.vararg or arguments.kwarg), function.name
    without = len(arguments.args) - len(arguments.defaults)
    defaults = [None] * without + list(arguments.defaults)
    parameters = [_parameter(*pair, "any") for pair in zip(arguments.args, defaults, strict=True)]
    parameters += [
        _parameter(*pair, "keyword") for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [parameter for parameter in parameters if parameter["name"] != "self"]


def _parameter(argument: ast.arg, default: ast.expr | None, kind: str) -> dict[str, Any]:
    """Type and default as they are written; a parameter without a default has none in the record."""
    record: dict[str, Any] = {"name": argument.arg, "kind": kind}
    if argument.annotation is not None:
        record["type"] = ast.unparse(argument.annotation).replace("torch.", "")
    if default is not None:
        record["default"] = ast.unparse(default)
    return record


def main() -> None:
    sources, name = Path(sys.argv[1]), sys.argv[2]
    lines = [f"{json.dumps(operation)}: {json.dumps(found)}" for operation, found in read_signatures(sources).items()]
    (SIGNATURES / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
