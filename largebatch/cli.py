"""How every script starts and ends: command line, JAX, exit codes."""

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import jax
from absl import flags
from etils import epath

from largebatch import terminal
from largebatch.config.fields import differences
from largebatch.config.rules import RULES, Models, nearest_field
from largebatch.config.validate import validate
from largebatch.errors import UserError, printable
from largebatch.hardware.dtypes import AUTO, DTYPES, auto_dtype_here, with_dtype
from largebatch.hosts import collectives, meeting
from largebatch.hosts.start import start_jax
from largebatch.paths import expanded

if TYPE_CHECKING:  # bench.py measures cards where ml_collections is missing
    from ml_collections import config_dict

log = logging.getLogger("largebatch")
flags.disclaim_key_flags()  # what `path_flag` defines are flags of the script that calls it

ROOT = Path(__file__).resolve().parents[1]
EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_PREEMPTED = 1, 2, 3, 130, 143
CONFIG_HELP = """
  --config: Config file; configs/default.py, where it is not given.
  --config.FIELD: Another value for a field of it, as in --config.batch.size 1024;
    configs/default.py has all fields.
"""
AGREED_EXITS = (EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_PREEMPTED)  # all hosts end with them together


def use_compilation_cache(cache_dir: str) -> None:
    """Keeps compiled programs between runs: in JAX_COMPILATION_CACHE_DIR if that is set, else below `cache_dir`.

    The first call of a process decides, as in JAX. Programs are code. So a script whose config comes from a folder
    that others may have made calls this before it reads the config, with a `cache_dir` of the user's own.
    """
    if not jax.config.jax_compilation_cache_dir:
        folder = epath.Path(expanded(cache_dir, "augment.cache_dir")) / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    # Programs that are small or quick to compile are kept too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start(
    config: "config_dict.ConfigDict",
    models: Models,
    recorded: Callable[[], dict | None] | None = None,
    *,
    of: str = "run",
) -> tuple["config_dict.ConfigDict", dict]:
    """Starts JAX on a config that all hosts agree on.

    Args:
      models: see `validate`.
      recorded, of: see `settle_dtype`.
    Returns:
      The config with its dtype settled; and the same as plain JSON, as it will be read back from a file.
    Raises:
      UserError: the config is bad or differs from that of host 0, or the devices or hosts are not there.
    """
    validate(config, models)
    use_compilation_cache(config.augment.cache_dir)
    start_jax(**config.devices.to_dict())
    plain = config.to_dict()
    plain["devices"]["host_index"] = None  # of all, only this differs between hosts
    configs = [json.loads(text) for text in collectives.gather_text(json.dumps(plain))]
    for host, config_of_host in enumerate(configs):
        if changed := differences(configs[0], config_of_host, ("on host 0", f"on host {host}")):
            raise UserError(f"hosts disagree about the config: {changed}")
    config = settle_dtype(config, recorded, of=of)
    configs[0]["model"]["dtype"] = config.model.dtype
    return config, configs[0]


def settle_dtype(
    config: "config_dict.ConfigDict", recorded: Callable[[], dict | None] | None = None, *, of: str = "run"
) -> "config_dict.ConfigDict":
    """The config with the dtype that model.dtype "auto" stands for, the same on all hosts, which call it together.

    What goes on keeps the dtype that it began with, wherever it does; a machine that would choose another says so.
    What is new has that of host 0's machine.

    Args:
      recorded: gives, on host 0, the config with which it began, as plain JSON; None if it is new.
      of: what goes on or is new, in a word.
    Raises:
      UserError: `recorded` does; on every host.
    """
    if config.model.dtype != AUTO:
        return config
    begun = collectives.agreed(lambda: _dtype_in(recorded and recorded()), collectives.is_primary())
    here = auto_dtype_here()
    dtype = collectives.json_from_primary(begun or here)
    if dtype != here:
        log.info("model.dtype: auto is %s in this %s; here it would be %s", dtype, of, here)
    return with_dtype(config, dtype)


def _dtype_in(recorded: object) -> str | None:
    """The dtype in what should be a config, from a file that may be damaged."""
    model = recorded.get("model") if isinstance(recorded, dict) else None
    dtype = model.get("dtype") if isinstance(model, dict) else None
    return dtype if dtype in DTYPES else None


# ---- scripts ----------------------------------------------------------------------------------------


def run_script(main: Callable[["config_dict.ConfigDict"], int | None], models: Models) -> NoReturn:
    """Parses --config and its overrides, validates the config, runs `main` and exits; see `exit_after`.

    Args:
      models: see `validate`.
    """
    terminal.log_to_stderr()
    logging.getLogger("largebatch").setLevel(logging.INFO)

    def parse_and_run():
        config = parse_flags(sys.argv)
        validate(config, models)
        return main(config)

    exit_after(parse_and_run)


def exit_after(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with the code that it returns.

    Errors that the user can correct (UsageError, UserError) are printed as one line on stderr, without a traceback.
    """
    script = Path(sys.argv[0]).name
    try:
        code = main() or 0
    except UsageError as error:
        print(f"{script}: {printable(error)}", file=sys.stderr)
        code = EXIT_USAGE
    except UserError as error:
        print(f"{script}: error: {printable(error)}", file=sys.stderr)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:  # a fault of the program: shown in full
        traceback.print_exc()
        code = EXIT_FAILED
    if code not in (0, *AGREED_EXITS) and jax.distributed.is_initialized():
        # The usual exit waits for the other hosts, and they may be waiting for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        meeting.wait_for_failing_hosts()
        os._exit(code)
    sys.exit(code)


class UsageError(Exception):
    """The command line cannot be read; its text is one line."""


class _PathParser(flags.ArgumentParser):
    """Reads a path, or the URL of a bucket."""

    def parse(self, argument: str) -> str:
        try:
            return expanded(argument)
        except UserError as error:
            raise ValueError(str(error)) from error


def path_flag(name: str, default: str | None, help_text: str) -> None:
    """Defines a flag that names a file or folder."""
    flags.DEFINE(_PathParser(), name, default, help_text, serializer=flags.ArgumentSerializer())


def parse_flags(argv: list[str]) -> "config_dict.ConfigDict":
    """The config that `argv` asks for.

    Raises:
      UsageError: unknown or malformed flag, or a config file that cannot be run.
    """
    from ml_collections import config_dict, config_flags

    if "--help" in argv:
        show_help(CONFIG_HELP)
    argv = _join_values(argv)
    argv = [_with_expanded_file(before, arg) for before, arg in zip(["", *argv], argv, strict=False)]
    is_none = _fields_set_to_none(argv)
    argv = [arg for arg in argv if arg not in is_none]
    try:
        # Defines a flag for every override in `argv`, so that the parser of flags knows them.
        default = str(ROOT / "configs" / "default.py")
        config_flags.DEFINE_config_file("config", default, "Config file.", sys_argv=argv)
        rest = parse_plain_flags(argv)
        if not isinstance(flags.FLAGS.config, config_dict.ConfigDict):  # config_flags' stand-in for a missing file
            raise UsageError(f"--config: there is no file {flags.FLAGS['config'].config_filename}")
        flags.FLAGS.config.update_from_flattened_dict(dict.fromkeys(is_none.values()))
    except (AttributeError, KeyError) as error:  # config_flags: an override of a field that is not there
        names = [arg.split("=")[0].removeprefix("--config.") for arg in argv if arg.startswith("--config.")]
        bad = [f"--config.{name}: unknown field{nearest_field(name)}" for name in names if name not in RULES]
        raise UsageError("; ".join(bad) or f"--config: the file cannot be run: {_one_line(error)}") from error
    except UsageError:
        raise
    except Exception as error:  # whatever a user's config file raises when it is run
        raise UsageError(f"--config: the file cannot be run: {type(error).__name__}: {_one_line(error)}") from error
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; allowed: --config FILE, --config.FIELD VALUE")
    return flags.FLAGS.config


def parse_plain_flags(argv: list[str]) -> list[str]:
    """Parses absl flags; returns the arguments that are no flags.

    Raises:
      UsageError: unknown or malformed flag.
    """
    if "--help" in argv:
        show_help()
    try:
        return flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise UsageError(_wrong_type(str(error)) or _one_line(error)) from error


def show_help(more: str = "") -> NoReturn:
    """Prints the script's docstring and its flags, and exits."""
    print(f"{sys.modules['__main__'].__doc__ or ''}\n{flags.FLAGS.main_module_help()}{more}")
    sys.exit(0)


def _wrong_type(message: str) -> str | None:
    """What absl's error says of a config field whose value has the wrong type, in the words of the field's rule."""
    found = re.match(r"flag --config\.(?P<field>[\w.]+)=(?P<value>.*?): ", message)
    if found is None or found["field"] not in RULES:
        return None
    return f"{found['field']}: {found['value']!r}; allowed: {RULES[found['field']].text}"


def _join_values(argv: list[str]) -> list[str]:
    """--config.a.b VALUE -> --config.a.b=VALUE.

    config_flags takes a field of mixed type (batch.size) for a switch, and would not read the value after it.
    """
    joined = []
    for arg in argv:
        follows_field = bool(joined) and re.fullmatch(r"--config\.[\w.]+", joined[-1])
        if follows_field and not arg.startswith("--"):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def _with_expanded_file(before: str, arg: str) -> str:
    """Return an argument, given the one before it, with ~ replaced in what is the path of a config file.

    Raises:
      UsageError: there is no such home folder.
    """
    flag, equals, path = arg.partition("=")
    try:
        if before == "--config":
            return expanded(arg, "--config")
        return f"{flag}={expanded(path, '--config')}" if flag == "--config" and equals else arg
    except UserError as error:
        raise UsageError(str(error)) from error


def _fields_set_to_none(argv: list[str]) -> dict[str, str]:
    """Arguments "--config.FIELD=None" that are allowed, with their FIELD; config_flags cannot parse them."""
    may_be_none = {f"--config.{field}=None": field for field, rule in RULES.items() if rule.allows(None)}
    return {arg: may_be_none[arg] for arg in argv if arg in may_be_none}


def _one_line(error: BaseException) -> str:
    """The text of an error in one line. config_flags puts a whole traceback into it, whose last line says what."""
    before, _, trace = str(error).strip().partition("Traceback (most recent call last):")
    last = trace.splitlines()[-1] if trace else ""
    return " ".join(f"{before} {last}".split())
