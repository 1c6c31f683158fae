"""Every path that a user gives may begin with ~ or ~USER, in every flag and field, and no folder is called "~"."""

import ast
import json
import re

import pytest
from conftest import ROOT, assert_one_line_error, make_folder, run_script
from test_analysis import write_run

import report
import train
from largebatch import pod
from largebatch.config import dicts
from largebatch.config.dicts import RULES
from largebatch.util import UserError, expanded

NOBODY = "~no-such-user/x"


def test_only_a_tilde_at_the_beginning_is_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/a") == "/home/me/a"
    assert expanded("~") == "/home/me"
    for path in ("a/~/b", "./~", "gs://bucket/~/a", "", "a~"):
        assert expanded(path) == path
    with pytest.raises(UserError, match=r"^--out: ~no-such-user/x: there is no home folder ~no-such-user; allowed"):
        expanded(NOBODY, "--out")


# ---- all flags and fields ------------------------------------------------------------------------------

OF_FILES = re.compile(r"\b(file|folder|zip|csv|png|path|dir)\b", re.IGNORECASE)
NO_PATHS = {"storage", "configs"}  # a URL, and names without their folder
READERS = {"path_argument", "address_argument"}


def calls_of(path, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]


def test_every_flag_that_names_a_file_or_folder_expands_it():
    """A flag whose help speaks of a file or folder is defined by `path_flag`, or has its type."""
    for path in ROOT.glob("*.py"):
        for call in calls_of(path, "DEFINE_string"):
            name, help_text = call.args[0].value, ast.unparse(call.args[2])
            assert name in NO_PATHS or not OF_FILES.search(help_text), f"{path.name}: --{name}"
    parsers = [ROOT / "report.py", *(ROOT / "largebatch").rglob("*.py")]
    arguments = [call for path in parsers for call in calls_of(path, "add_argument")]
    assert len(arguments) > 10
    for call in arguments:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if OF_FILES.search(f"{options.get('help')} {options.get('metavar')}") and options.get("type") != "int":
            assert options.get("type") in READERS or options.get("action"), ast.unparse(call)


def test_every_field_that_may_hold_any_text_is_known_as_a_path_or_as_none():
    others = {"dataset.name", "dataset.tfds_split", "model.name", "log.wandb_project"}
    others |= {"devices.coordinator_address"}
    texts = {field for field, rule in RULES.items() if rule.allows("any text")}
    assert texts == {*dicts.PATHS, *others}


# ---- nobody's home -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "arguments"),
    [
        (report.parse, [NOBODY]),
        *((report.parse, ["run", flag, NOBODY]) for flag in ("--out", "--png", "--csv")),
        (pod.parse, ["--hosts=1", "--devices=1", "--availability", NOBODY, "--", "true"]),
    ],
)
def test_nobodys_home_is_refused_by_name_in_an_argument(parse, arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    name = arguments[arguments.index(NOBODY) - 1].split()[0] if arguments[0] != NOBODY else "argument"
    line = capsys.readouterr().err.splitlines()[-1]
    assert name.removeprefix("run") in line
    assert f"{NOBODY}: there is no home folder ~no-such-user" in line


SLOW = {"train.init_from"}  # read once all is compiled


@pytest.mark.parametrize("field", [pytest.param(f, marks=[pytest.mark.full] * (f in SLOW)) for f in dicts.PATHS])
def test_nobodys_home_is_refused_by_name_in_a_field(small_config, tmp_path, monkeypatch, field):
    monkeypatch.chdir(tmp_path)
    small_config.dataset.name = "mine" if field == "dataset.path" else "synthetic"
    small_config.update_from_flattened_dict({field: NOBODY})
    with pytest.raises(UserError, match=rf"^{re.escape(field)}: {NOBODY}"):
        train.train_and_evaluate(small_config, "run")
    assert not (tmp_path / "~no-such-user").exists()


FLAGS = {
    "train.py": ["--workdir", "--config"],
    "sweep.py": ["--study", "--space", "--branch"],
    "evaluate.py": ["--out", "--images"],
    "export.py": ["--out"],
    "augment.py": ["--preview", "--export"],
    "bench.py": ["--path", "--data", "--cache_dir", "--json"],
}


@pytest.mark.full
@pytest.mark.parametrize(("script", "flag"), [(script, flag) for script, flags in FLAGS.items() for flag in flags])
def test_nobodys_home_is_refused_by_name_in_a_flag(tmp_path, script, flag):
    before = [write_run(tmp_path / "run")] if script in ("evaluate.py", "export.py") else []
    result = run_script(ROOT / script, *before, f"{flag}={NOBODY}", cwd=tmp_path)
    assert_one_line_error(result, flag, NOBODY, "there is no home folder", code=2)
    assert not (tmp_path / "~no-such-user").exists()


def test_the_table_of_flags_is_complete():
    defined = {
        path.name: [f"--{c.args[0].value}" for c in calls_of(path, "path_flag")] for path in ROOT.glob("*.py")
    }
    known = {script: {flag for flag in flags if not flag.startswith("--config")} for script, flags in FLAGS.items()}
    assert {script: set(flags) for script, flags in defined.items() if flags} == known


# ---- where files land ----------------------------------------------------------------------------------


def test_a_report_lands_in_the_home_folder(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    write_run(home / "[/run] $x$")
    here.mkdir()
    given = ["~/[/run] $x$", "--out=~/page.html", "--png=~/pictures", "--csv=~/rows.csv"]
    result = run_script(ROOT / "report.py", *given, cwd=here, env={"HOME": str(home)})
    assert result.returncode == 0, result.stderr
    assert {path.name for path in home.glob("[!.]*")} == {"[", "page.html", "pictures", "rows.csv"}
    assert list((home / "pictures").glob("*.png"))
    assert not list(here.iterdir())


CONFIG = """
from configs import default

def get_config():
    c = default.get_config()
    c.dataset.name, c.dataset.source, c.dataset.path, c.dataset.image_size = "mine", "folder", "~/photos", 8
    c.augment.cache_dir, c.augment.views = "~/cache", "flip"
    c.batch.trace, c.batch.micro_batch_size = "~/trace.csv", 8
    c.train.inner_steps, c.train.outer_steps = 2, 1
    return c
"""


SPACE = """
def suggest(trial):
    trial.suggest_categorical("optimizer.learning_rate", [0.01])
"""


@pytest.mark.full
def test_every_file_lands_in_the_home_folder_whatever_it_is_called(tmp_path):
    """A run, its predictions, export, pictures and report, with brackets and codes in every name."""
    home, here = tmp_path / "home", tmp_path / "here"
    make_folder(home / "photos", {"[red]": 30, ":cat:": 30, "[b": 30})
    (home / "small.py").write_text(CONFIG)
    (home / "space.py").write_text(SPACE)
    (home / "trace.csv").write_text("step,batchsize\n0,16\n1,24\n2,16\n")
    here.mkdir()
    run = "~/runs/[/lr=0.1]"
    data = ["--config.augment.cache_dir=~/cache", "--config.dataset.path=~/photos"]
    commands = [
        ["train.py", "--config", "~/small.py", "--workdir", run],
        ["train.py", "--config=~/small.py", "--workdir=~/more", "--config.train.init_from", run],
        ["evaluate.py", run, "--images", "~/photos", "--out", "~/predictions.csv", *data],
        ["evaluate.py", run, "--split", "test", *data],
        ["export.py", run, "--out=~/model"],
        ["augment.py", "--config=~/small.py", "--preview", "~/[views].png"],
        ["sweep.py", "--config=~/small.py", "--space=~/space.py", "--study", "~/studies/[/s]"],
        ["report.py", "~/studies/[/s]", "--out=~/study.html"],
        ["report.py", run, "~/more", "--out", "~/page.html", "--csv", "~/rows.csv", "--png", "~/pictures"],
    ]
    for script, *arguments in commands:
        env = {"HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
        result = run_script(ROOT / script, *arguments, cwd=here, env=env)
        assert result.returncode == 0, (script, result.stderr)
        assert "Traceback" not in result.stderr
        if script in ("train.py", "evaluate.py") and run in arguments and "--workdir" in arguments:
            assert f"{home}/runs/[/lr=0.1]" in result.stdout
        if script == "evaluate.py":
            assert {"[red]", ":cat:", "[b"} <= set(result.stdout.split())
    assert not list(here.iterdir())
    made = {"runs", "more", "cache", "predictions.csv", "model", "[views].png", "page.html", "rows.csv", "pictures"}
    made |= {"studies", "study.html"}
    assert made <= {path.name for path in home.iterdir()}
    config = json.loads((home / "runs" / "[" / "lr=0.1]" / "config.json").read_text())
    assert config["dataset"]["path"] == "~/photos"  # as it was given: the same on every machine
