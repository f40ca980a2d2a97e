"""The C code is compiled once and safely, attends as torch does, and is not used where it is not right."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvtest.native_batches import HEADS, batch_shape
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import CachedRows, NewTokens
from kvferry.kernels.dense_decode.batch import DenseBatch
from kvferry.kernels.native import library as native
from kvferry.kernels.quarantine import quarantined, state

OTHER_UID = 54_321
needs_compiler = pytest.mark.skipif(not native.is_available(), reason="this machine has no C compiler")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / native.CACHE


@needs_compiler
def test_it_is_compiled_once_and_the_file_is_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = native._compiled()
    assert list(home.iterdir()) == [path]
    assert home.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(native, "COMPILERS", ())
    assert native._compiled() == path
    assert native.load(path).kvferry_kinds() & 1


def test_without_a_compiler_there_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(native.NativeUnavailable, match="no C compiler: none of no-such-compiler"):
        native._compiled()


@needs_compiler
def test_a_compiler_that_fails_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-no-such-flag",))
    with pytest.raises(native.NativeUnavailable, match="no-such-flag"):
        native._compiled()
    assert not list(home.iterdir())


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of this machine's levels, the best first."""
    levels = native.LEVELS.get(platform.machine())
    if not levels:
        pytest.skip(f"nothing is prebuilt for {platform.machine()}")
    return dict(zip(levels, native.prebuild(tmp_path_factory.mktemp("prebuilt")), strict=True))


@pytest.fixture
def no_compiler(home: Path, prebuilt: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the prebuilt files, whose folder this is, and no compiler."""
    folder = next(iter(prebuilt.values())).parent
    monkeypatch.setattr(native, "PREBUILT", folder)
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    return folder


@needs_compiler
def test_the_best_prebuilt_file_that_a_processor_can_run_needs_no_compiler(
    no_compiler: Path, prebuilt: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.prebuild(no_compiler) == list(prebuilt.values())
    for level, needed in native.LEVELS[platform.machine()].items():
        shown = repr(("machine", ["model name\t: any", f"flags\t\t: fpu {' '.join(sorted(needed))}"]))
        monkeypatch.setattr(native, "_processor", lambda shown=shown: shown)
        assert native._compiled() == prebuilt[level]
    monkeypatch.setattr(native, "_processor", lambda: "('machine', ['flags : fpu'])")
    with pytest.raises(native.NativeUnavailable, match="no C compiler"):
        native._compiled()


@needs_compiler
def test_what_is_prebuilt_for_this_processor_agrees_with_torch(no_compiler: Path) -> None:
    path = native._compiled()
    assert path.parent == no_compiler
    assert native.load(path).kvferry_kinds() & 1


@needs_compiler
def test_files_that_others_may_have_replaced_are_not_loaded(no_compiler: Path) -> None:
    no_compiler.chmod(0o777)
    try:
        with pytest.raises(native.NativeUnavailable, match="no C compiler"):
            native._compiled()
    finally:
        no_compiler.chmod(0o700)


@pytest.mark.parametrize("place", ["native", "kvferry", ".cache", "home"])
@pytest.mark.parametrize(
    ("mode", "owner", "is_used"),
    [(0o777, 0, False), (0o770, 0, False), (0o1777, 0, True), (0o755, 0, True), (0o755, OTHER_UID, False)],
)
def test_a_folder_that_others_may_change_or_replace_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, mode: int, owner: int, is_used: bool
) -> None:
    if owner and os.getuid():
        pytest.skip("only root gives folders to others")
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "links" / "home"))
    folder = tmp_path / "home" / native.CACHE
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "links" / "home").symlink_to(tmp_path / "home")
    changed = next(path for path in (folder, *folder.parents) if path.name == place)
    changed.chmod(mode)
    if owner:
        os.chown(changed, owner, -1)
    used = native._folder()
    assert (used == folder) == (is_used and not (place == "native" and mode & 0o022))
    assert used.stat().st_uid == os.getuid()
    assert used.stat().st_mode & 0o777 == 0o700 or used == folder


def test_without_a_safe_folder_nothing_is_loaded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    tmp_path.chmod(0o777)
    with pytest.raises(native.NativeUnavailable, match="below a folder that others own or can write to"):
        native._compiled()
    assert not list((tmp_path / "temporary").iterdir())


def test_folders_that_are_made_are_for_this_user_alone(home: Path) -> None:
    umask = os.umask(0)
    try:
        assert native._folder() == home
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (home, home.parent, home.parents[1])] == [0o700] * 3


@needs_compiler
@pytest.mark.parametrize(
    ("file", "right", "wrong", "op"),
    [
        ("attention.h", "sum(sums[r][g]) * scaling", "sum(sums[r][g]) * 1.01f * scaling", "dense_decode"),
        pytest.param(
            "packed.c",
            "(load(to) + lowest[g])",
            "(load(to) + 1.01f * lowest[g])",
            "trizone",
            marks=pytest.mark.full,
        ),
        pytest.param("packed.c", "2 * block + row / 4", "2 * block", "trizone", marks=pytest.mark.full),
        pytest.param(
            "sparse.c",
            "chosen = its.chosen",
            "chosen = its.taken",
            "hsa",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "packed_sparse.c",
            "all->value_minima[",
            "all->value_scales[",
            "packed_hsa",
            marks=pytest.mark.full,
        ),
    ],
)
def test_code_that_does_not_agree_with_torch_is_refused(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    right: str,
    wrong: str,
    op: str,
) -> None:
    folder = Path(shutil.copytree(native.FOLDER, tmp_path / "wrong"))
    code = (folder / file).read_text(encoding="utf-8")
    assert code.count(right) == 1
    (folder / file).write_text(code.replace(right, wrong))
    monkeypatch.setattr(native, "FOLDER", folder)
    with pytest.raises(native.NativeUnavailable, match=rf"computes {op}, .* with an error of .* relative"):
        native.load(native._compiled())


GROUP, CAPACITY = 3, 70


def batch_of(lengths: list[int], head_dim: int) -> tuple[DenseBatch, list[CachedRows], Tensor]:
    """Sequences with so many rows, each in an arena with NaN where there is no row."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    arena = torch.full((len(lengths), 2, HEADS, CAPACITY, head_dim), torch.nan)
    rows = []
    for slot, length in enumerate(lengths):
        arena[slot, :, :, :length] = torch.randn(2, HEADS, length, head_dim, generator=generator)
        rows.append(CachedRows(keys=arena[slot, 0], values=arena[slot, 1], length=length))
    shape = batch_shape(len(lengths), group_size=GROUP, head_dim=head_dim)
    return DenseBatch(shape, arena.view(-1)), rows, arena


def step_of(num_slots: int, head_dim: int, seed: int) -> NewTokens:
    generator = torch.Generator().manual_seed(seed)
    queries = 3 * torch.randn(num_slots, HEADS, GROUP, head_dim, generator=generator)
    keys, values = torch.randn(2, num_slots, HEADS, head_dim, generator=generator)
    return NewTokens(queries, keys, values, head_dim**-0.5)


@needs_compiler
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_steps_of_a_batch_are_torch_s_and_write_its_rows(head_dim: int) -> None:
    lengths = [0, 1, 7, 8, 66]
    batch, rows, arena = batch_of(lengths, head_dim)
    plain, plain_rows, plain_arena = batch_of(lengths, head_dim)
    assert batch.is_launched
    active = torch.tensor([1, 1, 0, 1, 1])
    for each, of_slot in ((batch, rows), (plain, plain_rows)):
        for slot, cached in enumerate(of_slot):
            each.place(slot, {0: cached})
    batch.show(active)
    scratch = batch.scratch(len(lengths))
    for number in range(3):
        step = step_of(len(lengths), head_dim, number)
        output = batch.attend(0, step, errors={}, scratch=scratch)
        expected = plain.attend_slots(0, step, errors={})
        torch.testing.assert_close(output[active > 0], expected[active > 0], rtol=2e-5, atol=2e-6)
        assert not output[2].any()  # not active
        batch.advance(active)
        plain.advance(active)
    written = [slot for slot in range(len(lengths)) if active[slot]]
    torch.testing.assert_close(arena[written], plain_arena[written], equal_nan=True, rtol=0, atol=0)
    assert arena[2, :, :, lengths[2] :].isnan().all()


@needs_compiler
def test_large_scores_and_nan_stay_with_their_sequence() -> None:
    lengths = [20, 20, 20]
    batch, rows, arena = batch_of(lengths, 16)
    alone, alone_rows, _ = batch_of(lengths, 16)
    arena[1, 0, 0, 3, 5] = torch.nan
    step = step_of(3, 16, 0)
    step.queries[2] *= 1e4
    for slot in range(3):
        batch.place(slot, {0: rows[slot]})
    alone.place(0, {0: alone_rows[0]})
    alone.place(2, {0: alone_rows[2]})
    output = batch.attend(0, step, errors={}, scratch=batch.scratch(3)).clone()
    expected = alone.attend(0, step, errors={}, scratch=alone.scratch(3))
    assert output[1, 0].isnan().all()
    assert output[1, 1].isfinite().all()
    assert torch.equal(output[[0, 2]], expected[[0, 2]])
    assert output[2].isfinite().all()


@needs_compiler
def test_heads_of_several_threads_are_those_of_one() -> None:
    lengths = [4001, 0, 3000, 1]
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for num_threads in (1, 2, 7):
        arena = torch.zeros(len(lengths), 2, HEADS, max(lengths) + 1, 24)
        arena[:, :, :, :-1] = torch.randn(arena[:, :, :, :-1].shape, generator=generator.manual_seed(0))
        batch = DenseBatch(batch_shape(len(lengths), group_size=GROUP, head_dim=24), arena.view(-1))
        for slot, length in enumerate(lengths):
            rows = CachedRows(keys=arena[slot, 0], values=arena[slot, 1], length=length)
            batch.place(slot, {0: rows})
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            output = batch.attend(0, step_of(4, 24, 0), errors={}, scratch=batch.scratch(4))
        finally:
            torch.set_num_threads(before)
        outputs.append((output.clone(), arena))
    for output, arena in outputs[1:]:
        assert torch.equal(output, outputs[0][0])
        assert torch.equal(arena, outputs[0][1])


@needs_compiler
def test_rows_outside_of_the_arena_are_an_error_and_torch_goes_on() -> None:
    batch, rows, arena = batch_of([5, 5], 16)
    for slot in range(2):
        batch.place(slot, {0: rows[slot]})
    batch._tables.layer(0, 2)[1, 0] = arena.numel() - 16
    step = step_of(2, 16, 0)
    expected_batch, expected_rows, _ = batch_of([5, 5], 16)
    for slot in range(2):
        expected_batch.place(slot, {0: expected_rows[slot]})
    try:
        output = batch.attend(0, step, errors={}, scratch=batch.scratch(2))
        assert "outside of the arena" in quarantined()["dense_decode"].detail
        assert not batch.is_launched
        assert dispatch.planned_path("dense_decode", torch.device("cpu")) == "torch"
    finally:
        state.by_op = {}
    expected = expected_batch.attend_slots(0, step, errors={})
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@needs_compiler
def test_it_is_for_float32() -> None:
    cpu = torch.device("cpu")
    assert dispatch.planned_path("dense_decode", cpu) == "native"
    with dispatch.torch_only():
        assert dispatch.planned_path("dense_decode", cpu) == "torch"
    dispatch.configure("torch", cpu)
    try:
        assert dispatch.planned_path("dense_decode", cpu) == "torch"
    finally:
        dispatch.configure("auto", cpu)
    half = replace(batch_shape(1, group_size=1, head_dim=16), dtype=torch.float16)
    assert not DenseBatch(half, torch.zeros(64, dtype=torch.float16)).is_launched
