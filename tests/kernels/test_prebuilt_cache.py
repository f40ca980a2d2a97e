"""The folder of compiled kernels: which files an entry has, where they are, and which folder it is."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from kvferry.kernels import prebuilt_cache
from kvferry.kernels.prebuilt_cache import PrebuiltCache

KEY, NAME = "0123abcd", "_some_kernel.json"
FILES = (NAME, "_some_kernel.cubin", "_some_kernel.ptx")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One kernel as Triton stores it, with the places where it was stored, which there are no more."""
    folder, entry = tmp_path / "prebuilt", tmp_path / "prebuilt" / KEY
    entry.mkdir(parents=True)
    for name in FILES:
        (entry / name).write_text(name)
    stored = {name: f"/where/it/was/compiled/{KEY}/{name}" for name in FILES}
    (entry / f"__grp__{NAME}").write_text(json.dumps({"child_paths": stored}))
    monkeypatch.setattr(PrebuiltCache, "folder", folder)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_an_entry_has_what_triton_stored_and_not_triton_s_own_list_of_it(folder: Path) -> None:
    """Triton takes the first name that ends in .json for the metadata, and its own list's ends so, too."""
    group = PrebuiltCache(KEY).get_group(NAME)
    assert group == {name: str(folder / KEY / name) for name in FILES}
    assert all(Path(path).read_text() == name for name, path in group.items())


def test_files_beside_an_entry_s_are_not_of_it(folder: Path) -> None:
    (folder / KEY / "lock").write_text("")
    (folder / KEY / "_another_kernel.json").write_text("{}")
    assert set(PrebuiltCache(KEY).get_group(NAME) or ()) == set(FILES)


def test_a_kernel_without_a_list_is_not_there(folder: Path) -> None:
    assert PrebuiltCache(KEY).get_group("_another_kernel.json") is None


def test_what_is_not_in_the_folder_is_in_triton_s_cache(folder: Path, tmp_path: Path) -> None:
    cache = PrebuiltCache("4567cdef")
    path = cache.put("text", NAME, binary=False)
    cache.put_group(NAME, {NAME: path})
    assert Path(path).parent.parent == tmp_path / "cache"
    assert cache.get_group(NAME) == {NAME: path}
    assert sorted(entry.name for entry in folder.iterdir()) == [KEY]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/carried/kernels", Path("/carried/kernels")), ("", Path(sys.prefix, "share", "kvferry", "triton"))],
)
def test_a_variable_names_the_folder(variable: str, expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when the module is imported, so the module is run anew."""
    monkeypatch.setenv("TRITON_PREBUILT_DIR", variable)
    made = runpy.run_path(str(prebuilt_cache.__file__))
    assert made["PREBUILT_FOLDER"] == expected
    assert made["PrebuiltCache"].folder == expected
