"""`kvferry calibrate` on the demo model, a worker's own calibration, and the one that ships."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.models import CALIBRATION_TEXT, DEMO_MODEL
from kvferry.services.launcher import cli
from kvferry.shared.compression.curves import CurveBook, load_curves
from kvferry.shared.compression.rdkv.epsilon import install_tables, load_table, own_table
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.checkpoint import model_fingerprint
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation import calibrate as module
from kvferry.tools.evaluation.calibrate import calibrate_missing, worker_calibration
from kvferry.tools.evaluation.calibration_config import CalibrateConfig
from kvferry.tools.evaluation.samples import draw_samples
from kvferry.tools.recall.tasks import TASKS

SMALL = ("--length", "256", "--samples", "2", "--threads", "1")
TWO_BUDGETS = ("--retentions", "0.05,0.95")


@pytest.fixture(autouse=True)
def tables_of_the_package() -> Iterator[None]:
    """Calibration installs what it measures, in this process."""
    yield
    install_tables("")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's weights with another fingerprint, of which nothing is measured."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "made_for": "tests"}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loaded(other_model: Path) -> TransformersModel:
    return load_model(other_model)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that the demo's tokenizer knows."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(TASKS["qa_facts"].example(num_tokens=1500, seed=5).document, encoding="utf-8")
    return path


def of_a_second(model: Path, text: Path, folder: Path) -> CalibrateConfig:
    """Options of a measurement that takes a second."""
    folder.mkdir()
    return CalibrateConfig(
        model=str(model),
        calibration=str(folder),
        text=str(text),
        samples=3,
        length=256,
        methods="snapkv",
        retentions="0.1,0.9",
    )


@pytest.fixture
def config(other_model: Path, text: Path, tmp_path: Path) -> CalibrateConfig:
    """Of a folder in which nothing is."""
    return of_a_second(other_model, text, tmp_path / "found")


@pytest.fixture(scope="module")
def measured(
    other_model: Path, text: Path, loaded: TransformersModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder in which all is that `config` measures."""
    config = of_a_second(other_model, text, tmp_path_factory.mktemp("measured") / "found")
    calibrate_missing(config, loaded, never)
    return Path(config.calibration)


@pytest.fixture
def again(config: CalibrateConfig, measured: Path) -> CalibrateConfig:
    """Of a copy of it."""
    shutil.copytree(measured, config.calibration, dirs_exist_ok=True)
    return config


def never() -> bool:
    return False


def calibrate(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(["calibrate", *arguments])
    return caught.value.code


# ---- the command -----------------------------------------------------------------------------------------


def test_one_command_measures_table_and_curves_and_says_what_they_say(
    tmp_path: Path, demo_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = (*SMALL, *TWO_BUDGETS, "--methods", "snapkv,random", "--calibration", str(folder))
    assert calibrate(*arguments) == 0
    name = f"demo-{model_fingerprint(demo_model_dir, dtype='float32')[:8]}"
    table_path, curves_path = folder / f"{name}.epsilon.json", folder / f"{name}.quality.json"
    assert {path.name for path in folder.iterdir()} == {table_path.name, curves_path.name, f"{name}.lock"}

    table = load_table(table_path)
    for errors in (table.keys, table.values):
        # two more bits divide the step by 5, four more by 17; the error falls with its square
        assert 0.05 < errors[0] < 0.6
        assert 15 < errors[0] / errors[1] < 35
        assert 200 < errors[1] / errors[2] < 400
    assert json.loads(table_path.read_text())["samples"] == 2
    assert model_fingerprint(DEMO_MODEL, dtype="float16") in table.fingerprints

    found = load_curves(curves_path)
    assert set(found.curves) == {"snapkv", "random"}
    assert {curve.measure for curve in found.curves.values()} == {"agreement"}
    assert found.fingerprints["float32"] == found.fingerprints["served"]
    assert found.origin["command"].startswith("kvferry calibrate --threads 1 --length 256")
    assert found.origin["family"] == "", "the demo stands for no other model"
    for curve in found.curves.values():
        assert len(curve.observations) == 4  # two retentions of two groups
        assert curve.lowest_nll < curve.highest_nll
        most = [o.quality for o in curve.observations if o.retention == 0.95]
        little = [o.quality for o in curve.observations if o.retention == 0.05]
        assert sum(most) > sum(little) or sum(most) == 2
        assert all(o.quality in (0, 1) for o in curve.observations)  # one answer a group
        assert curve.retention_at(0.5, nll=curve.lowest_nll) < curve.retention_at(0.99, nll=curve.lowest_nll)

    told = capsys.readouterr().err
    assert "snapkv: quality 0.9 at " in told
    assert "distortion at 2, 4, 8 bits: K 0." in told
    assert str(table_path) in told
    assert str(curves_path) in told


def test_the_curves_are_of_what_compresses_by_the_models_own_table(
    config: CalibrateConfig, loaded: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, values = [], module._values

    def watched(*arguments: Any) -> list[float]:
        seen.append(own_table(loaded.spec.fingerprint))
        return values(*arguments)

    monkeypatch.setattr(module, "_values", watched)
    calibrate_missing(config, loaded, never)
    (path,) = Path(config.calibration).glob("*.epsilon.json")
    assert seen == [load_table(path)] * 3


@pytest.mark.parametrize("measure", ["agreement", "exact", "nll"])
def test_quality_is_what_the_measure_says(tmp_path: Path, tokenizer: ChatTokenizer, measure: str) -> None:
    """Of two own questions, one with an answer that the model never gives."""
    examples = [TASKS["single_needle"].example(num_tokens=256, seed=seed) for seed in (3, 4)]
    records = [
        {
            "context": example.document,
            "question": example.messages[0]["content"].removeprefix(example.document).strip(),
            "answers": ["the mill" if i else example.answer],
        }
        for i, example in enumerate(examples)
    ]
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, [records[0], records[0]])), encoding="utf-8")
    folder = tmp_path / "found"
    options = ("--data", str(data), "--samples", "2", "--threads", "1", "--measure", measure)
    methods = ("--methods", "snapkv", "--retentions", "0.5,0.9")
    assert calibrate(*options, *methods, "--calibration", str(folder)) == 0
    (path,) = folder.glob("*.quality.json")
    curve = load_curves(path).curves["snapkv"]
    assert curve.measure == measure
    found = {o.retention: o.quality for o in curve.observations}
    if measure == "nll":
        assert found[0.9] == pytest.approx(1.0, abs=0.2)
    else:
        assert found[0.9] == 1.0
    data.write_text("\n".join(map(json.dumps, [records[1], records[1]])), encoding="utf-8")
    wrong = calibrate(*options, *methods, "--calibration", str(folder))
    assert wrong == (2 if measure == "exact" else 0), "nothing is right, so no share of it can be"


def test_a_curve_of_right_answers_needs_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "own.jsonl"
    record = {
        "context": "the castle is red .",
        "question": "which color ?",
        "answers": ["the mill and the sea"],
    }
    data.write_text(json.dumps(record), encoding="utf-8")
    options = ("--data", str(data), "--samples", "1", "--measure", "exact", "--threads", "1")
    assert calibrate(*options, "--methods", "snapkv", "--calibration", str(tmp_path / "found")) == 2
    assert "the full KV answers no prompt of a group right; take agreement" in capsys.readouterr().err


def test_prompts_can_come_from_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the old sailor painted the quiet bridge and the red castle . " * 15, encoding="utf-8")
    arguments = ("--text", str(text), "--length", "160", "--samples", "1", "--threads", "1")
    methods = ("--methods", "random", "--retentions", "0.1,0.6")
    assert calibrate(*arguments, *methods, "--calibration", str(tmp_path / "found")) == 0
    (path,) = (tmp_path / "found").glob("*.quality.json")
    observations = load_curves(path).curves["random"].observations
    assert [o.retention for o in observations] == [0.1, 0.6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("speed",), "speed"),
        (("--samples", "0"), "greater than or equal to 1"),
        (("--methods", "full"), "--methods has 'full'; allowed are snapkv"),
        (("--methods", "snapkv,"), "comma-separated list"),
        (("--retentions", "0.5,1.0"), "--retentions has '1.0'; each must be above 0 and below 1"),
        (("--length", "100"), "generated samples need at least 256"),
        (("--text", __file__, "--length", "100"), "cut from a text need at least 124"),
        (("--text", __file__, "--length", "2000000"), "--length 2000000 needs 1999920"),
        (("--measure", "speed"), "input should be 'agreement', 'exact' or 'nll'"),
        (("--data", "/nowhere/at/all"), "--data /nowhere/at/all cannot be read"),
        (("--data", "a", "--text", "b"), "--text is b and --data a; give one of them"),
        (("--text", "/nowhere/at/all"), "--text /nowhere/at/all cannot be read"),
        (("--calibration", __file__), "cannot be made"),
    ],
)
def test_wrong_options_are_code_2_and_say_what_is_allowed(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate("--calibration", str(tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err


def test_help_shows_the_options_and_the_machines_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate("--help") == 0
    text = capsys.readouterr().out
    assert "│ machine " in text
    assert "--retentions" in text


# ---- prompts ---------------------------------------------------------------------------------------------


def draw(tokenizer: ChatTokenizer, **changes: Any) -> list[Any]:
    options: dict[str, Any] = {"text": "", "data": "", "generated": False, "number": 5, "num_tokens": 400}
    return draw_samples(tokenizer, max_model_len=2048, **(options | changes))


def test_prompts_ask_for_a_passage_that_they_contain(tokenizer: ChatTokenizer, text: Path) -> None:
    samples = draw(tokenizer, text=str(text))
    assert len({sample.prompt for sample in samples}) == 5
    places = []
    for sample in samples:
        assert 300 < len(sample.prompt) <= 400
        assert len(sample.answer) == 32
        given, passage = sample.prompt[-12:], (*sample.prompt[-12:], *sample.answer)
        # The words that begin the passage are in the excerpt, in the request, and begin the answer.
        found = [i for i in range(len(sample.prompt)) if sample.prompt[i : i + 12] == given]
        assert len(found) >= 2
        assert sample.prompt[found[0] : found[0] + len(passage)] == passage
        places.append(found[0] / len(sample.prompt))
    assert min(places) < 0.2
    assert max(places) > 0.5


def test_a_short_text_is_cut_into_excerpts_that_overlap(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    words = ("castle", "bridge", "sailor", "mill", "lighthouse", "wolf", "bread", "gate")
    text = tmp_path / "text"
    text.write_text(" ".join(words[i * i % 7] for i in range(350)), encoding="utf-8")
    assert len({sample.prompt for sample in draw(tokenizer, text=str(text), number=3)}) == 3


def test_the_included_text_is_free_and_named(tokenizer: ChatTokenizer) -> None:
    files = sorted(CALIBRATION_TEXT.glob("*.txt"))
    size_bytes = sum(path.stat().st_size for path in files)
    assert 60_000 < size_bytes < 120_000
    listed = (CALIBRATION_TEXT / "README.md").read_text(encoding="utf-8")
    assert "public domain" in listed
    assert all(f"| `{path.stem}` |" in listed for path in files)
    assert len(draw(tokenizer, number=3)) == 3
    real = Path(__file__).parents[3] / "benchmarks" / "real" / "documents"
    assert all((real / path.name).resolve() == path.resolve() for path in files)


# ---- one after another -----------------------------------------------------------------------------------


class Stopped(Exception):
    """Stands in for the end of a process."""


def counted(monkeypatch: pytest.MonkeyPatch, *, stops_after: int = 1000) -> list[Any]:
    """The samples that are measured from now on, up to a number after which it stops."""
    measured: list[Any] = []
    values = module._values

    def watched(generator: Any, sample: Any, *rest: Any) -> list[float]:
        if len(measured) == stops_after:
            raise Stopped
        measured.append(sample)
        return values(generator, sample, *rest)

    monkeypatch.setattr(module, "_values", watched)
    return measured


def test_an_interrupted_measurement_goes_on_where_it_was(
    config: CalibrateConfig, loaded: TransformersModel, measured: Path
) -> None:
    folder = Path(config.calibration)
    with pytest.MonkeyPatch.context() as patch:
        first = counted(patch, stops_after=2)
        with pytest.raises(Stopped):
            calibrate_missing(config, loaded, never)
    assert not list(folder.glob("*.quality.json"))
    (partial,) = folder.glob("*.partial")
    partial.write_text(partial.read_text() + "[1.0, 0.", encoding="utf-8")  # torn as it was written
    with pytest.MonkeyPatch.context() as patch:
        rest = counted(patch)
        calibrate_missing(config, loaded, never)
    assert (len(first), len(rest)) == (2, 1)
    assert not partial.exists()
    (path,), (expected,) = folder.glob("*.quality.json"), measured.glob("*.quality.json")
    assert load_curves(path).curves == load_curves(expected).curves


def test_what_is_left_of_another_measurement_is_not_used(
    config: CalibrateConfig, loaded: TransformersModel
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, stops_after=2)
        with pytest.raises(Stopped):
            calibrate_missing(config, loaded, never)
    with pytest.MonkeyPatch.context() as patch:
        rest = counted(patch)
        calibrate_missing(config.model_copy(update={"retentions": "0.2,0.9"}), loaded, never)
    assert len(rest) == 3


def test_one_process_measures_and_another_that_waited_takes_what_it_found(
    config: CalibrateConfig, loaded: TransformersModel, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, values = Path(config.calibration), counted(monkeypatch)
    (lock,) = measured.glob("*.lock")
    waits = threading.Event()

    class Log:
        def info(self, event: str, *, doing: str = "", **fields: object) -> None:
            if doing.startswith("waiting for another process"):
                waits.set()

    monkeypatch.setattr(module, "log", Log())
    waiting = threading.Thread(target=calibrate_missing, args=(config, loaded, never))
    with (folder / lock.name).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting.start()
        assert waits.wait(60)
        assert not list(folder.glob("*.json"))
        for path in measured.glob("*.json"):
            shutil.copy(path, folder)
    waiting.join(60)
    assert not waiting.is_alive()
    assert not values
    assert not list(folder.glob("*.partial"))


def test_a_worker_that_ends_gives_up_after_the_prompt_at_hand(
    config: CalibrateConfig, loaded: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = counted(monkeypatch)
    calibrate_missing(config, loaded, lambda: len(measured) == 2)
    assert len(measured) == 2
    assert not list(Path(config.calibration).glob("*.quality.json"))
    calibrate_missing(config, loaded, never)
    assert len(measured) == 3
    assert list(Path(config.calibration).glob("*.quality.json"))


# ---- a worker's calibration ------------------------------------------------------------------------------


def test_a_worker_finds_what_was_measured_by_the_fingerprint_and_measures_nothing(
    again: CalibrateConfig, loaded: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CurveBook.read(again.calibration).methods(loaded.spec.fingerprint) == ("snapkv",)
    install_tables("", calibration=again.calibration)
    assert own_table(loaded.spec.fingerprint) is not None
    values = counted(monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in Path(again.calibration).iterdir()}
    calibrate_missing(again, loaded, never)
    assert not values
    assert {path: path.stat().st_mtime_ns for path in Path(again.calibration).iterdir()} == before


def test_curves_of_ones_own_questions_stay_and_the_table_alone_is_measured(
    again: CalibrateConfig, loaded: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (curves,), (table,) = (Path(again.calibration).glob(f"*.{kind}.json") for kind in ("quality", "epsilon"))
    content, expected = curves.read_text(encoding="utf-8"), load_table(table)
    table.unlink()
    values = counted(monkeypatch)
    calibrate_missing(again, loaded, never)
    assert load_table(table) == expected
    assert not values
    assert curves.read_text(encoding="utf-8") == content


def test_the_shipped_model_needs_no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = counted(monkeypatch)
    worker_calibration("demo", str(tmp_path / "found"))(load_model("demo"), never)
    assert not measured
    assert list((tmp_path / "found").iterdir()) == []


def test_a_model_without_kv_has_nothing_to_measure(
    tiny_model_dir: Callable[[str], Path], config: CalibrateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_model_dir("llama"))
    monkeypatch.setattr(module, "applicable_methods", lambda layers: ("full",))
    calibrate_missing(config, model, never)
    assert not list(Path(config.calibration).glob("*"))


@pytest.mark.parametrize("kind", ["quality", "epsilon"])
def test_a_torn_file_is_refused_by_its_name(
    again: CalibrateConfig, loaded: TransformersModel, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (path,) = Path(again.calibration).glob(f"*.{kind}.json")
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    with pytest.raises(ConfigurationError, match=path.name):
        calibrate_missing(again, loaded, never)
    assert calibrate(*SMALL, "--calibration", again.calibration) == 2
    assert path.name in capsys.readouterr().err


# ---- what ships ------------------------------------------------------------------------------------------


def test_the_shipped_calibration_is_of_the_shipped_model(demo_model_dir: Path, tmp_path: Path) -> None:
    """With another demo model: what kvferry calibrate measures with the options that the files name."""
    book = CurveBook.read(str(tmp_path))
    for dtype in ("float32", "float16", "bfloat16"):
        methods = book.methods(model_fingerprint(demo_model_dir, dtype=dtype))
        assert {"rocketkv", "snapkv", "compactor", "rdkv"} <= set(methods)
    for method in methods:
        curve = book.find(model_fingerprint(demo_model_dir, dtype="float32"), method)
        assert curve is not None
        assert curve.measure == "agreement"
        assert 0 < curve.retention_at(0.8, nll=curve.lowest_nll) < 1
