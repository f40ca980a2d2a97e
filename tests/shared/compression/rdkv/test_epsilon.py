"""Built-in distortion tables are the paper's Table 14; others survive the disk and are found by name."""

import json

import pytest

from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.calibrations import calibration_folder
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.rdkv import epsilon
from kvferry.shared.compression.rdkv.epsilon import (
    FALLBACK,
    OWN_TABLE,
    PAPER_TABLES,
    WIDTHS,
    EpsilonTable,
    find_table,
    install_tables,
    load_table,
    own_table,
    stand_in,
)
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.checkpoint import model_fingerprint
from kvferry.tools.evaluation.epsilon import save_table


def test_tables_hold_the_papers_five_models():
    assert set(PAPER_TABLES) == {"LLaMA-3.1-8B", "LLaMA-2-13B", "Mistral-7B", "Qwen2.5-72B", "Qwen3-4B"}
    assert find_table("LLaMA-3.1-8B").keys == (0.149, 0.0062, 2.2e-5)
    assert find_table("Qwen2.5-72B").keys == (0.296, 0.0164, 4.4e-3)
    assert find_table("Qwen3-4B").values == (0.313, 0.0139, 4.8e-5)


@pytest.mark.parametrize("model", PAPER_TABLES)
def test_more_bits_always_distort_less(model):
    table = find_table(model)
    for curve in (table.key_curve, table.value_curve):
        assert len(curve) == len(WIDTHS)
        assert (curve[0], curve[-1]) == (1.0, 0.0)
        assert list(curve) == sorted(curve, reverse=True)


def test_an_unknown_model_is_named_with_those_there_are():
    with pytest.raises(InvalidRequest, match=r"'gpt'.*Qwen3-4B"):
        find_table("gpt")


@pytest.mark.parametrize("entries", [(0.1, 0.2), (0.1, float("nan"), 0.0), (0.1, -0.1, 0.0)])
def test_impossible_tables_are_refused(entries):
    with pytest.raises(ConfigurationError, match="epsilon of values"):
        EpsilonTable(keys=(0.3, 0.01, 0.0), values=entries)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    yield tmp_path
    monkeypatch.undo()
    install_tables("")


ONE = EpsilonTable(keys=(0.3, 0.01, 1e-5), values=(0.2, 0.02, 2e-5))
TWO = EpsilonTable(keys=(0.1, 0.01, 1e-5), values=(0.1, 0.02, 2e-5))


def test_a_table_survives_the_disk_with_what_it_was_measured_on(folder):
    path = folder / "mine.json"
    save_table(path, TWO)
    save_table(path, ONE, origin={"model": "a/model", "tokens": 4096})
    assert load_table(path) == ONE
    assert json.loads(path.read_text(encoding="utf-8"))["model"] == "a/model"
    assert [entry.name for entry in folder.iterdir()] == ["mine.json"]


def test_installed_tables_are_found_by_the_names_of_their_files_until_others_are(folder):
    save_table(folder / "one.json", ONE)
    save_table(folder / "two.v2.json", TWO)
    (folder / "notes.txt").write_text("no table", encoding="utf-8")
    install_tables(str(folder))
    assert (find_table("one"), find_table("two.v2")) == (ONE, TWO)
    with pytest.raises(InvalidRequest, match=r"Qwen3-4B, one, two\.v2"):
        find_table("three")
    install_tables("")
    with pytest.raises(InvalidRequest, match=r"'one'.*Qwen3-4B$"):
        find_table("one")


def test_a_name_is_no_path(folder):
    save_table(folder / "one.json", ONE)
    (folder / "sub").mkdir()
    install_tables(str(folder / "sub"))
    for name in ("../one", str(folder / "one.json"), "one.json"):
        with pytest.raises(InvalidRequest, match="epsilon_table"):
            find_table(name)


def test_a_folder_that_is_none_or_takes_a_built_in_name_is_refused_and_changes_nothing(folder):
    save_table(folder / "one.json", ONE)
    install_tables(str(folder))
    with pytest.raises(ConfigurationError, match=r"epsilon_tables is .*absent"):
        install_tables(str(folder / "absent"))
    (folder / "other").mkdir()
    save_table(folder / "other" / "Qwen3-4B.json", ONE)
    with pytest.raises(ConfigurationError, match="built in"):
        install_tables(str(folder / "other"))
    assert find_table("one") == ONE


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        "{}",
        '{"keys": [1, 2, 3]}',
        '{"keys": [0.1, 0.1, "x"], "values": [0, 0, 0]}',
        '{"keys": [0.1, 0.1], "values": [0, 0, 0]}',
        '{"keys": [0.1, 0.1, NaN], "values": [0, 0, 0]}',
        '{"keys": [0.1, 0.1, true], "values": [0, 0, 0]}',
    ],
)
def test_files_that_hold_something_else_are_refused(folder, content):
    path = folder / "mine.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError):
        load_table(path)
    with pytest.raises(ConfigurationError):
        install_tables(str(folder))
    with pytest.raises(ConfigurationError):
        load_table(folder / "absent.json")


def test_a_models_own_table_is_the_one_that_was_measured_on_it(folder):
    own = EpsilonTable(keys=ONE.keys, values=ONE.values, fingerprints=("f16", "f32"))
    save_table(folder / "mine.json", ONE, origin={"fingerprints": {"float32": "f32", "float16": "f16"}})
    save_table(folder / "other.json", TWO, origin={"fingerprints": {"float32": "another"}})
    install_tables(str(folder))
    assert find_table(OWN_TABLE, fingerprint="f16") == find_table("mine") == own
    assert find_table(OWN_TABLE, fingerprint="f8") == PAPER_TABLES[FALLBACK]


def test_the_shipped_models_tables_are_there_without_a_folder(folder):
    for dtype in ("float32", "float16"):
        fingerprint = model_fingerprint(DEMO_MODEL, dtype=dtype)
        table = find_table(OWN_TABLE, fingerprint=fingerprint)
        assert fingerprint in table.fingerprints
        assert table != PAPER_TABLES[FALLBACK]
    # a user's own measurement of the same model comes first
    save_table(folder / "again.json", ONE, origin={"fingerprints": {"float16": fingerprint}})
    install_tables(str(folder))
    assert find_table(OWN_TABLE, fingerprint=fingerprint).keys == ONE.keys


def test_what_was_measured_on_a_model_is_found_by_its_fingerprint_alone(folder, tmp_path, monkeypatch):
    """In the user's folder, or in the one that a setting names in its place."""
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = {"fingerprints": {"float32": "f32", "served": "f32 longrope"}}
    users = calibration_folder("")
    users.mkdir(parents=True)
    save_table(users / "m-0123.epsilon.json", ONE, origin=mine)
    install_tables("")
    for fingerprint in mine["fingerprints"].values():
        assert own_table(fingerprint) == find_table(OWN_TABLE, fingerprint=fingerprint)
        assert own_table(fingerprint).keys == ONE.keys
    for name in ("m-0123", "m-0123.epsilon"):
        with pytest.raises(InvalidRequest, match="epsilon_table"):
            find_table(name)
    other = tmp_path / "other"
    other.mkdir()
    save_table(other / "m-0123.epsilon.json", TWO, origin=mine)
    install_tables("", calibration=str(other))
    assert own_table("f32").keys == TWO.keys
    # a folder whose tables have names comes first
    (tmp_path / "named").mkdir()
    save_table(tmp_path / "named" / "again.json", ONE, origin=mine)
    install_tables(str(tmp_path / "named"), calibration=str(other))
    assert own_table("f32").keys == ONE.keys


def test_a_process_that_installs_nothing_finds_the_users_tables(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(epsilon, "_tables", epsilon._Tables())
    calibration_folder("").mkdir(parents=True)
    save_table(
        calibration_folder("") / "m-0123.epsilon.json", ONE, origin={"fingerprints": {"float32": "f32"}}
    )
    assert find_table(OWN_TABLE, fingerprint="f32").keys == ONE.keys


@pytest.mark.parametrize("content", ["", '{"keys": [0.3, 0.0', "{}"])
def test_a_torn_calibration_is_refused_by_its_name_and_changes_nothing(folder, tmp_path, content):
    (tmp_path / "m-0123.epsilon.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"m-0123\.epsilon\.json"):
        install_tables("", calibration=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"calibration is .*absent"):
        install_tables("", calibration=str(tmp_path / "absent"))
    assert own_table(model_fingerprint(DEMO_MODEL, dtype="float32")) is not None


def resolved(method, *, tokens=8, num_prompt_tokens=64, **overrides):
    plan = plan_for(method, budget=Budget(tokens=tokens) if tokens else None, overrides=overrides)
    return resolve_plan(
        plan, num_prompt_tokens=num_prompt_tokens, max_new_tokens=4, num_layers=2, head_dim=16, layers=()
    )


def test_another_models_table_is_named_where_it_stands_in_for_the_models_own(folder, tmp_path):
    for method in ("rdkv", "rdkv-hsa", "rdkv-union", "rdkv-draft", "compactor-rdkv"):
        assert stand_in(resolved(method), fingerprint="nobody's") == FALLBACK == "LLaMA-3.1-8B"
        assert stand_in(resolved(method), fingerprint=model_fingerprint(DEMO_MODEL, dtype="float32")) == ""
    for plan in (
        resolved("snapkv"),
        resolved("full", tokens=0),
        resolved("kivi", tokens=0),
        resolved("rdkv", tokens=64),  # nothing is compressed
        resolved("rdkv", epsilon_table="Qwen3-4B"),  # as the request says
    ):
        assert stand_in(plan, fingerprint="nobody's") == ""
