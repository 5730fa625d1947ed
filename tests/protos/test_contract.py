"""The contract keeps its promises: stubs are fresh, nothing released is lost, everything has a comment."""

import subprocess
import sys
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

import fissile.v1

PROTOS = Path(__file__).resolve().parents[2] / "protos"
SOURCES = sorted((PROTOS / "fissile" / "v1").glob("*.proto"))

# Paths of descriptor.proto: file.message_type = 4, .enum_type = 5, .service = 6; message.field = 2, .nested_type = 3,
# .enum_type = 4; enum.value = 2; service.method = 2.
MESSAGE, ENUM, SERVICE, MEMBER = 4, 5, 6, 2


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=PROTOS.parent, env={"PYTHONPATH": "."}, capture_output=True, text=True
    )


def test_stubs_are_up_to_date():
    result = run("protos/generate.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_released_is_changed_or_gone():
    result = run("protos/contract.py")
    assert result.returncode == 0, result.stdout + result.stderr


def test_breaking_change_is_found(monkeypatch):
    monkeypatch.syspath_prepend(str(PROTOS))
    import contract

    without = [line for line in contract.listing() if "Sequence.id " not in line]
    monkeypatch.setattr(contract, "listing", lambda: without)
    assert contract.broken() == ["field fissile.v1.Sequence.id = 1 TYPE_UINT64"]


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> list[FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set"
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [f"--proto_path={PROTOS}", f"--proto_path={well_known}", "--include_source_info"]
    names = [str(path.relative_to(PROTOS)) for path in SOURCES]
    assert protoc.main(["protoc", *arguments, f"--descriptor_set_out={out}", *names]) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def test_everything_has_a_comment(described):
    bare = []
    for file in described:
        commented = {tuple(x.path) for x in file.source_code_info.location if x.leading_comments.strip()}
        groups = [
            (MESSAGE, [(m.name, [f.name for f in m.field]) for m in file.message_type]),
            (ENUM, [(e.name, [v.name for v in e.value]) for e in file.enum_type]),
            (SERVICE, [(s.name, [m.name for m in s.method]) for s in file.service]),
        ]
        for kind, things in groups:
            for i, (name, members) in enumerate(things):
                bare += [name] if (kind, i) not in commented else []
                bare += [f"{name}.{m}" for j, m in enumerate(members) if (kind, i, MEMBER, j) not in commented]
    assert bare == []


def test_enums_have_an_unspecified_zero_and_a_prefix(described):
    for file in described:
        for enum in file.enum_type:
            prefix = "".join("_" + c if c.isupper() else c for c in enum.name).lstrip("_").upper()
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED" and enum.value[0].number == 0
            assert all(value.name.startswith(prefix) for value in enum.value)


def test_other_languages_need_no_flags(described):
    """D12: protoc for Go refuses a file without a package; for Java it would make one file of everything."""
    for file in described:
        options = file.options
        assert options.go_package == "fissile/v1;fissilev1"
        assert (options.java_package, options.java_multiple_files) == ("com.fissile.v1", True)
        assert (options.csharp_namespace, options.objc_class_prefix) == ("Fissile.V1", "FSL")


def test_generated_code_runs_on_old_runtimes():
    """Generated code refuses a runtime older than its generator."""
    package = Path(fissile.v1.__file__).parent
    for path in package.glob("*_pb2.py"):
        assert "# Protobuf Python Version: 6.31.1\n" in path.read_text(), path
    for path in package.glob("*_pb2_grpc.py"):
        assert "GRPC_GENERATED_VERSION = '1.75.0'" in path.read_text(), path
