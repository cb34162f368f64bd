"""The shadowing guard, in this process: what it accepts and what it names."""

from __future__ import annotations

import sys

import pytest

from moeserve.layout import PACKAGES, ShadowedPackage, check_layout


def test_the_five_lie_beside_each_other():
    check_layout()


def test_importing_the_guard_imports_nothing_of_ours():
    import subprocess

    code = "import sys, moeserve.layout; print([m for m in sys.modules if m.split('.')[0] in %r])"
    code %= (set(PACKAGES) - {"moeserve"},)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["models", "dispatch", "ep", "launch"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_shadowing_file_or_folder_is_named(tmp_path, monkeypatch, name, form):
    foreign = tmp_path / form.format(name)
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ShadowedPackage, match=str(foreign)):
        check_layout()


def test_a_folder_without_init_shadows_nothing(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()  # a namespace package loses against a regular one
    monkeypatch.syspath_prepend(str(tmp_path))
    check_layout()


def test_a_module_put_in_place_of_ours_is_named(monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "ep", types.ModuleType("ep"))
    with pytest.raises(ShadowedPackage, match="ep: not found"):
        check_layout()
